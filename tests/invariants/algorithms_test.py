"""Invariant 3 for every algorithm: however a step's work is split into micro-batches, data-parallel ranks, ZeRO stages
and packed or padded rows, the update is the same; and over many steps what rounding leaves of it has no direction."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rlhf_data.records import FinishReason, Rollout, Span, SpanSource
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_rollout.host import free_port, local_gpus
from rlhf_train.algorithms import table as tables
from rlhf_train.algorithms.group import relative_rewards
from rlhf_train.algorithms.table import AlgorithmSpec, make_algorithm
from rlhf_train.algorithms.table import CorrectionSpec as Correction
from rlhf_train.batching import Denominators, plan_batches
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import random_rollouts, run_ranks

ON_GPU = local_gpus() > 0
NUM_ROLLOUTS, NUM_STEPS, VOCAB_SIZE, MAX_TOKENS = 32, 14, 512, 24

# As in split_cases.py: an epsilon above rounding, and the largest difference of a weight after updates of 1e-2 each.
ADAM = OptimizerSpec(learning_rate=1e-2, eps=1e-4, scheduler="constant", max_norm=1.0)
TOLERANCE = 2e-5
# With this epsilon and without momentum, Adam is gradient descent: an update is the gradient times rate / epsilon.
DESCENT_EPSILON = 10.0
# A residual is what a split adds to the whole batch's update along its own direction, as a share of it; of one step in
# the middle of all. The median, for a token whose ratio rounding moves over the edge of a clip range is no error.
MEDIAN_RESIDUAL = 1e-5
# Standard errors that the mean of the residuals over all steps may be away from 0: one in 10,000 of Student's t with 13
# degrees of freedom is farther.
MAX_ERRORS = 5.5


@dataclasses.dataclass(frozen=True)
class Case:
    """An algorithm with what is switched on in it; `rate` makes the updates of gradient descent about 0.05 long, which
    moves ratios by several per cent and leaves the weights where a split's rounding does not grow from step to step."""

    algorithm: AlgorithmSpec
    rate: float
    max_epochs: int = 2
    ema_beta: float | None = None


CASES = {
    "gae": Case(make_algorithm(
        estimator="gae", gamma=0.99, lambd=0.95, bootstrap_truncated=True, kl_coef=0.05, dual_clip=1.05,
        clip_low=0.01, clip_high=0.01, correction=Correction(level="sequence", mode="mask", low=0.7, high=1.4),
    ), rate=0.1, ema_beta=0.8),
    "reinforce": Case(make_algorithm(
        estimator="reinforce", gamma=0.95, kl_coef=0.05, kl_estimator="k2", old_logprobs="rollout",
        reduction="seq_mean_token_sum", entropy_coef=0.01, clip_low=0.1, clip_high=0.1,
    ), rate=0.02),
    "reinforce_baseline with CISPO": Case(make_algorithm(
        estimator="reinforce_baseline", policy_loss="cispo", kl_coef=0, entropy_coef=0.01, clip_low=0.01,
        clip_high=0.01, correction=Correction(level="token", mode="truncate", low=0.0, high=1.1),
    ), rate=0.1, ema_beta=0.8),
    "group_norm with GSPO": Case(make_algorithm(
        estimator="group_norm", policy_loss="gspo", kl_coef=0.05, kl_estimator="k3", use_kl_loss=True,
        kl_unbiased_gradient=True, clip_low=3e-4, clip_high=4e-4,
        correction=Correction(level="geometric", mode="mask", low=0.97, high=1.03),
    ), rate=0.1),
    "group_norm as DAPO": Case(make_algorithm(
        estimator="group_norm", reduction="token_mean", kl_coef=0, clip_low=0.01, clip_high=0.02,
        correction=Correction(level="token", mode="mask", low=0.85, high=1.15),
    ), rate=0.2),
    "dr_grpo": Case(make_algorithm(
        estimator="dr_grpo", kl_coef=0.05, kl_estimator="k2", use_kl_loss=True, clip_low=0.01, clip_high=0.01,
        correction=Correction(level="geometric", mode="truncate", low=0.95, high=1.05),
    ), rate=0.5),
    "rloo": Case(make_algorithm(
        estimator="rloo", kl_coef=0.05, kl_estimator="k3", clip_low=0.01, clip_high=0.01,
        correction=Correction(level="sequence", mode="truncate", low=0.5, high=1.3),
    ), rate=0.02),
    "rloo with the plain gradient": Case(make_algorithm(
        estimator="rloo", policy_loss="reinforce", kl_coef=0.05, kl_estimator="k1", use_kl_loss=True,
        kl_unbiased_gradient=True, old_logprobs="skip",
    ), rate=0.02, max_epochs=1),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to split the same work; `micro_batch_size` is of one rank."""

    zero_stage: int = 0
    micro_batch_size: int = NUM_ROLLOUTS
    packing: bool = False


WHOLE = Layout()
ONE_RANK = {"4 x 8, packed, ZeRO 2": Layout(2, 8, True), "8 x 4, padded, ZeRO 3": Layout(3, 4)}
TWO_RANKS = {
    "4 x 4 a rank, padded, ZeRO 0": Layout(0, 4),
    "1 x 16 a rank, packed, ZeRO 2": Layout(2, 16, True),
    "2 x 8 a rank, packed, ZeRO 3": Layout(3, 8, True),
}
# Each algorithm takes one step in both splits on one rank and in one on two, and many steps in one split of all.
SHORT = {name: {"whole", *ONE_RANK, [*TWO_RANKS][index % 3]} for index, name in enumerate(CASES)}
LONG = {name: [*ONE_RANK, *TWO_RANKS][index % 5] for index, name in enumerate(CASES)}
FALSIFIED = "group_norm as DAPO"  # the algorithm whose denominators are made wrong


def mean_of_each_micro_batch(counts: Denominators, mask: Any, num_micro_batches: int) -> Denominators:
    """What a trainer gets that averages within micro-batches, and then the averages."""
    tokens, sequences = int(mask.sum()), int(mask.any(dim=1).sum())
    return Denominators(tokens * num_micro_batches, sequences * num_micro_batches, counts.max_tokens)


def a_millionth_too_small(counts: Denominators, mask: Any, num_micro_batches: int) -> Denominators:
    """An error that no tolerance of float32 would find."""
    return Denominators(counts.num_tokens * (1 - 1e-6), counts.num_sequences, counts.max_tokens)  # type: ignore[arg-type]


WRONG_DENOMINATORS = (mean_of_each_micro_batch, a_millionth_too_small)


@dataclasses.dataclass
class Trainer:
    """One rank's worker for a case in a layout."""

    case: Case
    layout: Layout
    optimizer: OptimizerSpec
    paths: dict[str, str]
    rank: int
    num_ranks: int
    master: Any

    def __post_init__(self) -> None:
        from rlhf_train.learning.worker import TrainWorker

        spec = self.case.algorithm
        self.roles = ["actor", *(["critic"] if spec.row.uses_critic else [])]
        models = {
            role: ModelSpec(
                path=path,
                packing=self.layout.packing,
                zero_stage=self.layout.zero_stage,
                optimizer=self.optimizer if role != "reference" else None,
            )
            for role, path in self.paths.items()
            if role in self.roles or (role == "reference" and spec.uses_reference)
        }
        device = "cuda" if ON_GPU and self.num_ranks == 1 else "cpu"
        self.worker = TrainWorker(
            models, spec, temperature=0.8, rank=self.rank, num_ranks=self.num_ranks, master=self.master, device=device,
            seed=0, ema_beta=self.case.ema_beta,
        )  # fmt: skip
        self.frozen = [role for role in models if role != "actor" or spec.old_logprobs == "recompute"]

    def step(self, rollouts: Sequence[Rollout], seed: int) -> dict[str, float]:
        """Train on `rollouts` as a step of a run does; return what was measured."""
        from rlhf_train.run.metrics import merge_metrics, results

        spec, worker = self.case.algorithm, self.worker
        rewards = relative_rewards(
            np.array([rollout.verdict.reward for rollout in rollouts]),
            [rollout.group_id for rollout in rollouts],
            spec.row.baseline,
            divide_by_std=spec.whiten_std,
        )
        plan = plan_batches(
            [rollout.num_tokens for rollout in rollouts],
            [rollout.num_response_tokens for rollout in rollouts],
            num_ranks=self.num_ranks, num_mini_batches=1, micro_train_batch_size=self.layout.micro_batch_size,
            micro_rollout_batch_size=self.layout.micro_batch_size, max_response_tokens=MAX_TOKENS, seed=seed,
        )[self.rank]  # fmt: skip
        worker.load_rollouts(
            RolloutColumns.of([rollouts[row] for row in plan.rows], [float(rewards[row]) for row in plan.rows]), plan
        )
        metrics = [worker.run_model(role) for role in self.frozen]
        metrics.append(worker.assign_advantages(spec.kl_coef))
        options = {"max_epochs": self.case.max_epochs, "seed": seed, "kl_coef": spec.kl_coef}
        metrics += [worker.update(role, **options) for role in reversed(self.roles)]
        return results(merge_metrics(metrics))

    def weights(self) -> dict[str, np.ndarray]:
        """Return the weights of all models that are trained, whole and flat."""
        engines = self.worker.engines
        return {
            role: np.concatenate([t.float().cpu().numpy().ravel() for t in engines[role].state_dict().values()])
            for role in self.roles
        }

    def falsify(self, wrong: Callable[..., Denominators]) -> None:
        """Divide the actor's losses by something else."""
        right = self.worker._actor_loss

        def actor_loss(rows: Any, counts: Denominators, *rest: Any) -> Any:
            [batch] = self.worker._plan.mini_batches
            left = self.worker._experience.policy_mask[rows]
            return right(rows, wrong(counts, left, len(batch.micro_batches)), *rest)

        self.worker._actor_loss = actor_loss


def one_step(trainer: Trainer, rollouts: Sequence[Rollout], folder: str) -> dict[str, Any]:
    """Return the weights after one step, their average with it where one is kept, and what was measured."""
    from safetensors.numpy import load_file

    metrics, weights = trainer.step(rollouts, seed=3), {}
    if trainer.case.ema_beta is not None:
        trainer.worker.save_average(folder)
        if trainer.rank == 0:
            saved = load_file(f"{folder}/model.safetensors")
            weights["average"] = np.concatenate([saved[name].ravel() for name in sorted(saved)])
    return {"weights": weights | trainer.weights(), "metrics": metrics}


def many_steps(trainer: Trainer, batches: Sequence[Sequence[Rollout]]) -> dict[str, np.ndarray]:
    """Return the update of every step, [steps, weights] for each model."""
    updates: dict[str, list[np.ndarray]] = {role: [] for role in trainer.roles}
    weights = trainer.weights()
    for seed, rollouts in enumerate(batches):
        trainer.step(rollouts, seed)
        before, weights = weights, trainer.weights()
        for role in updates:
            updates[role].append(weights[role] - before[role])
    return {role: np.stack(parts) for role, parts in updates.items()}


def all_runs(
    rank: int, num_ranks: int, master: Any, layouts: dict[str, Layout], names: Sequence[str], paths: dict[str, str],
    batches: Any, folder: str,
) -> dict[str, Any]:  # fmt: skip
    """Run the cases `names` in one process, for the imports take longer than the work."""
    outcomes: dict[str, Any] = {"short": {}, "long": {}, "wrong": {}}
    for name in names:
        case = CASES[name]
        descent = OptimizerSpec(
            learning_rate=case.rate, betas=(0.0, 0.9), eps=DESCENT_EPSILON, scheduler="constant", max_norm=0.0
        )
        for label, layout in layouts.items():
            common = {"layout": layout, "paths": paths, "rank": rank, "num_ranks": num_ranks, "master": master}
            if label in SHORT[name]:
                trainer = Trainer(case, optimizer=ADAM, **common)
                outcomes["short"][name, label] = one_step(trainer, batches[0], f"{folder}/{name}/{label}")
            if label in ("whole", LONG[name]):
                outcomes["long"][name, label] = many_steps(Trainer(case, optimizer=descent, **common), batches)
            if name == FALSIFIED and label in ONE_RANK and layout.zero_stage == 2:
                for wrong in WRONG_DENOMINATORS:
                    trainer = Trainer(case, optimizer=descent, **common)
                    trainer.falsify(wrong)
                    outcomes["wrong"][wrong.__name__] = many_steps(trainer, batches)
    return outcomes if rank == 0 else {"short": outcomes["short"]}


def rollouts_near(path: str, seed: int) -> list[Rollout]:
    """Random rollouts, a third of them truncated and one without a response, whose engine is a little off the model."""
    import torch

    from rlhf_models.batch import TokenBatch
    from rlhf_models.loading import load_actor

    rng = np.random.default_rng(seed)
    rollouts = random_rollouts(NUM_ROLLOUTS, vocab_size=VOCAB_SIZE, seed=seed)
    with torch.no_grad():
        batch = TokenBatch.padded([rollout.token_ids for rollout in rollouts], pad_id=0)
        logprobs = load_actor(path, dtype="float32").eval()(batch, temperature=0.8).logprobs.numpy()
    made = []
    for row, rollout in enumerate(rollouts):
        spans, start = [], 0
        for span in rollout.spans:
            end = start + len(span.token_ids)
            if span.source is SpanSource.POLICY:
                span = dataclasses.replace(span, logprobs=logprobs[row, start:end] + rng.normal(0, 0.1, end - start))
            spans.append(span)
            start = end
        if row == 2:
            spans = [spans[0], Span(SpanSource.POLICY, [], [], policy_version=0)]
        reason = FinishReason.LENGTH if row % 3 == 0 else FinishReason.STOP
        made.append(dataclasses.replace(rollout, spans=tuple(spans), finish_reason=reason))
    return made


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "actor": str(tiny_model_dir(folder / "actor", vocab_size=VOCAB_SIZE)),
        "reference": str(tiny_model_dir(folder / "reference", vocab_size=VOCAB_SIZE, seed=1)),
        "critic": str(tiny_reward_model_dir(folder / "critic", vocab_size=VOCAB_SIZE)),
    }


@pytest.fixture(scope="module")
def batches(paths) -> list[list[Rollout]]:
    return [rollouts_near(paths["actor"], seed) for seed in range(NUM_STEPS)]


@pytest.fixture(scope="module")
def on_one_rank(paths, batches, tmp_path_factory) -> dict[str, Any]:
    """The runs on one rank: of half the cases in a process of their own, and meanwhile of the others in this one."""
    layouts, folder = {"whole": WHOLE, **ONE_RANK}, str(tmp_path_factory.mktemp("averages"))
    names = list(CASES)
    with ThreadPoolExecutor(1) as pool:
        half = pool.submit(run_ranks, all_runs, 1, layouts, names[1::2], paths, batches, folder)
        own = all_runs(0, 1, ("127.0.0.1", free_port()), layouts, names[::2], paths, batches, folder)
        [other] = half.result()
    return {kind: own[kind] | other[kind] for kind in own}


@pytest.fixture(scope="module")
def on_two_ranks(paths, batches, tmp_path_factory) -> list[dict[str, Any]]:
    return run_ranks(all_runs, 2, TWO_RANKS, list(CASES), paths, batches, str(tmp_path_factory.mktemp("averages")))


def largest_differences(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: float(np.abs(one[name] - other[name]).max()) for name in other}


def residuals(updates: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return, a step, <u - w, w> / <w, w> of a split's update u and the whole batch's w."""
    updates, whole = updates.astype(np.float64), whole.astype(np.float64)
    return ((updates - whole) * whole).sum(axis=1) / (whole**2).sum(axis=1)


def is_small(residual: np.ndarray) -> bool:
    return bool(np.median(np.abs(residual)) < MEDIAN_RESIDUAL)


def has_no_direction(residual: np.ndarray) -> bool:
    """Whether the mean is 0.0 as far as its standard error lets one tell."""
    return bool(abs(residual.mean()) <= MAX_ERRORS * residual.std(ddof=1) / len(residual) ** 0.5)


def test_cases_have_every_row_of_every_table():
    specs = [case.algorithm for case in CASES.values()]
    assert {spec.estimator for spec in specs} == set(tables.ALGORITHMS)
    assert {spec.objective.policy_loss for spec in specs} == set(tables.POLICY_LOSSES)
    assert {spec.objective.reduction for spec in specs} == set(tables.REDUCTIONS)
    assert {spec.old_logprobs for spec in specs} == set(tables.OLD_LOGPROBS)
    corrections = {(spec.correction.level, spec.correction.mode) for spec in specs} - {("off", "truncate")}
    assert corrections == set(itertools.product(tables.CORRECTION_LEVELS[1:], tables.CORRECTION_MODES))


@pytest.mark.parametrize("name", CASES)
def test_what_a_case_switches_on_is_at_work(on_one_rank, name):
    spec, outcome = CASES[name].algorithm, on_one_rank["short"][name, "whole"]
    metrics = outcome["metrics"]
    if spec.correction.level != "off":
        assert 0.05 < metrics["mismatch/out_of_bounds"] < 0.6
    if spec.loss.uses_ratio:
        assert 0.1 < metrics["policy/clip_fraction"] < 0.9
    if spec.uses_reference:
        assert metrics["kl/reference"] > 0.01
    if CASES[name].ema_beta is not None:
        assert np.abs(outcome["weights"]["average"].sum() - outcome["weights"]["actor"].sum()) > 1e-3


@pytest.mark.parametrize("label", ONE_RANK)
@pytest.mark.parametrize("name", CASES)
def test_split_on_one_rank_gives_the_same_update(on_one_rank, name, label):
    whole, split = on_one_rank["short"][name, "whole"], on_one_rank["short"][name, label]
    differences = largest_differences(whole["weights"], split["weights"])
    assert differences and max(differences.values()) < TOLERANCE, differences
    norms = [key for key in whole["metrics"] if key.endswith("/grad_norm")]
    assert [split["metrics"][key] for key in norms] == pytest.approx([whole["metrics"][key] for key in norms], rel=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_split_over_two_ranks_gives_the_same_update(on_one_rank, on_two_ranks, name):
    whole = on_one_rank["short"][name, "whole"]
    [label] = SHORT[name] & set(TWO_RANKS)
    for rank in on_two_ranks:
        differences = largest_differences(whole["weights"], rank["short"][name, label]["weights"])
        assert differences and max(differences.values()) < TOLERANCE, (label, differences)


@pytest.mark.parametrize("name", CASES)
def test_residual_of_a_split_over_many_steps_is_small_and_has_no_direction(on_one_rank, on_two_ranks, name):
    label = LONG[name]
    split = (on_one_rank if label in ONE_RANK else on_two_ranks[0])["long"][name, label]
    for role, whole in on_one_rank["long"][name, "whole"].items():
        residual = residuals(split[role], whole)
        assert len(residual) == NUM_STEPS
        assert is_small(residual), (role, residual)
        # Two ranks are on CPUs always: a direction would be the devices', whose exponentials round differently.
        assert (ON_GPU and label in TWO_RANKS) or has_no_direction(residual), (role, residual)


def test_means_of_micro_batches_fail_by_their_size(on_one_rank):
    wrong = on_one_rank["wrong"][mean_of_each_micro_batch.__name__]["actor"]
    residual = residuals(wrong, on_one_rank["long"][FALSIFIED, "whole"]["actor"])
    assert not is_small(residual / 1000)


def test_error_that_is_small_enough_fails_by_its_direction(on_one_rank):
    wrong = on_one_rank["wrong"][a_millionth_too_small.__name__]["actor"]
    residual = residuals(wrong, on_one_rank["long"][FALSIFIED, "whole"]["actor"])
    assert is_small(residual) and not has_no_direction(residual)
