"""Groups: whole, bounded, overlapped with rewards, spread over engines, and accounted for when things fail."""

import asyncio
import dataclasses
import gc

import numpy as np
import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import ConfigError, EngineError, RewardError
from rlhf_data.records import Episode, FinishReason, Verdict, VerdictKind
from rlhf_data.testing import EOS_ID, ByteTokenizer
from rlhf_rollout.agents import SingleTurn
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.generator import GenerationCounts, generate_groups
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.router import EngineRouter
from simulated import simulate


class ScriptedEngine:
    """Answers each prompt with its last byte, once a sample, after `seconds`; fails as often as it is told."""

    def __init__(self, *, seconds=0.0, failures=(), transform=None):
        self.seconds = seconds
        self.failures = list(failures)
        self.transform = transform
        self.running = self.most_running = self.num_calls = 0
        self.seeds = []

    async def generate(self, token_ids, sampling, *, timeout_s=None, drafts=None):
        self.num_calls += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.seeds.append(sampling.seed)
        try:
            await asyncio.sleep(self.seconds)
            if self.failures:
                raise self.failures.pop(0)
            ids = np.array([token_ids[-1], EOS_ID])
            completions = [Completion.single(ids, np.array([-0.5, -0.25]), FinishReason.STOP, 3)] * sampling.num_samples
            return self.transform(completions) if self.transform else completions
        finally:
            self.running -= 1


class ScriptedReward:
    """Gives reward 1.0 to each rollout after `seconds`, or what `verdicts` returns."""

    def __init__(self, *, seconds=0.0, verdicts=None):
        self.seconds = seconds
        self.verdicts = verdicts
        self.running = self.most_running = 0

    async def score(self, prompt, rollouts):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        return self.verdicts(rollouts) if self.verdicts else [Verdict(VerdictKind.OK, 1.0)] * len(rollouts)

    async def close(self):
        pass


def prompts_of(count):
    return [make_prompt(str(index), prompt_id=f"p{index}") for index in range(count)]


def workflow_of(*engines):
    return SingleTurn(EngineRouter(engines), str)


def run(prompts, engines, reward=None, *, num_samples=2, seed=None, max_in_flight=4, counts=None, by=asyncio.run):
    async def collect():
        stream = generate_groups(
            prompts,
            SingleTurn(EngineRouter(engines), lambda ids: ByteTokenizer().decode(ids, skip_special_tokens=True)),
            SamplingParams(num_samples=num_samples, seed=seed),
            reward,
            max_in_flight=max_in_flight,
            group_id_prefix="step-1",
            counts=counts,
        )
        return [result async for result in stream]

    return by(collect())


def test_generate_groups_builds_whole_groups_from_completions():
    (result,) = run(prompts_of(1), [ScriptedEngine()], ScriptedReward())
    group = result.group
    assert (result.group_id, result.failure, group.prompt.prompt_id) == ("step-1/00000", None, "p0")
    assert [rollout.rollout_id for rollout in group.rollouts] == ["step-1/00000/0", "step-1/00000/1"]
    rollout = group.rollouts[0]
    # The prompt is <bos> "0"; the engine answers "0" <eos>.
    assert rollout.token_ids.tolist() == [2, 48, 48, 0]
    assert rollout.loss_mask.tolist() == [False, False, True, True]
    assert rollout.rollout_logprobs.tolist() == [0, 0, -0.5, -0.25]
    assert (rollout.text, rollout.policy_version, rollout.finish_reason) == ("0", 3, FinishReason.STOP)
    assert rollout.verdict == Verdict(VerdictKind.OK, 1.0)


def test_text_that_ends_an_answer_is_trained_and_no_part_of_its_text():
    engine = FakeEngine(script=lambda prompt, seed: list(b"4 Question: 5"))
    workflow = SingleTurn(EngineRouter([engine]), ByteTokenizer().decode)
    [episode] = asyncio.run(workflow.run(make_prompt("2+2"), SamplingParams(max_tokens=40, stop=(" Question:",)), "g"))
    [rollout] = episode.rollouts
    assert (rollout.text, rollout.finish_reason) == ("4", FinishReason.STOP)
    assert bytes(rollout.token_ids[rollout.loss_mask].tolist()) == b"4 Question:"


def test_generate_groups_every_prompt_once_and_counted():
    counts = GenerationCounts()
    results = run(prompts_of(10), [ScriptedEngine(), ScriptedEngine()], ScriptedReward(), counts=counts)
    assert sorted(result.prompt.prompt_id for result in results) == sorted(f"p{index}" for index in range(10))
    assert (counts.num_groups, counts.num_failed_groups, counts.num_scored_groups) == (10, 0, 10)
    assert (counts.num_requested, counts.num_generated, counts.num_failed) == (20, 20, 0)
    assert counts.num_response_tokens == 40  # 2 tokens each
    assert counts.verdicts == {VerdictKind.OK: 20}


def test_generate_groups_results_come_as_they_finish():
    class BySize(ScriptedEngine):
        async def generate(self, token_ids, sampling, *, timeout_s=None, drafts=None):
            await asyncio.sleep(0.3 if token_ids[-1] == ord("0") else 0.0)
            return await super().generate(token_ids, sampling)

    results = run(prompts_of(3), [BySize()])
    assert results[-1].prompt.prompt_id == "p0"


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_generate_groups_bounds_what_generates_and_what_waits_for_rewards(max_in_flight):
    engine, reward = ScriptedEngine(seconds=0.01), ScriptedReward(seconds=0.05)
    run(prompts_of(12), [engine], reward, max_in_flight=max_in_flight)
    assert engine.most_running == max_in_flight
    assert reward.most_running <= 2 * max_in_flight


def test_generate_groups_rewards_overlap_generation():
    # 4 groups one after the other, 0.4 s each; rewards of 0.4 s hidden but for the last: 2 s instead of 3.2 s.
    counts = GenerationCounts()
    engine, reward = ScriptedEngine(seconds=0.4), ScriptedReward(seconds=0.4)
    run(prompts_of(4), [engine], reward, max_in_flight=1, counts=counts, by=simulate)
    assert (counts.generate_s, counts.score_s) == (pytest.approx(1.6), pytest.approx(2.0))
    assert counts.reward_wait_s == pytest.approx(0.4)


async def test_generate_groups_reads_prompts_as_they_are_needed():
    taken = []

    def endless():
        for prompt in iter(lambda: make_prompt("7"), None):
            taken.append(prompt)
            yield prompt

    stream = generate_groups(
        endless(), workflow_of(ScriptedEngine()), SamplingParams(), None, max_in_flight=2, group_id_prefix="g"
    )
    result = await anext(stream)
    await stream.aclose()
    num_tasks = len(asyncio.all_tasks())
    assert result.group is not None
    assert len(taken) == 4  # twice max_in_flight
    assert num_tasks == 1  # closing the stream leaves nothing running


def test_generate_groups_counts_from_its_start_on_and_leaves_nothing_of_its_groups():
    workflow = workflow_of(ScriptedEngine(failures=[EngineError("hiccup")]))

    async def retries(prefix):
        counts = GenerationCounts()
        stream = generate_groups(
            prompts_of(1), workflow, SamplingParams(), None, max_in_flight=1, group_id_prefix=prefix, counts=counts
        )
        [result] = [result async for result in stream]
        assert workflow.router.unfinished.state([result.group_id]) == {result.group_id: []}
        return counts.num_retries

    assert [asyncio.run(retries(prefix)) for prefix in "ab"] == [1, 0]


def test_generate_groups_group_that_fails_twice_is_reported_and_counted():
    engines = [ScriptedEngine(failures=[EngineError("first")]), ScriptedEngine(failures=[ConnectionError("second")])]
    counts = GenerationCounts()
    results = run(prompts_of(3), engines, ScriptedReward(), max_in_flight=1, counts=counts)
    failed = [result for result in results if result.group is None]
    assert [result.prompt.prompt_id for result in failed] == ["p0"]
    assert failed[0].failure == "engine 0: EngineError: first; engine 1: ConnectionError: second"
    assert (counts.num_groups, counts.num_failed_groups) == (2, 1)
    assert counts.num_requested == counts.num_generated + counts.num_failed == 6


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (lambda completions: completions[:1], "1 completions instead of 2"),
        (
            lambda completions: [completions[0], Completion.single([1], [-1.0], FinishReason.ABORT, 0)],
            "1 of 2 completions were aborted",
        ),
        (
            lambda completions: [completions[0], Completion.single([1, 2], [-1.0], FinishReason.STOP, 0)],
            "1 log-probs for 2",
        ),
    ],
)
def test_generate_groups_incomplete_group_is_a_failure(transform, says):
    (result,) = run(prompts_of(1), [ScriptedEngine(transform=transform)])
    assert result.group is None
    assert says in result.failure


def test_generate_groups_failed_rewards_are_verdicts_and_counted():
    failed = Verdict(VerdictKind.TIMEOUT, detail="no answer within 1 s")
    counts = GenerationCounts()
    reward = ScriptedReward(verdicts=lambda rollouts: [Verdict(VerdictKind.WRONG, 0.0), failed])
    (result,) = run(prompts_of(1), [ScriptedEngine()], reward, counts=counts)
    assert result.group.rollouts[1].verdict is failed
    assert counts.verdicts == {VerdictKind.WRONG: 1, VerdictKind.TIMEOUT: 1}


def test_generate_groups_reward_that_cannot_run_ends_the_run(caplog):
    def unusable(rollouts):
        raise RewardError("cannot import it")

    with pytest.raises(RewardError, match="cannot import it"):
        run(prompts_of(5), [ScriptedEngine()], ScriptedReward(verdicts=unusable))
    gc.collect()  # tasks tell then that no one has asked for their errors
    assert caplog.text == ""


def test_generate_groups_seed_differs_by_group_and_repeats_by_run():
    def seeds(seed):
        engine = ScriptedEngine()
        run(prompts_of(4), [engine], seed=seed, max_in_flight=1)
        return engine.seeds

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 8
    assert all(0 <= seed < 2**31 for seed in seeds(1))
    assert seeds(None) == [None] * 4


def test_generate_groups_without_engine_or_room_is_refused():
    with pytest.raises(ConfigError, match="must be at least 1"):
        run(prompts_of(1), [])
    with pytest.raises(ConfigError, match="must be at least 1"):
        run(prompts_of(1), [ScriptedEngine()], max_in_flight=0)


def test_generate_groups_with_one_seed_key_draw_alike_whatever_their_ids():
    async def seeds(prefix, seed_key):
        engine = ScriptedEngine()
        sampling = SamplingParams(seed=3)
        stream = generate_groups(
            prompts_of(3), workflow_of(engine), sampling, None, max_in_flight=1, group_id_prefix=prefix,
            seed_key=seed_key,
        )  # fmt: skip
        ids = [result.group_id async for result in stream]
        return ids, engine.seeds

    first, second, other = (asyncio.run(seeds(*names)) for names in (("a", "k"), ("b", "k"), ("b", None)))
    assert first[0] != second[0]
    assert first[1] == second[1]
    assert set(first[1]).isdisjoint(other[1])


def test_generate_groups_closed_early_cancels_what_its_engines_do():
    cancelled = []

    class Slow(ScriptedEngine):
        async def generate(self, token_ids, sampling, *, timeout_s=None, drafts=None):
            if token_ids[-1] == ord("0"):
                return await super().generate(token_ids, sampling)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(chr(token_ids[-1]))
                raise

    async def first():
        stream = generate_groups(
            prompts_of(3), workflow_of(Slow()), SamplingParams(), None, max_in_flight=3, group_id_prefix="g"
        )
        await anext(stream)
        await stream.aclose()

    asyncio.run(asyncio.wait_for(first(), 30))
    assert sorted(cancelled) == ["1", "2"]


async def test_generate_groups_workflow_that_breaks_its_protocol_fails_its_group_only():
    class Odd(SingleTurn):
        async def run(self, prompt, sampling, group_id):
            episodes = await super().run(prompt, sampling, group_id)
            if prompt.prompt_id == "p0":
                return episodes[:1]
            if prompt.prompt_id == "p1":
                raise ZeroDivisionError("by zero")
            return episodes

    stream = generate_groups(
        prompts_of(3),
        Odd(EngineRouter([ScriptedEngine()]), str),
        SamplingParams(num_samples=2),
        None,
        max_in_flight=3,
        group_id_prefix="g",
    )
    results = {result.prompt.prompt_id: result async for result in stream}
    assert results["p0"].failure == "the workflow made 1 episodes instead of 2"
    assert results["p1"].failure == "ZeroDivisionError: by zero"
    assert len(results["p2"].group.episodes) == 2


async def test_generate_groups_scores_all_rollouts_of_an_episode_and_keeps_them_in_it():
    class Branching:
        router = EngineRouter([ScriptedEngine()])

        async def run(self, prompt, sampling, group_id):
            rollouts = [make_rollout(prompt, str(index), group_id=group_id, index=index) for index in range(3)]
            return (Episode("first", group_id, tuple(rollouts[:2])), Episode("second", group_id, (rollouts[2],)))

    counts = GenerationCounts()
    reward = ScriptedReward(
        verdicts=lambda rollouts: [Verdict(VerdictKind.OK, float(rollout.text)) for rollout in rollouts]
    )

    stream = generate_groups(
        prompts_of(1), Branching(), SamplingParams(num_samples=2), reward, max_in_flight=1, group_id_prefix="g",
        counts=counts,
    )  # fmt: skip
    (result,) = [result async for result in stream]
    first, second = result.group.episodes
    assert [rollout.verdict.reward for rollout in first.rollouts] == [0.0, 1.0]
    assert (first.verdict.reward, second.verdict.reward) == (1.0, 2.0)
    # Two episodes were asked for and made; they hold three rollouts.
    assert (counts.num_requested, counts.num_generated, counts.verdicts) == (2, 2, {VerdictKind.OK: 3})


def test_cached_prompt_tokens_and_drafts_are_counted_for_engines_that_tell_them():
    told = ScriptedEngine(
        transform=lambda found: [
            dataclasses.replace(each, num_cached_tokens=size, drafts=(1, 4, size))
            for each, size in zip(found, (1, 0), strict=True)
        ]
    )
    counts = GenerationCounts()
    run(prompts_of(3), [told], counts=counts)
    assert counts.cached_share == 3 / 12  # three prompts of two tokens, twice each
    assert counts.drafts == (6, 24, 3)
    counts = GenerationCounts()
    run(prompts_of(3), [ScriptedEngine()], counts=counts)
    assert counts.cached_share is None
