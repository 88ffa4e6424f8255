"""Whole runs that draw prompts by pass rates or keep right answers: what decides, what counts, how they continue."""

import asyncio

import numpy as np
import pytest

from online_fakes import OWN_METRICS, Forgets, by_step, tiny_batch
from rlhf_data.records import Prompt, Verdict, VerdictKind
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.generation.difficulty import DifficultySpec
from rlhf_train.generation.mixing import MixSpec
from rlhf_train.generation.reuse import ReuseSpec
from rlhf_train.generation.run_spec import AsyncSpec, DynamicSampling
from rlhf_train.online import train_and_save
from rlhf_train.online_job import CheckpointSpec
from rlhf_train.run.checkpoint import Checkpoints

PROMPTS = tuple(Prompt(f"p{index}", np.array([index, 1]), f"p{index}", source="ab"[index % 2]) for index in range(20))

MOST = OwnCode("keep_group", "/nowhere/mine.py", "def keep_group(group): return group.is_right.sum() < 3")


class Graded:
    """Solves the prompt with index i in i % 5 of 4 samples."""

    async def score(self, prompt, rollouts):
        kinds = [VerdictKind.OK] * (prompt.token_ids[0] % 5) + [VerdictKind.WRONG] * 4
        return [Verdict(kind, float(kind is VerdictKind.OK)) for kind, _ in zip(kinds, rollouts, strict=False)]

    async def close(self):
        pass


def answer_at_random_times(run, seed):
    generate, generator = run.world.generate, np.random.default_rng(seed)

    async def generated(*arguments, **options):
        await asyncio.sleep(generator.random() / 50)
        return await generate(*arguments, **options)

    run.world.generate = generated


@pytest.fixture
def pool_run(make_run, tmp_path):
    def make(name, seed=0, **changes):
        options = {"prompts": PROMPTS, "batch": tiny_batch(8), "num_steps": 6, "difficulty": DifficultySpec()}
        run = make_run(Graded(), **{**options, "save_path": str(tmp_path / name), **changes})
        answer_at_random_times(run, seed)
        return run

    return make


def trained(run):
    """The indices of the prompts of each batch, in the order in which they were drawn."""
    groups = [{one.rollout_id.rpartition("/")[0]: int(one.token_ids[0]) for one in each} for each in run.world.rollouts]
    return [[item for _, item in sorted(batch.items())] for batch in groups]


@pytest.mark.parametrize(
    ("dynamic", "difficulty"),
    [
        (None, DifficultySpec()),
        (DynamicSampling(max_batches=3), DifficultySpec()),
        (None, MixSpec(mix_temperature=0.3)),
        (DynamicSampling(max_batches=3, own_filter=MOST), MixSpec(mix_temperature=0.3)),
    ],
)
def test_draws_depend_on_pass_rates_and_not_on_times_or_interruptions(pool_run, tmp_path, dynamic, difficulty):
    saving = CheckpointSpec(folder=str(tmp_path / "checkpoints"), every=3)
    options = {"dynamic_sampling": dynamic, "difficulty": difficulty, "own_metrics": OWN_METRICS}
    whole = pool_run("whole", **options, checkpoints=saving)
    train_and_save(whole.job, whole.controller, whole.recorder)
    other = pool_run("other", seed=1, **options, max_in_flight=3)
    train_and_save(other.job, other.controller, other.recorder)
    assert trained(whole) == trained(other)
    checkpoint = next(found for found in Checkpoints(tmp_path / "checkpoints").all() if found.step == 3)
    resumed = pool_run("resumed", seed=2, **options)
    resumed.controller.first_step = resumed.controller.checkpointer.restore(checkpoint) + 1
    train_and_save(resumed.job, resumed.controller, resumed.recorder)
    assert trained(resumed) == trained(whole)[3:]
    [mine, same, rest] = [
        [
            {name: line[name] for name in line if name.startswith(("pool/", "mix/", "own/"))}
            for line in by_step(run.lines())
        ]
        for run in (whole, other, resumed)
    ]
    assert mine == same and rest == mine[3:] and len(mine[0]) >= 4
    if isinstance(difficulty, MixSpec):  # of both sources, two of five prompts are always or never solved
        assert 0.5 == mine[0]["mix/share_a"] != mine[-1]["mix/share_a"]
        return
    # Prompts of the pass rates 0.25 to 0.75 have at least half of the largest weight, and the pass rate 0 has none.
    later = np.concatenate(trained(whole)[3:]) % 5
    assert np.isin(later, [1, 2, 3]).mean() > 0.6 and (dynamic is None or np.isin(later, [1, 2, 3]).all())


def test_metrics_are_those_of_what_was_drawn(pool_run):
    run = pool_run("run", batch=tiny_batch(20), num_steps=2)
    assert run.step(1)
    run.world.failing = 1  # even ones: a visit that nobody scored changes no pass rate
    assert run.step(2)
    first, second = by_step(run.lines())
    assert (first["pool/unseen"], first["pool/mean_pass_rate"], first["pool/solved"]) == (0, 0.5, 0)
    # Of the four prompts that are always solved, two were visited twice; the others failed.
    assert (second["pool/unseen"], second["pool/mean_pass_rate"], second["pool/solved"]) == (0, 0.5, 0.1)


def test_all_solved_is_a_notice(pool_run):
    spec = DifficultySpec(pool_retire_visits=1)
    run = pool_run("run", prompts=PROMPTS[4::5], batch=tiny_batch(4), difficulty=spec, num_steps=2)
    run.listener.notice = (notices := []).append
    assert run.step(1) and run.step(2)
    assert notices == ["all 4 prompts are solved: they are drawn again"] * 2
    assert [sorted(batch) for batch in trained(run)] == [[4, 9, 14, 19]] * 2


def test_asynchronous_run_continues_with_the_pool_of_its_checkpoint(pool_run, tmp_path):
    saving = CheckpointSpec(folder=str(tmp_path / "checkpoints"), every=3)
    options = {"asynchronous": AsyncSpec(max_staleness=2), "checkpoints": saving}
    first = pool_run("first", **options)
    first.controller.start()
    for step in (1, 2, 3, 4):
        first.step(step)
    first.controller.checkpointer.close()
    [checkpoint] = Checkpoints(tmp_path / "checkpoints").all()
    second = pool_run("second", **options)
    second.controller.first_step = second.controller.checkpointer.restore(checkpoint) + 1
    saved, restored = checkpoint.state()["rollouts"]["order"], second.controller.rollouts.state()["order"]
    assert saved.keys() == restored.keys() and np.isfinite(saved["pass_rates"]).any()
    assert all(np.array_equal(saved[name], restored[name], equal_nan=name == "pass_rates") for name in saved)
    train_and_save(second.job, second.controller, second.recorder)
    counts = second.controller.ledger.run
    assert (counts.requested, counts.trained, counts.failed) == (6 * 32, 6 * 32, 0)
    assert by_step(second.lines())[-1]["pool/unseen"] < 1


@pytest.mark.parametrize("dynamic", [None, DynamicSampling(max_batches=3)])
def test_right_answers_of_earlier_steps_are_trained_in_the_place_of_wrong_ones(make_run, tmp_path, dynamic):
    def run_of(name, seed, **changes):
        options = {"prompts": PROMPTS, "batch": tiny_batch(8), "num_steps": 6, "dynamic_sampling": dynamic}
        run = make_run(
            Forgets(), reuse=ReuseSpec(reuse_solved=99), save_path=str(tmp_path / name), **options, **changes
        )
        answer_at_random_times(run, seed)
        return run

    whole = run_of("whole", 0, checkpoints=CheckpointSpec(folder=str(tmp_path / "checkpoints"), every=3))
    train_and_save(whole.job, whole.controller, whole.recorder)
    checkpoint = next(found for found in Checkpoints(tmp_path / "checkpoints").all() if found.step == 3)
    resumed = run_of("resumed", 1)
    resumed.controller.first_step = resumed.controller.checkpointer.restore(checkpoint) + 1
    train_and_save(resumed.job, resumed.controller, resumed.recorder)
    batches = [
        [
            [(one.rollout_id, one.policy_version, one.token_ids.tolist(), one.reward) for one in sorted(batch)]
            for batch in run.world.rollouts
        ]
        for run in (whole, resumed)
    ]
    assert batches[1] == batches[0][3:]
    lines = by_step(whole.lines())
    for step, (line, batch) in enumerate(zip(lines, batches[0], strict=True), start=1):
        reused = [(name, version) for name, version, *_ in batch if name.endswith("/reused")]
        assert len(reused) == line["reuse/answers"] and len(batch) == line["samples/trained"]
        assert all(version == 0 and step > 1 and name.startswith(f"step{step}/") for name, version in reused)
    assert len(batches[0][-1]) == 32 and lines[-1]["reuse/answers"] > 3 and lines[-1]["rollout/accuracy"] == 0
    assert (
        whole.controller.ledger.run.requested
        == whole.controller.ledger.run.trained + whole.controller.ledger.run.filtered
    )
