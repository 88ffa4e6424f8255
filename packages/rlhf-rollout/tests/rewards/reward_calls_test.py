"""What one call of a reward function holds: groups of several prompts, as many as are complete; and who is charged."""

import asyncio
import gc
import weakref
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import RewardError
from rlhf_data.records import FinishReason
from rlhf_data.testing import EOS_ID
from rlhf_rollout.agents import SingleTurn
from rlhf_rollout.generator import GenerationCounts, GroupMaker, generate_groups
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.rewards.function import FunctionReward
from rlhf_rollout.rewards.mix import MixedReward, ScoredFailures, build_reward, check_reward
from rlhf_rollout.rewards.sources import CallOptions, RewardSource
from rlhf_rollout.rewards.user_function import Scored
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.workers.rpc import WorkerProcess
from simulated import simulate

# As reward functions for OpenRLHF normalize and log; `torch.std` of a single number is NaN.
NORMALIZING = """
    import torch

    def reward_func(queries, prompts, labels):
        raw = torch.tensor([float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts)])
        rewards = (raw - raw.mean()) / (raw.std() + 1e-9)
        logs = {"avg": raw.mean(), "max": raw.max(), "min": raw.min(), "size": len(queries)}
        return {"rewards": rewards, "scores": raw, "extra_logs": logs}
"""


class Engine:
    """Answers prompt i with i letters after i seconds, and fails for the prompts in `failing`."""

    def __init__(self, failing=()):
        self.failing = failing

    async def generate(self, token_ids, sampling, **_):
        number = int("".join(map(chr, token_ids[1:])))
        await asyncio.sleep(number)
        if number in self.failing:
            raise ValueError("no answer")
        ids = np.array([*[97] * number, EOS_ID])
        completion = Completion.single(ids, np.full(len(ids), -0.5), FinishReason.STOP, 0)
        return [completion] * sampling.num_samples


def generated(reward, count, *, num_samples=1, max_in_flight=64, failing=(), by=asyncio.run):
    """Return the groups of `count` prompts, of which the i-th is answered with i letters."""
    prompts = [make_prompt(str(number), prompt_id=f"p{number}") for number in range(count)]
    text_of = lambda ids: "".join(chr(token) for token in ids if token != EOS_ID)  # noqa: E731
    sampling = SamplingParams(num_samples=num_samples)

    async def collect():
        workflow = SingleTurn(EngineRouter([Engine(failing)]), text_of)
        options = {"max_in_flight": max_in_flight, "group_id_prefix": "step1"}
        return [item async for item in generate_groups(prompts, workflow, sampling, reward, **options)]

    results = by(collect())
    return sorted((result.group for result in results if result.group), key=lambda group: group.group_id)


@pytest.fixture
def calls(monkeypatch):
    """Replace the calls of functions: note the number of responses in each, and give each response its length."""
    sizes = []

    async def ask(reward, samples, failure):
        sizes.append(len(samples))
        lengths = [float(len(rollout.text)) for _, rollout in samples]
        return Scored(lengths, lengths, {}, [None] * len(lengths))

    monkeypatch.setattr(FunctionReward, "_ask", ask)
    return sizes


@pytest.fixture
def function(write):
    path = write('def reward_func(q, p, l): return {"rewards": []}')
    return lambda size: FunctionReward(path, CallOptions(batch_size=size))


def test_function_that_normalizes_its_call_works_as_printed_for_several_prompts(write, monkeypatch):
    monkeypatch.setattr(asyncio, "sleep", _at_once(asyncio.sleep))
    reward = FunctionReward(write(NORMALIZING), CallOptions(timeout_s=60.0))
    groups = generated(reward, 4)
    asyncio.run(reward.close())
    verdicts = [rollout.verdict for group in groups for rollout in group.rollouts]
    # Four prompts with answers of 0 to 3 letters: the mean is 1.5, the sum of squares around it 5.
    deviation = (5 / 3) ** 0.5
    assert [verdict.reward for verdict in verdicts] == pytest.approx([(n - 1.5) / deviation for n in range(4)])
    assert [verdict.score for verdict in verdicts] == [0, 1, 2, 3]
    assert all(verdict.extra == {"avg": 1.5, "max": 3, "min": 0, "size": 4} for verdict in verdicts)


def _at_once(sleep):
    return lambda seconds, *rest: sleep(seconds / 1000, *rest)


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [
        (6, 64, [6]),
        (6, 6, [6]),
        (6, 3, [3, 3]),
        (7, 3, [3, 2, 2]),  # a single one would be left: the last calls share
        (5, 4, [3, 2]),
        (1, 4, [1]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_calls_hold_as_many_complete_groups_as_fit_and_leave_none_alone(calls, function, count, size, sizes):
    assert len(generated(function(size), count, by=simulate)) == count
    assert calls == sizes


def test_calls_keep_the_responses_to_a_prompt_together(calls, function):
    generated(function(4), 3, num_samples=3, by=simulate)
    assert calls == [3, 3, 3]
    calls.clear()
    generated(function(2), 2, num_samples=3, by=simulate)
    assert calls == [3, 3]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_calls_wait_for_prompts_that_do_not_yet_generate(calls, function, max_in_flight):
    generated(function(4), 4, max_in_flight=max_in_flight, by=simulate)
    assert calls == [2, 2] if max_in_flight == 1 else calls == [4]


def test_calls_do_not_wait_for_groups_that_failed(calls, function):
    groups = generated(function(64), 5, failing=(2, 4), by=simulate)
    assert [group.rollouts[0].verdict.reward for group in groups] == [0.0, 1.0, 3.0]
    assert calls == [3]


@pytest.mark.parametrize("num_samples", [1, 2])
def test_full_calls_go_out_while_others_generate(function, calls, num_samples):
    async def run():
        reward = function(2 * num_samples)
        for number in range(4):
            reward.expect(f"g{number}", "")

        async def score(number):
            await asyncio.sleep(number)
            prompt = make_prompt(str(number))
            rollouts = [make_rollout(prompt, "a", group_id=f"g{number}") for _ in range(num_samples)]
            await reward.score(prompt, rollouts)
            return asyncio.get_running_loop().time() - began

        began = asyncio.get_running_loop().time()
        return await asyncio.gather(*map(score, range(4)))

    assert simulate(run()) == pytest.approx([1, 1, 3, 3], abs=0.5)
    assert calls == [2 * num_samples] * 2


def test_reward_keeps_no_event_loop_that_has_ended(function, calls):
    reward = function(4)
    loop = asyncio.new_event_loop()
    prompt = make_prompt()
    verdicts = loop.run_until_complete(reward.score(prompt, [make_rollout(prompt, "4")]))
    assert [verdict.reward for verdict in verdicts] == [1.0]
    loop.close()
    ended = weakref.ref(loop)
    del loop
    gc.collect()
    assert ended() is None


def test_group_that_failed_after_all_others_leaves_nothing_behind(function):
    async def run():
        reward = function(4)
        prompt = make_prompt()
        rollout = make_rollout(prompt, "4")
        for group_id in (rollout.group_id, "failed"):
            reward.expect(group_id, "eval5")
        scored = asyncio.create_task(reward.score(prompt, [rollout]))
        await asyncio.sleep(0)
        reward.expect("failed", None)
        await scored
        reward.expect("late", "eval6")
        reward.expect("late", None)
        return len(reward._batchers)

    assert asyncio.run(run()) == 0


def test_group_that_waits_goes_out_whatever_ends_meanwhile(function, monkeypatch):
    """A call that began when others had all gone out ends while a later group waits for one that is expected."""

    async def run():
        may_end = asyncio.Event()

        async def ask(reward, samples, failure):
            if samples[0][0].prompt_id == "slow":
                await may_end.wait()
            return Scored([1.0], [1.0], {}, [None])

        monkeypatch.setattr(FunctionReward, "_ask", ask)
        reward = function(1)

        def start(name):
            prompt = make_prompt(prompt_id=name)
            return asyncio.create_task(reward.score(prompt, [make_rollout(prompt, "4", group_id=name)]))

        for name in ("slow", "quick"):
            reward.expect(name, "step")
        slow = start("slow")
        await start("quick")
        reward.expect("waits", "step")
        waits = start("waits")
        await asyncio.sleep(0)
        reward.expect("last", "step")
        may_end.set()
        await slow
        last = start("last")
        return [verdict.reward for scored in await asyncio.gather(waits, last) for verdict in scored]

    assert asyncio.run(asyncio.wait_for(run(), 20)) == [1.0, 1.0]


def test_sums_of_rewards_gather_the_same_calls(calls, write):
    function = RewardSource(kind="function", targets=(write('def reward_func(q, p, l): return {"rewards": []}'),))
    two = RewardSource(kind="function", targets=("math",))
    reward = build_reward([function, two], CallOptions(failed_reward=0.0))
    assert isinstance(reward, ScoredFailures)
    generated(reward, 5, by=simulate)
    assert Counter(calls) == {5: 1, 1: 5}  # `math` compares nothing: its calls go out as groups become complete


def test_built_in_reward_takes_at_once_what_came_while_its_workers_were_busy(monkeypatch):
    sizes = []

    async def ask(reward, samples, failure):
        sizes.append(len(samples))
        await asyncio.sleep(1)
        rewards = [float(rollout.text) for _, rollout in samples]
        return Scored(rewards, rewards, {}, [None] * len(rewards))

    monkeypatch.setattr(FunctionReward, "_ask", ask)
    monkeypatch.setattr("rlhf_rollout.rewards.function.MOST_AT_ONCE", 6)

    async def run():
        reward = FunctionReward("math", CallOptions(num_samples=2, num_workers=2))
        reward.expect("never comes", "")  # a call waits for no prompt
        scored = []
        for number in range(6):
            prompt = make_prompt(prompt_id=str(number))
            rollouts = [make_rollout(prompt, f"{number}.{sample}", group_id=str(number)) for sample in range(2)]
            scored.append(asyncio.create_task(reward.score(prompt, rollouts)))
            await asyncio.sleep(0.1)
        found = await asyncio.gather(*scored)
        assert not reward._batchers  # nothing of the event loop is kept
        return found

    found = simulate(run())
    assert sizes == [2, 2, 6, 2]  # one prompt for each worker, then three, as many as a call may hold, and the last
    assert [[verdict.reward for verdict in group] for group in found] == [[n, n + 0.1] for n in range(6)]


def test_held_out_answers_are_not_scored_together_with_those_of_training(calls, function):
    async def run():
        reward = function(64)
        workflow = SingleTurn(EngineRouter([Engine()]), lambda ids: "a")
        counts = GenerationCounts()
        made = []
        for pool, numbers in (("", range(3)), ("eval1", range(2))):
            maker = GroupMaker(workflow, SamplingParams(), reward, counts, pool=pool)
            made += [maker.make(f"{pool}/{n}", make_prompt(str(n)), "seed") for n in numbers]
        await asyncio.gather(*made)

    simulate(run())
    assert sorted(calls) == [2, 3]


def test_callers_that_announce_nothing_share_calls_too(calls, function):
    async def run():
        reward = MixedReward([("one", 1.0, function(4))])
        prompt = make_prompt()
        answers = [reward.score(prompt, [make_rollout(prompt, "a", group_id=f"row{n}")]) for n in range(10)]
        await asyncio.gather(*answers)
        await reward.close()

    asyncio.run(run())
    assert calls == [4, 3, 3]


def test_close_is_an_error_for_groups_that_wait_for_a_call(calls, function):
    async def run():
        reward = function(64)
        prompt = make_prompt()
        reward.expect("other", "")
        waiting = asyncio.create_task(reward.score(prompt, [make_rollout(prompt, "4")]))
        await asyncio.sleep(0.01)
        await reward.close()
        late = reward.score(prompt, [make_rollout(prompt, "4")])
        for asked in (waiting, asyncio.wait_for(late, 60)):
            with pytest.raises(RewardError, match="have been shut down"):
                await asked

    asyncio.run(run())
    assert calls == []


def test_caller_that_gives_up_leaves_its_group_out_of_the_call(calls, function):
    async def run():
        reward = function(64)
        prompt = make_prompt()
        reward.expect("other", "")
        given_up, kept = (
            asyncio.create_task(reward.score(prompt, [make_rollout(prompt, "4", group_id=name)])) for name in "ab"
        )
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.sleep(0.01)
        reward.expect("other", None)
        assert (await kept)[0].reward == 1.0
        await reward.close()

    asyncio.run(run())
    assert calls == [1]


@pytest.mark.parametrize(
    ("batch_size", "step_prompts", "num_samples", "shape"),
    [
        (64, None, 1, (64, 1)),
        (64, 8, 1, (8, 1)),
        (64, 96, 1, (48, 1)),  # two equal calls, not 64 and 32
        (64, 9, 8, (5, 8)),
        (64, 1024, 8, (8, 8)),
        (64, 4, 100, (1, 100)),
        (1, 4, 1, (1, 1)),
    ],
)
def test_shape_of_a_call_divides_the_step_evenly(batch_size, step_prompts, num_samples, shape):
    calls = CallOptions(batch_size=batch_size, step_prompts=step_prompts, num_samples=num_samples)
    assert calls.function_shape == shape


def test_trial_has_the_shape_of_the_runs_calls(write):
    source = RewardSource(kind="function", targets=(write(NORMALIZING),))
    calls = CallOptions(step_prompts=4, num_samples=1, timeout_s=60.0)
    assert check_reward(source, [make_prompt()], calls) is None  # one row in the file, drawn four times a step
    with pytest.raises(RewardError, match="the reward is nan in the trial call") as caught:
        check_reward(source, [make_prompt(), make_prompt()], CallOptions(batch_size=1, timeout_s=60.0))
    assert "this call holds one response, which has no deviation to divide by" in str(caught.value)


def test_trial_has_the_prompts_and_samples_of_a_call(monkeypatch):
    seen = []

    async def call(worker, call, timeout_s):
        seen.append(call.begin({"extras": []})["arguments"])
        return asdict(Scored([1.0] * len(call.samples), [1.0] * len(call.samples), {}, [None] * len(call.samples)))

    async def start(worker):
        pass

    monkeypatch.setattr(WorkerProcess, "start", start)
    monkeypatch.setattr(WorkerProcess, "call", call)
    prompts = [make_prompt(text, label) for text, label in (("a=", "1"), ("b=", "2"), ("c=", "3"))]
    source = RewardSource(kind="function", targets=("rlhf_data.errors:nearest",))
    check_reward(source, prompts, CallOptions(batch_size=6, step_prompts=100, num_samples=3))
    assert seen.pop() == (
        ["a=1", "a=", "a=1", "b=", "b=2", "b="],
        ["a=", "a=", "a=", "b=", "b=", "b="],
        ["1", "1", "1", "2", "2", "2"],
    )
    check_reward(RewardSource(kind="function", targets=("math",)), prompts * 2, CallOptions(step_prompts=100))
    assert len(seen.pop()[0]) == 8  # four prompts twice: it compares nothing
