"""The order of events in an online run. Other files implement the events."""

from dataclasses import dataclass

from rlhf_data.records import RolloutGroup
from rlhf_train.evaluation import Evaluator
from rlhf_train.generation.patience import Patience
from rlhf_train.generation.rollouts import Rollouts
from rlhf_train.generation.summaries import episode_ids, scored
from rlhf_train.generation.turns import Turns
from rlhf_train.learning.learner import Learner
from rlhf_train.report import Report
from rlhf_train.run.checkpointing import Checkpointer
from rlhf_train.run.interrupts import Interrupts
from rlhf_train.run.ledger import Ledger
from rlhf_train.run.timeline import Timeline


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Controller:
    """Calls the parts of a run in order. `loop` calls its methods, one per line of the algorithm.

    Attributes:
        num_steps: largest number of steps; the run ends earlier when it `is_exhausted`.
        shows_samples: whether rollouts of the first and the last step are shown, as no evaluation shows any.
        runs_ahead: whether generation goes on while the learner works.
        first_step: 1, or the step after the checkpoint from which the run continues.
    """

    num_steps: int
    shows_samples: bool
    runs_ahead: bool
    rollouts: Rollouts
    learner: Learner
    turns: Turns
    evaluator: Evaluator
    patience: Patience
    report: Report
    timeline: Timeline
    ledger: Ledger
    checkpointer: Checkpointer
    interrupts: Interrupts
    first_step: int = 1
    _batch: tuple[RolloutGroup, ...] = ()

    @property
    def is_exhausted(self) -> bool:
        """Whether dynamic sampling finds nothing to learn from any more."""
        return self.patience.is_exhausted

    def start(self) -> None:
        """Send the weights to the engines, evaluate the initial ones, and start the clock of the first step.

        A run that continues ends the step after whose updates it was interrupted.
        """
        self.sync_weights()
        self.report.end_part("startup")
        if self.first_step == 1:
            self.evaluate(0)
            self.evaluator.finish()
        self.report.end_part("first_evaluation")
        if (step := self.evaluator.cut_off) is not None and step == self.first_step - 1:
            self.evaluate(step)
        if (step := self.checkpointer.unrecorded_step) is not None:
            self.evaluate(step)
            self.record(step)
            self.checkpoint(step)

    def generate(self, step: int) -> None:
        """Have prompts answered and scored, and take the batch to learn from."""
        self.turns.give_to_engines()
        drawn = self.rollouts.next_batch(step)
        self._batch = drawn.batch
        # Rollouts fail in two places: whole groups in an engine, and single rollouts in the reward.
        num_rollouts = sum(len(group.rollouts) for group in drawn.groups)
        num_failed = num_rollouts - len(scored(drawn.groups))
        # An episode that became several rollouts was requested as one.
        num_further = num_rollouts - sum(len(group.episodes) for group in drawn.groups)
        self.ledger.add(
            requested=drawn.num_requested + num_further,
            failed=drawn.num_failed + num_failed,
            filtered=len(scored(drawn.dropped)),
            stale=len(scored(drawn.stale)),
        )
        self._check_ledger(taken=len(scored(self._batch)))  # before a rollout is trained twice
        self.learner.observe(scored(drawn.groups))
        self.patience.observe(drawn.groups)
        self.report.rollouts(step, drawn)
        if self.shows_samples and step in (1, self.num_steps):
            self.report.samples(f"Samples of step {step}", drawn.groups)

    def can_learn(self) -> bool:
        """Return whether the batch has a reward to learn from. Raises RewardError when rewards keep failing."""
        can_learn = self.patience.can_learn(self._batch, self.ledger.step)
        if not can_learn:
            self.learner.skip()
            self.rollouts.release(self.learner.policy_version)
        return can_learn

    def make_experience(self, step: int) -> None:
        """Send the batch to the ranks, and compute old log-probs, reference log-probs and values."""
        self.turns.give_to_trainers()
        with self.timeline.phase("load"):
            sources = {group.group_id: group.prompt.source for group in self._batch}
            self.report.add(self.learner.deal(scored(self._batch), step, episode_ids(self._batch), sources))
        self.report.write_rollouts()
        with self.timeline.phase("experience"):
            self.report.add(self.learner.fill_columns())

    def assign_advantages(self) -> None:
        """Compute advantages and returns from the rewards."""
        with self.timeline.phase("experience"):
            self.report.add(self.learner.assign_advantages())

    def update(self, step: int) -> None:
        """Update the critic and the actor on the batch.

        Meanwhile the models and the other parts of the run are between two states that could be saved, so signals wait.
        """
        if self.evaluator.best is not None:
            self.evaluator.finish()  # while the actor has the weights that are evaluated
        self.interrupts.hold()
        with self.timeline.phase("train"):
            metrics, num_trained = self.learner.update(step)
        self.report.add(metrics)
        self.report.token_values(step, self.learner.token_values)
        self.ledger.add(trained=num_trained)
        self._check_ledger()
        self.checkpointer.remember(step)
        self.interrupts.release()

    def sync_weights(self) -> None:
        """Send the actor's weights to the engines, unless they have this version already.

        An evaluation of the old weights is waited for. From here on, further prompts may be admitted.
        """
        version = self.learner.policy_version
        if self.rollouts.policy_version != version:
            self.evaluator.finish()
            self.turns.give_to_engines()
            with self.timeline.phase("sync"):
                self.rollouts.synchronize(version)
            self.report.add({"sync/size_bytes": self.learner.weights_bytes})
        self.rollouts.release(version)

    def evaluate(self, step: int) -> None:
        """Evaluate on the held-out prompts at the start, at the end, and every `eval_steps` steps in between.

        If generation goes on while the learner works, so does the evaluation, until the weights change, the next one is
        due, or a checkpoint, from which another process could not go on with it.
        """
        is_last = step == self.num_steps or self.is_exhausted
        if self.evaluator.is_due(step, is_last=is_last):
            self.evaluator.start(step, is_last=is_last)
        if is_last or not self.runs_ahead or self.checkpointer.is_due(step):
            self.evaluator.finish()

    def record(self, step: int) -> None:
        """Check that no rollout was lost, and report the step."""
        self._check_ledger()
        self.report.write_rollouts()
        self.report.add(self.ledger.close_step())
        self.report.step(step, self.learner.flops)
        self.learner.flops.clear()
        self.learner.show_in(self.timeline.trace)

    def checkpoint(self, step: int) -> None:
        """Save the state of the run if that is due. Signals wait, so that the checkpoint becomes whole."""
        self.interrupts.hold()
        self.checkpointer.after_step(step, self.evaluator.deciding_metric(step))
        self.interrupts.release()

    def _check_ledger(self, taken: int = 0) -> None:
        """Raise RlhfError unless every rollout is accounted for; `taken` are about to be trained."""
        self.ledger.check(outstanding=self.rollouts.num_outstanding + taken)
