"""An online run from start to final model: starts its processes, assembles its parts, trains, and saves."""

import math
import time
from asyncio import CancelledError
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from rlhf_models.loading import load_config
from rlhf_rollout.host import quick_collection
from rlhf_rollout.protocols import RewardFunction
from rlhf_rollout.supervisor import RestartableEngine
from rlhf_train.cluster.ray_session import LostProcessError, is_unforeseen, unanswered
from rlhf_train.cluster.utilization import GpuWatch
from rlhf_train.controller import Controller
from rlhf_train.costs import PassCosts, pass_costs
from rlhf_train.evaluation import Evaluator
from rlhf_train.generation.patience import Patience
from rlhf_train.generation.recorded import RecordedRollouts
from rlhf_train.generation.rollouts import Rollouts
from rlhf_train.generation.scoring import make_reward
from rlhf_train.generation.stream import SampleStream
from rlhf_train.generation.turns import Turns
from rlhf_train.learning.learner import Learner
from rlhf_train.learning.ranks import RankSet
from rlhf_train.loop import train
from rlhf_train.online_job import OnlineJob, RunSummary
from rlhf_train.processes import mps_daemons, placed_bundles, ray_cluster, start_processes
from rlhf_train.report import Report
from rlhf_train.run.best_model import BestModel
from rlhf_train.run.checkpoint import Checkpoint, Checkpoints
from rlhf_train.run.checkpointing import Checkpointer, find_checkpoint, resumed_step
from rlhf_train.run.interrupts import Interrupts
from rlhf_train.run.ledger import Ledger
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import Recorder, check_save_path
from rlhf_train.run.timeline import Timeline
from rlhf_train.run.watch import Watch
from rlhf_train.tracing.trace import Trace, Track

_START = Track("controller", "start")
RESTART_INTERVAL_S = 3600.0


def run_online(job: OnlineJob, observer: Observer) -> RunSummary:
    """Run `job` from start to final model, or from its newest checkpoint.

    When a training process dies, all processes start again and continue from the newest checkpoint, if there is one,
    at most once in `RESTART_INTERVAL_S`.

    Raises:
        ConfigError: the job cannot run as configured.
        CheckpointError: the checkpoint to continue from belongs to another run.
        EngineError, RewardError, WeightSyncError: a part failed and retries did not help. `train_and_save` says what
            is saved before.
        Interrupted: SIGINT or SIGTERM. The state of the run is saved before.
    """
    check_save_path(job.save_path, resumes=job.checkpoints.resume)
    with Interrupts() as interrupts, Watch(observer) as watch, ExitStack() as stack, closing(interrupts):
        trace = Trace(is_on=job.timeline, notice=lambda text: observer.waiting(f"notice: {text}"))
        stack.callback(trace.close)
        timeline = Timeline(on_phase=watch.phase, trace=trace)
        checkpoint = find_checkpoint(job.checkpoints, job.save_path, observer)
        watch.starting("Ray")
        trace.state(_START, "Ray")
        stack.enter_context(ray_cluster(job.plan, job.ray_address))
        interrupts.listen()
        restarted_at = -math.inf
        while True:
            try:
                return run_processes(job, checkpoint, observer, timeline, interrupts, watch)
            except LostTrainerError as lost:
                interrupts.release()  # a death in an update left signals held; one that came meanwhile ends the run
                if time.monotonic() - restarted_at < RESTART_INTERVAL_S:
                    raise lost.error from None
                restarted_at = time.monotonic()
                job, checkpoint = continued(job, lost.error, observer)
                # The checkpoint has the seconds before it.
                timeline = Timeline(on_phase=watch.phase, trace=trace)


class LostTrainerError(Exception):
    """A training process died after the run had begun. `error` tells more."""

    def __init__(self, error: LostProcessError) -> None:
        super().__init__(str(error))
        self.error = error


def continued(job: OnlineJob, error: LostProcessError, observer: Observer) -> tuple[OnlineJob, Checkpoint]:
    """Return the job that continues a run whose training process died, and its checkpoint.

    Raises `error` when there is no checkpoint.
    """
    spec = job.checkpoints
    checkpoint = Checkpoints(spec.home(job.save_path)).newest_whole(observer.warning, spec.before)
    if checkpoint is None:
        observer.warning(
            "the run cannot continue by itself, because it has no checkpoint: ``CheckpointSpec.every=N`` saves them"
        )
        raise error
    observer.warning(f"{error}\nall processes start again and continue after step {checkpoint.step}")
    return replace(job, checkpoints=replace(job.checkpoints, resume=True)), checkpoint


def run_processes(
    job: OnlineJob,
    checkpoint: Checkpoint | None,
    observer: Observer,
    timeline: Timeline,
    interrupts: Interrupts,
    watch: Watch,
) -> RunSummary:
    """Start the processes of a run on a cluster, and run it, from `checkpoint` if there is one.

    Raises LostTrainerError when a training process dies after the start, and other errors like `run_online`.
    """
    with ExitStack() as stack:
        daemons = stack.enter_context(ExitStack())  # which end after the processes that use them
        reserved = stack.enter_context(placed_bundles(job.plan))
        watch.starting("engines and trainers")
        timeline.trace.state(_START, "engines and trainers")
        started_s = timeline.trace.now()
        watch.details = [unanswered]
        environs = daemons.enter_context(mps_daemons(job.plan, reserved, is_on=job.engine_mps))
        processes = start_processes(job, reserved, environs)
        timeline.trace.state(_START, None)
        timeline.trace.phase("start of engines and trainers", started_s, timeline.trace.now())
        kept = resumed_step(job.checkpoints, checkpoint)
        is_recorded = checkpoint is None or checkpoint.state()["is_recorded"]
        recorder = Recorder(
            job.save_path,
            job.config,
            job.trackers,
            observer,
            kept,
            is_recorded=is_recorded,
            record_format=job.record_format,
        )
        stack.enter_context(recorder)
        for code in job.own_code:
            code.record(recorder.folder)
        timeline.trace.open(recorder.path("timeline"))
        spec = replace(job.reward, sources=()) if job.replay else job.reward
        reward = make_reward(spec, processes.scorers, recorder.folder / "reward.log", timeline.trace)
        costs = {role: pass_costs(load_config(m.path), has_head=role != "critic") for role, m in job.models.items()}
        run = assemble(
            job,
            processes.engines,
            processes.workers,
            reward,
            recorder,
            observer,
            timeline,
            interrupts=interrupts,
            costs=costs,
            gpus=GpuWatch(processes.meters, job.plan, job.engine.dtype) if processes.meters else None,
        )
        run.report.add_final(processes.seconds)
        stack.callback(run.rollouts.close)
        watch.details.append(run.rollouts.pending)
        try:
            if checkpoint is not None:
                run.first_step = run.checkpointer.restore(checkpoint) + 1
            return train_and_save(job, run, recorder)
        except BaseException as error:
            watch.ending(error)
            if isinstance(error, LostProcessError):
                raise LostTrainerError(error) from error
            raise


def assemble(
    job: OnlineJob,
    engines: Sequence[RestartableEngine],
    rank_sets: Sequence[RankSet],
    reward: RewardFunction,
    recorder: Recorder,
    observer: Observer,
    timeline: Timeline,
    interrupts: Interrupts | None = None,
    costs: Mapping[str, PassCosts] | None = None,
    gpus: GpuWatch | None = None,
) -> Controller:
    """Construct the parts of a run, and the controller that calls them.

    Args:
        job: the run.
        engines: the generation engines, in the order of the plan.
        rank_sets: the training processes.
        reward: scores the rollouts.
        recorder: writes the run's folder.
        observer: shows the run on the terminal.
        timeline: made at the start of the run.
        interrupts: receives signals; None for nobody.
        costs: see `Learner`.
        gpus: see `Report`.
    """
    interrupts = interrupts or Interrupts()
    learner = Learner(job, rank_sets, costs)
    rollouts: Rollouts | RecordedRollouts
    if job.replay:
        rollouts = RecordedRollouts(Path(job.replay), job.batch.rollout_batch_size, job.models["actor"].masked_ids)
    else:
        stream = SampleStream(job.batch.rollout_batch_size, job.num_steps, job.max_staleness)
        rollouts = Rollouts(
            job,
            engines,
            learner,
            reward,
            stream,
            timeline,
            observer,
            agent_log=recorder.folder / "agent.log",
            clock=job.checkpoints.template_clock,
            settled=learner.forwards.settle if learner.forwards else None,
        )
    turns = Turns(
        rollouts,
        learner,
        timeline,
        engines_sleep=job.engine.enable_sleep,
        trainers_sleep=job.trainer_sleep,
        engines_asleep=job.engine.enable_sleep and job.plan.shares_gpus,
    )
    values = job.record and job.record_token_values
    report = Report(recorder, observer, timeline, job.num_steps, job.record, values, gpus, job.own_metrics)
    best = BestModel(job.best_metric, recorder.path("best model")) if job.best_metric else None
    every = job.eval_steps if job.eval_prompts else None
    evaluator = Evaluator(every, rollouts, learner, turns, report, timeline, best)
    patience = Patience(job.batch.rollout_batch_size, job.num_steps, observer)
    ledger = Ledger()
    resumable = {"learner": learner, "evaluator": evaluator, "patience": patience, "report": report}
    if isinstance(rollouts, Rollouts):  # recorded ones go on wherever they are asked to, and nothing is outstanding
        resumable |= {"rollouts": rollouts, "ledger": ledger}
    spec = job.checkpoints
    checkpoints = Checkpoints(spec.home(job.save_path), max_num=spec.max_num, max_bytes=spec.max_bytes)
    checkpointer = Checkpointer(spec, checkpoints, resumable, learner, recorder, timeline, observer)
    return Controller(
        num_steps=job.num_steps,
        shows_samples=not job.eval_prompts,
        runs_ahead=job.max_staleness > 0,
        rollouts=rollouts,
        learner=learner,
        turns=turns,
        evaluator=evaluator,
        patience=patience,
        report=report,
        timeline=timeline,
        ledger=ledger,
        checkpointer=checkpointer,
        interrupts=interrupts,
    )


def train_and_save(job: OnlineJob, run: Controller, recorder: Recorder) -> RunSummary:
    """Run all steps, save the models, and return the final metrics and the paths of all artifacts.

    After an error, what was learned is saved: the models, and also the state of the run, except after an error within
    an update. If a rank raised an error that nobody foresaw, this is done only where no other rank can wait for it.
    """
    try:
        with quick_collection():
            train(run)
        save_models(job, run, recorder)
        run.checkpointer.close()
    except (KeyboardInterrupt, CancelledError):
        save_what_is_left(job, run, recorder, models=False)
        raise
    except Exception as error:
        has_peers = any(placed.num_ranks > 1 for placed in job.plan.trainers)
        save_what_is_left(job, run, recorder, models=True, by_ranks=not (has_peers and is_unforeseen(error)))
        raise
    run.learner.show_in(run.timeline.trace)
    run.report.add_final({"memory/trainer_peak_bytes": float(run.learner.peak_memory_bytes())})
    return run.report.finish()


def save_what_is_left(
    job: OnlineJob, run: Controller, recorder: Recorder, *, models: bool, by_ranks: bool = True
) -> None:
    """Save as much as the end of a failed or interrupted run allows, what ranks have only with `by_ranks`. What cannot
    be saved is a warning."""
    observer = run.report.observer
    run.interrupts.close()  # a second signal must not end the writing
    observer.stopping()
    live = run.learner.live_roles() if by_ranks else set()
    all_live = live == job.models.keys()
    if job.checkpoints.full and not models and not all_live:  # an error says by itself why the run ends
        missing = ", ".join(sorted(job.models.keys() - live))
        observer.warning(f"no checkpoint is saved now, because these models' processes do not answer: {missing}")
    try:
        run.report.write_rollouts()
        if all_live and not run.interrupts.is_held:
            if run.checkpointer.is_behind:
                observer.notice("the run saves a checkpoint, then ends")
            run.checkpointer.save()
        if models and "actor" in live:
            save_models(job, run, recorder, live)
    except Exception as error:  # which must not hide the one that ends the run
        observer.warning(f"not everything was saved: {error}")
    run.checkpointer.close(ranks_live=all_live)


def save_models(job: OnlineJob, run: Controller, recorder: Recorder, live: Collection[str] | None = None) -> None:
    """Save the actor, a draft model that was trained, and, if the job asks for them, the actor's moving average and the
    critic. Of critic and draft model only what is `live`, if that is given."""
    if not job.saves_models:
        return
    run.turns.give_to_trainers()
    with run.timeline.phase("save"):
        run.learner.save("actor", str(recorder.path("final model")))
        if job.ema_beta is not None:
            run.learner.save_average(str(recorder.path("averaged model")))
        live = job.models.keys() if live is None else live
        if job.save_critic and "critic" in live:
            run.learner.save("critic", str(recorder.path("critic")))
        if "draft" in live:
            run.learner.save("draft", str(recorder.path("draft model")))
