"""Generation that goes on while the learner works: what is admitted, trained and counted, on a clock that jumps."""

import asyncio
import dataclasses
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_data.errors import CheckpointError, EngineError, RewardError
from rlhf_data.records import Episode, FinishReason, Prompt, Rollout, Span, SpanSource, Verdict, VerdictKind
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.records_io import batch_records
from rlhf_rollout.router import EngineRouter
from rlhf_train.generation.run_spec import DynamicSampling
from rlhf_train.generation.service import GenerationService
from rlhf_train.generation.stream import SampleStream
from rlhf_train.run.saved.state import read_state, write_state
from simulated import now, simulate

SAMPLING = SamplingParams(num_samples=2, max_tokens=999)


class SlowAnswers:
    """A workflow whose answers take one second per token. A prompt's first token is the length of its answers."""

    def __init__(self) -> None:
        self.router = EngineRouter([SimpleNamespace()])
        self.version = 0
        self.running: Counter[str] = Counter()
        self.most = 0
        self.failing: set[str] = set()
        self.asked: list[tuple[str, int, float]] = []

    async def run(self, prompt, sampling, group_id):
        kind = "eval" if group_id.startswith("eval") else "rollouts"
        self.running[kind] += 1
        self.most = max(self.most, self.running.total())
        version = self.version
        try:
            await asyncio.sleep(int(prompt.token_ids[0]))
        finally:
            self.running[kind] -= 1
        self.asked.append((group_id, sampling.num_samples, sampling.temperature))
        if group_id in self.failing:
            raise EngineError("no luck")
        spans = (
            Span(SpanSource.PROMPT, prompt.token_ids),
            Span(SpanSource.POLICY, [1] * prompt.token_ids[0], [-1.0] * prompt.token_ids[0], policy_version=version),
        )
        names = [f"{group_id}/{index}" for index in range(sampling.num_samples)]
        return tuple(Episode(n, group_id, (Rollout(n, group_id, spans, FinishReason.STOP, ""),)) for n in names)


class Scores:
    """Gives the samples of a group different rewards, except for prompts of an odd length."""

    async def score(self, prompt, rollouts):
        if prompt.text == "bad":
            raise RewardError("no scorer")
        rewards = [1.0, 0.0] if prompt.token_ids[0] % 2 == 0 else [0.0, 0.0]
        rewards = [0.25] if len(rollouts) == 1 else rewards  # a greedy response
        return [Verdict(VerdictKind.OK if reward else VerdictKind.WRONG, reward) for reward in rewards]


def prompts_of(lengths):
    return tuple(Prompt(f"p{number}", np.array([length]), f"p{number}") for number, length in enumerate(lengths))


class Run:
    """A service, and a learner that trains each batch for `train_s`."""

    def __init__(
        self, lengths, *, batch_size, staleness, num_batches, max_in_flight=99, dynamic=None, greedy=False, **changes
    ):
        self.job = SimpleNamespace(
            prompts=prompts_of(lengths),
            prompts_digest="",
            eval_prompts=prompts_of([3] * 8),
            batch=SimpleNamespace(rollout_batch_size=batch_size),
            sampling=SAMPLING,
            eval_sampling=SAMPLING,
            seed=1,
            max_staleness=staleness,
            max_in_flight=max_in_flight,
            dynamic_sampling=dynamic,
            difficulty=None,
            reuse=None,
        )
        vars(self.job).update(changes)
        self.num_batches = num_batches
        self.answers = SlowAnswers()
        self.stream = SampleStream(batch_size, num_batches, staleness)
        self.shown: list[tuple[int, int]] = []
        parts = self.job, self.answers, Scores(), self.stream, lambda *counts: self.shown.append(counts)
        self.service = GenerationService(*parts, greedy_baseline=greedy)
        self.batches: list = []
        self.staleness: list[int] = []

    async def train(self, train_s, num_batches=None):
        for _ in range(num_batches or self.num_batches):
            drawn = await self.service.next_batch()
            self.batches.append(drawn)
            self.staleness += [self.answers.version - r.policy_version for g in drawn.kept for r in g.rollouts]
            await asyncio.sleep(train_s)
            self.answers.version += 1
            self.service.release(self.answers.version)
        return now()

    @property
    def trained(self):
        return [group.prompt.text for drawn in self.batches for group in drawn.kept]


def test_every_group_is_said_to_be_settled_once_and_with_what_will_be_trained():
    settled = {}
    run = Run(
        [2, 3, 4, 5, 6, 8, 10, 12], batch_size=3, staleness=0, num_batches=1, dynamic=DynamicSampling(max_batches=3)
    )
    run.service.settled = lambda group_id, group: settled.setdefault(group_id, []).append(group)
    run.answers.failing = {"step1/00001"}
    simulate(run.train(1))
    [drawn] = run.batches
    assert all(len(parts) == 1 for parts in settled.values())
    kept = {group_id: group for group_id, [group] in settled.items() if group is not None}
    assert list(kept.values()) == sorted(drawn.kept, key=list(kept.values()).index) and len(drawn.kept) == 3
    left_out = {group.group_id for group in drawn.dropped} | {"step1/00001"}
    assert settled.keys() - kept.keys() == left_out and len(left_out) > 1


def test_drafts_are_those_since_the_batch_before():
    run = Run([2, 4], batch_size=2, staleness=0, num_batches=2)
    answer = run.answers.run

    async def answer_with_drafts(prompt, *rest):
        run.answers.router.drafts += (1, 4, len(run.batches))
        return await answer(prompt, *rest)

    run.answers.run = answer_with_drafts
    simulate(run.train(1))
    assert [drawn.drafts for drawn in run.batches] == [(2, 8, 0), (2, 8, 2)]


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_reward_that_scores_all_groups_is_never_said_to_be_idle(staleness, tmp_path):
    """Groups of a batch may all have been made, and scored, before the batch in front of it was taken."""
    run = Run([10], batch_size=2, staleness=staleness, num_batches=6)
    simulate(run.train(1))
    assert [drawn.has_scored for drawn in run.batches] == [True] * 6
    resumed = Run([10], batch_size=2, staleness=staleness, num_batches=6)
    state = saved(run_until_queued(staleness).service.state(), tmp_path)
    resumed.service.restore(state)
    simulate(resumed.train(1, num_batches=2))
    assert [drawn.has_scored for drawn in resumed.batches] == [True] * 2


@pytest.mark.parametrize(("was", "own", "fits"), [("a", "a", 1), ("a", "b", 0), ("", "b", 1), ("a", "", 1)])
def test_run_continues_with_its_own_rows_only(was, own, fits, tmp_path):
    options = {"batch_size": 2, "staleness": 0, "num_batches": 2}
    first, second = (Run([10], prompts_digest=digest, **options) for digest in (was, own))
    state = saved(first.service.state(), tmp_path)
    if fits:
        second.service.restore(state)
        del state["prompts"]  # as older checkpoints
        second.service.restore(state)
        return
    with pytest.raises(CheckpointError, match=r"other rows: their digest was a, and that of these is b\s+hint: "):
        second.service.restore(state)


def run_until_queued(staleness):
    """Return a run that has trained one batch, and then waited until what it had admitted was complete."""
    run = Run([10], batch_size=2, staleness=staleness, num_batches=6)

    async def train():
        await run.train(1, num_batches=1)
        await asyncio.sleep(20)

    simulate(train())
    return run


def test_reward_is_idle_where_the_workflow_gives_all_verdicts():
    run = Run([10], batch_size=2, staleness=1, num_batches=3)
    answer = run.answers.run

    async def scored(*arguments):
        episodes = await answer(*arguments)
        verdict = Verdict(VerdictKind.OK, 1.0)
        return tuple(
            dataclasses.replace(e, rollouts=tuple(dataclasses.replace(r, verdict=verdict) for r in e.rollouts))
            for e in episodes
        )

    run.answers.run = scored
    simulate(run.train(1))
    assert not any(drawn.has_scored for drawn in run.batches)


def long_tailed(count, seed=0):
    """Lengths of a log-normal distribution whose 99th percentile is 8 times the median."""
    draws = np.random.default_rng(seed).standard_normal(count) * np.log(8) / 2.326
    return np.maximum(np.round(6 * np.exp(draws)), 1).astype(int)


def test_overlap_hides_the_shorter_of_generation_and_training():
    def seconds(staleness):
        run = Run([10], batch_size=2, staleness=staleness, num_batches=6)
        return simulate(run.train(10))

    assert seconds(0) == 120.0  # 6 x (10 + 10)
    assert seconds(1) == 70.0  # the first batch, then 6 x 10


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_lengths_that_are_trained_are_those_that_were_asked_for(staleness):
    lengths = long_tailed(160)
    run = Run(lengths, batch_size=8, staleness=staleness, num_batches=20, max_in_flight=12)
    simulate(run.train(4))
    # 160 prompts are one epoch: each was trained exactly once, however long its answers.
    assert sorted(run.trained) == sorted(prompt.text for prompt in run.job.prompts)
    trained = [rollout.num_response_tokens for drawn in run.batches for g in drawn.kept for rollout in g.rollouts]
    assert sorted(trained) == sorted(np.repeat(lengths, 2))
    assert max(run.staleness) <= staleness
    # The first half of a run has no shorter answers than the second half: none waits for the end.
    first, second = (np.log(half).mean() for half in np.split(np.array(trained), 2))
    assert abs(first - second) < 3 * np.log(trained).std() * (2 / len(trained)) ** 0.5


def test_more_staleness_is_never_slower_on_long_tails():
    def seconds(staleness):
        run = Run(long_tailed(160), batch_size=8, staleness=staleness, num_batches=20, max_in_flight=12)
        return simulate(run.train(15))

    times = [seconds(staleness) for staleness in (0, 1, 2, 4)]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[1] > 1.3


def test_without_staleness_nothing_is_in_flight_while_the_learner_works():
    run = Run(long_tailed(32), batch_size=8, staleness=0, num_batches=3)

    async def main():
        for _ in range(3):
            drawn = await run.service.next_batch()
            ids = [group.group_id for group in drawn.kept]
            await asyncio.sleep(50)
            assert run.stream.num_in_flight == run.stream.num_queued == run.service.num_outstanding == 0
            run.service.release(0)
            await asyncio.sleep(50)  # an evaluation, say
            assert run.stream.num_in_flight == 0
            yield_ids.append(ids)

    yield_ids = []
    simulate(main())
    assert yield_ids == [[f"step{step}/{number:05d}" for number in range(8)] for step in (1, 2, 3)]
    assert run.shown[:8] == [(done, 8) for done in range(1, 9)]


def test_counts_balance_at_every_batch():
    run = Run(long_tailed(64), batch_size=4, staleness=2, num_batches=8, max_in_flight=6, dynamic=DynamicSampling())
    requested = trained = lost = 0

    async def main():
        nonlocal requested, trained, lost
        for _ in range(8):
            drawn = await run.service.next_batch()
            requested += drawn.num_requested
            lost += drawn.num_failed + sum(len(group.episodes) for group in drawn.dropped)
            trained += sum(len(group.episodes) for group in drawn.kept)
            assert requested == trained + lost + run.service.num_outstanding
            assert all(group.prompt.token_ids[0] % 2 == 0 for group in drawn.kept)
            await asyncio.sleep(3)
            assert requested == trained + lost + run.service.num_outstanding  # whatever has happened since
            run.service.release(0)

    simulate(main())
    assert trained == 64 and lost > 0


def test_limit_of_prompts_ends_in_a_short_batch():
    run = Run([3, 5, 7], batch_size=4, staleness=1, num_batches=9, dynamic=DynamicSampling(max_batches=2))

    async def main():
        first = await run.service.next_batch()
        run.service.release(1)
        return first, await run.service.next_batch()

    first, second = simulate(main())
    # Nothing is worth training: twice the room of 8 groups, then twice the room of all 8 again.
    assert (len(first.kept), len(first.dropped), first.num_requested) == (0, 16, 32)
    assert (len(second.kept), len(second.dropped)) == (0, 16)


def test_failed_group_is_counted_and_its_place_is_given_to_another_prompt():
    run = Run([4], batch_size=2, staleness=1, num_batches=3)
    run.answers.failing = {"step1/00001"}
    simulate(run.train(1))
    assert [(len(drawn.kept), drawn.num_failed, drawn.failure) for drawn in run.batches] == [
        (2, 2, "no luck"), (2, 0, ""), (2, 0, "")
    ]  # fmt: skip
    assert sum(drawn.num_requested for drawn in run.batches) == 14


def test_nothing_but_failures_is_an_error_with_the_reason():
    run = Run([4], batch_size=2, staleness=1, num_batches=3)
    run.answers.failing = {f"step1/{number:05d}" for number in range(4)}
    with pytest.raises(EngineError, match="every rollout group failed; the last: no luck"):
        simulate(run.train(1))


@pytest.mark.parametrize("staleness", [0, 1])
def test_reward_that_cannot_run_ends_the_wait_and_everything_in_flight(staleness):
    run = Run([2] * 4, batch_size=4, staleness=staleness, num_batches=3)
    run.job.prompts = (Prompt("bad", np.array([2]), "bad"), *prompts_of([500] * 3))

    async def main():
        with pytest.raises(RewardError, match="no scorer"):
            await run.service.next_batch()
        await asyncio.sleep(0)
        return now(), run.answers.running.total(), len(run.service._tasks)

    assert simulate(main()) == (2.0, 0, 0) and run.answers.most >= 4


def test_reward_that_cannot_run_while_the_learner_works_ends_the_next_wait():
    run = Run([9, 2], batch_size=1, staleness=1, num_batches=3)
    run.job.prompts = (Prompt("bad", np.array([9]), "bad"), *prompts_of([2]))

    async def main():
        await run.service.next_batch()  # the short answer
        await asyncio.sleep(50)
        with pytest.raises(RewardError, match="no scorer"):
            async with asyncio.timeout(50):
                await run.service.next_batch()

    simulate(main())


def test_idle_share_is_that_of_the_time_since_the_last_batch():
    run = Run([10], batch_size=1, staleness=1, num_batches=9)
    run.answers.router.__class__ = type("Router", (EngineRouter,), {"busy_s": property(lambda self: busy())})

    def busy():
        return min(now(), 40.0)  # an engine that works for 40 seconds

    async def main():
        shares = []
        for _ in range(3):
            drawn = await run.service.next_batch()
            shares.append(drawn.overlap["async/generation_idle"])
            await asyncio.sleep(20)
            run.service.release(0)
        return shares

    # Batches are taken after 10, 30 and 50 seconds.
    assert simulate(main()) == pytest.approx([0.0, 0.0, 0.5])


def saved(state, folder):
    """Return what another process reads of a state."""
    write_state(folder, state)
    return read_state(folder)


def older(state):
    """Return a state as older versions wrote and read it."""
    return json.loads(
        json.dumps(state, default=lambda group: [record for record, _ in batch_records([group], {}, has_tokens=True)])
    )


@pytest.mark.parametrize("is_older", [False, True])
def test_interrupted_run_trains_every_prompt_once(is_older, tmp_path):
    lengths = long_tailed(64, seed=3)
    options = {"batch_size": 4, "staleness": 2, "num_batches": 16, "max_in_flight": 7}
    first = Run(lengths, **options)

    async def interrupted():
        await first.train(5, 6)
        return first.service.state()

    state = simulate(interrupted())
    waiting = [ticket[-1] for ticket in state["stream"]["tickets"]]
    assert any(group is None for group in waiting) and any(group is not None for group in waiting)
    second = Run(lengths, **options)
    second.answers.version = first.answers.version
    second.service.restore(older(state) if is_older else saved(state, tmp_path))
    simulate(second.train(5, 10))
    assert sorted(first.trained + second.trained) == sorted(prompt.text for prompt in second.job.prompts)
    assert max(second.staleness) <= 2


def test_evaluation_has_its_share_of_the_slots_beside_rollouts():
    run = Run([40], batch_size=8, staleness=2, num_batches=4, max_in_flight=8)

    async def main():
        training = asyncio.create_task(run.train(1))
        await asyncio.sleep(41)  # eight rollouts have just begun
        begun = now()
        settled = []
        results = await run.service.answer_held_out(3, settled.append)
        took = now() - begun
        await training
        return results, took, settled

    results, took, settled = simulate(main())
    assert [result.group_id for result in results] == [f"eval3/{number:05d}" for number in range(8)]
    assert len(settled) == 8
    assert took == 8 / 2 * 3  # a quarter of eight at once, for three seconds each
    assert run.answers.most == 8 + 2  # those that were in flight already, and two more
    assert len(run.trained) == 32


# Four prompts to train on at once, with one or two responses each; and held-out prompts at once.
@pytest.mark.parametrize(("trained", "evaluated", "most"), [(2, 2, 4), (2, 1, 8), (1, 2, 2), (1, 9, 1)])
def test_evaluation_without_overlap_has_as_many_responses_in_flight_as_training(trained, evaluated, most):
    counts = {"sampling": trained, "eval_sampling": evaluated}
    changes = {name: dataclasses.replace(SAMPLING, num_samples=count) for name, count in counts.items()}
    run = Run([40], batch_size=8, staleness=0, num_batches=4, max_in_flight=4, **changes)
    run.service.reward = None
    simulate(run.service.answer_held_out(0, lambda result: None))
    assert run.answers.most == most


def test_groups_have_the_reward_of_a_greedy_response_that_no_count_has():
    run = Run([2, 4], batch_size=2, staleness=0, num_batches=1, greedy=True)
    simulate(run.train(0))
    drawn = run.batches[0]
    assert sorted(run.answers.asked) == [
        entry
        for name in sorted(group.group_id for group in drawn.kept)
        for entry in ((name, 2, 1.0), (f"{name}/greedy", 1, 0.0))
    ]
    extra = {"greedy_reward": 0.25}
    for group in drawn.kept:
        assert [(r.verdict.reward, r.verdict.extra) for r in group.rollouts] == [(1.0, extra), (0.0, extra)]
    assert (drawn.num_requested, drawn.num_failed) == (4, 0)


def test_group_without_a_greedy_response_has_failed():
    run = Run([2, 4], batch_size=2, staleness=0, num_batches=1, greedy=True)
    run.answers.failing = {"step1/00001/greedy"}
    simulate(run.train(0))
    [drawn] = run.batches
    assert [group.group_id for group in drawn.kept] == ["step1/00000"]
    assert (drawn.num_failed, drawn.failure) == (2, "the greedy response has no reward: no luck")
