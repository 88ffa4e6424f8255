"""Sums of rewards: values by hand, what a failing source does to the sum, and the reward that sources stand for."""

import asyncio

import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import ConfigError, RewardError
from rlhf_data.records import Verdict, VerdictKind
from rlhf_rollout.rewards.function import FunctionReward
from rlhf_rollout.rewards.mix import MixedReward, ScoredFailures, build_reward, check_reward, score_each
from rlhf_rollout.rewards.remote import RemoteReward
from rlhf_rollout.rewards.sources import CallOptions, RewardSource

OK, WRONG, CRASH, TIMEOUT = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH, VerdictKind.TIMEOUT

NO_SERVER = "http://127.0.0.1:9/get_reward"


class ScriptedReward:
    """Gives the verdicts that it is told, or raises what it is told."""

    def __init__(self, *verdicts, error=None):
        self.verdicts = list(verdicts)
        self.error = error
        self.closed = False

    async def score(self, prompt, rollouts):
        if self.error:
            raise self.error
        return self.verdicts

    async def close(self):
        self.closed = True
        if self.error:
            raise self.error


def score(reward, count=1):
    prompt = make_prompt()
    return asyncio.run(reward.score(prompt, [make_rollout(prompt, "4", index=index) for index in range(count)]))


def test_mixed_reward_adds_up_by_weight():
    first = ScriptedReward(Verdict(WRONG, 2.0, 0.5), Verdict(OK, -1.0))
    second = ScriptedReward(Verdict(OK, 10.0, 1.0), Verdict(WRONG, 4.0))
    verdicts = score(MixedReward([("a", 1.0, first), ("b", 0.25, second)]), 2)
    # Rewards 2 + 10/4 = 4.5 and -1 + 4/4 = 0; scores 0.5 + 1/4 = 0.75 and, without scores, as the rewards.
    assert [(v.kind, v.reward, v.score) for v in verdicts] == [(WRONG, 4.5, 0.75), (OK, 0.0, 0.0)]
    assert [v.source_rewards for v in verdicts] == [(2.0, 10.0), (-1.0, 4.0)]
    assert [dict(v.extra) for v in verdicts] == [
        {"reward_a": 2.0, "reward_b": 10.0},
        {"reward_a": -1.0, "reward_b": 4.0},
    ]


def test_mixed_reward_single_source_is_only_weighted():
    source = ScriptedReward(Verdict(OK, 3.0, 1.0, extra={"length": 2.0}))
    (verdict,) = score(MixedReward([("a", -2.0, source)]))
    assert verdict == Verdict(OK, -6.0, -2.0, extra={"length": 2.0}, source_rewards=(3.0,))


def test_mixed_reward_adds_up_turns_and_puts_a_whole_reward_at_the_last():
    by_turn = ScriptedReward(Verdict(OK, 3.0, turn_rewards=(1.0, 2.0)))
    whole = ScriptedReward(Verdict(OK, 10.0))
    (verdict,) = score(MixedReward([("a", 2.0, by_turn), ("b", 0.5, whole)]))
    # Turn 1: 2 * 1. Turn 2: 2 * 2 + 0.5 * 10.
    assert (verdict.reward, verdict.turn_rewards) == (11.0, (2.0, 9.0))
    (verdict,) = score(MixedReward([("b", 0.5, whole)]))
    assert (verdict.reward, verdict.turn_rewards) == (5.0, ())


def test_mixed_reward_adds_up_rewards_of_tokens_and_leaves_the_rest_to_the_whole():
    steps = ScriptedReward(Verdict(OK, 0.75, token_rewards=((3, 0.5), (6, 0.25))))
    others = ScriptedReward(Verdict(OK, 2.0, token_rewards=((2, 1.0), (6, 1.0))))
    by_turn = ScriptedReward(Verdict(OK, 3.0, turn_rewards=(1.0, 2.0)))
    (verdict,) = score(MixedReward([("a", 2.0, steps), ("b", 0.5, others), ("c", 1.0, by_turn)]))
    assert verdict.reward == 2 * 0.75 + 0.5 * 2.0 + 3.0
    assert (verdict.token_rewards, verdict.turn_rewards) == (((2, 0.5), (3, 1.0), (6, 1.0)), ())


def test_mixed_reward_takes_as_long_as_its_slowest_source():
    slow, quick = Verdict(OK, 1.0, seconds=3.0), Verdict(OK, 1.0, seconds=0.5)
    failed = Verdict(TIMEOUT, seconds=7.0)
    for verdicts, seconds in (((slow, quick), 3.0), ((quick, slow), 3.0), ((slow, failed), 7.0)):
        sources = [(str(index), 1.0, ScriptedReward(verdict)) for index, verdict in enumerate(verdicts)]
        assert score(MixedReward(sources))[0].seconds == seconds


def test_score_each_crash_has_the_seconds_until_it():
    class Late:
        async def score(self, prompt, rollouts):
            await asyncio.sleep(0.05)
            raise ZeroDivisionError

    prompt = make_prompt()
    (verdict,) = asyncio.run(score_each(Late(), prompt, [make_rollout(prompt, "4")]))
    assert verdict.kind is CRASH
    assert 0.05 <= verdict.seconds < 60.0


def test_mixed_reward_any_source_that_fails_fails_the_sum():
    good = Verdict(OK, 1.0, detail="fine")
    late, dead = Verdict(TIMEOUT, detail="no answer within 1 s"), Verdict(CRASH, detail="boom")
    first = ScriptedReward(good, good, late, good)
    second = ScriptedReward(good, late, dead, dead)
    verdicts = score(MixedReward([("a", 1.0, first), ("b", 1.0, second)]), 4)
    assert [(v.kind, v.reward, v.detail) for v in verdicts] == [
        (OK, 2.0, "a: fine; b: fine"),
        (TIMEOUT, None, "b: no answer within 1 s"),
        (TIMEOUT, None, "a: no answer within 1 s; b: boom"),
        (CRASH, None, "b: boom"),
    ]
    assert dict(verdicts[1].extra) == {"reward_a": 1.0}


@pytest.mark.parametrize(
    ("broken", "detail"),
    [
        (ScriptedReward(error=ZeroDivisionError("by zero")), "b: ZeroDivisionError: by zero"),
        (ScriptedReward(), "b: 0 verdicts for 1 rollouts"),
    ],
)
def test_mixed_reward_source_that_breaks_its_protocol_is_a_crash(broken, detail):
    (verdict,) = score(MixedReward([("a", 1.0, ScriptedReward(Verdict(OK, 1.0))), ("b", 1.0, broken)]))
    assert (verdict.kind, verdict.detail) == (CRASH, detail)


def test_mixed_reward_is_the_sum_of_the_sources_that_do_not_abstain():
    # Each source knows its own prompts, and the third response is for none of them.
    none = Verdict(VerdictKind.ABSTAINED, detail="the scorer abstained")
    sums = Verdict(VerdictKind.WRONG, 0.0, turn_rewards=(0.5, -0.5))
    sources = [("a", 2.0, ScriptedReward(Verdict(OK, 1.0), none, none)), ("b", 3.0, ScriptedReward(none, sums, none))]
    first, second, third = score(ScoredFailures(MixedReward(sources), -1.0), 3)
    assert (first.kind, first.reward, first.score, first.source_rewards) == (OK, 2.0, 2.0, (1.0, None))
    assert (first.detail, dict(first.extra)) == ("b: the scorer abstained", {"reward_a": 1.0})
    assert (second.kind, second.reward, second.turn_rewards) == (VerdictKind.WRONG, 0.0, (1.5, -1.5))
    assert (third.kind, third.reward, third.source_rewards) == (VerdictKind.ABSTAINED, None, ())
    assert third.detail == "a: the scorer abstained; b: the scorer abstained"
    abstains = ScriptedReward(none)
    crash = ScriptedReward(Verdict(VerdictKind.CRASH))
    (verdict,) = score(MixedReward([("b", 1.0, abstains), ("c", 1.0, crash)]))
    assert verdict.kind is VerdictKind.CRASH  # a failure is not hidden by a source that abstained


def test_mixed_reward_source_that_cannot_run_at_all_is_raised():
    broken = ScriptedReward(error=RewardError("cannot import it"))
    with pytest.raises(RewardError, match="cannot import it"):
        score(MixedReward([("a", 1.0, ScriptedReward(Verdict(OK, 1.0))), ("b", 1.0, broken)]))


def test_mixed_reward_sum_that_overflows_is_a_crash():
    sources = [(name, 1e300, ScriptedReward(Verdict(OK, 1e300))) for name in "ab"]
    (verdict,) = score(MixedReward(sources))
    assert (verdict.kind, verdict.detail) == (CRASH, "the weighted sum is inf (score inf)")


def test_mixed_reward_sources_score_side_by_side():
    async def run():
        everyone = asyncio.Barrier(3)

        class Together(ScriptedReward):
            async def score(self, prompt, rollouts):
                await everyone.wait()  # for ever, one after the other
                return await super().score(prompt, rollouts)

        prompt = make_prompt()
        reward = MixedReward([(name, 1.0, Together(Verdict(OK, 1.0))) for name in "abc"])
        async with asyncio.timeout(60):
            return await reward.score(prompt, [make_rollout(prompt, "4")])

    assert asyncio.run(run())[0].reward == 3.0


def test_mixed_reward_close_closes_all_and_tells_what_failed():
    broken, other = ScriptedReward(error=OSError("stuck")), ScriptedReward()
    with pytest.raises(OSError, match="stuck"):
        asyncio.run(MixedReward([("a", 1.0, broken), ("b", 1.0, other)]).close())
    assert broken.closed
    assert other.closed


@pytest.mark.parametrize(
    ("names", "weight", "says"),
    [
        ([], 1.0, "got none"),
        (["a", "a"], 1.0, "different names, got a, a"),
        (["a"], float("nan"), "the weight of reward a is nan"),
        (["a"], float("inf"), "the weight of reward a is inf"),
    ],
)
def test_mixed_reward_sources_that_make_no_sum_are_refused(names, weight, says):
    with pytest.raises(ConfigError, match=says):
        MixedReward([(name, weight, ScriptedReward()) for name in names])


@pytest.fixture
def function(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text("def reward_func(queries, prompts, labels): return {'rewards': [2.0] * len(queries)}\n")
    return RewardSource(kind="function", targets=(str(path),))


def close(reward):
    asyncio.run(reward.close())


def test_build_reward_one_source_of_weight_one_is_itself(function):
    server = RewardSource(kind="server", targets=(NO_SERVER,))
    model = RewardSource(kind="model", targets=("a/model",))
    scorer = ScriptedReward()
    for source, models, kind in ((function, (), FunctionReward), (server, (), RemoteReward)):
        reward = build_reward([source], models=models)
        assert isinstance(reward, kind)
        close(reward)
    assert build_reward([model], models=[scorer]) is scorer
    weighted = RewardSource(kind="model", targets=("a/model",), weight=0.5)
    assert isinstance(build_reward([weighted], models=[scorer]), MixedReward)


def test_build_reward_mixes_functions_and_models_in_their_order(function):
    async def run():
        sources = [
            RewardSource(kind="model", targets=("org/one",), weight=10.0),
            function,
            RewardSource(kind="model", targets=("two/",), weight=100.0),
        ]
        models = [ScriptedReward(Verdict(WRONG, 1.0)), ScriptedReward(Verdict(OK, 3.0))]
        reward = build_reward(sources, CallOptions(timeout_s=20.0), models=models)
        prompt = make_prompt()
        verdicts = await reward.score(prompt, [make_rollout(prompt, "4")])
        await reward.close()
        return verdicts, [model.closed for model in models]

    (verdict,), closed = asyncio.run(run())
    # 10 * 1 + 2 + 100 * 3
    assert (verdict.kind, verdict.reward) == (WRONG, 312.0)
    assert dict(verdict.extra) == {"reward_one": 1.0, "reward_reward": 2.0, "reward_two": 3.0}
    assert closed == [True, True]


def test_build_reward_sources_that_cannot_work_are_refused(function):
    with pytest.raises(ConfigError, match="got 0 reward models for 1 sources of the kind model"):
        build_reward([RewardSource(kind="model", targets=("m",))])
    with pytest.raises(ConfigError, match="got 1 reward models for 0 sources"):
        build_reward([function], models=[ScriptedReward()])
    with pytest.raises(ConfigError, match="got none"):
        build_reward([])
    with pytest.raises(ConfigError, match="is no URL"):
        build_reward([RewardSource(kind="server", targets=("nowhere",))])
    with pytest.raises(ConfigError, match="does not exist"):
        build_reward([RewardSource(kind="function", targets=("nothere.py",))])


def test_check_reward_asks_what_the_source_is(function):
    assert check_reward(function, [make_prompt()], CallOptions(timeout_s=20.0)) is None
    failing = RewardSource(kind="function", targets=("rlhf_rollout.rewards.math",))
    assert "has no answer" in check_reward(failing, [make_prompt(label=None)], CallOptions(timeout_s=20.0))
    with pytest.raises(ConfigError, match="the reward server does not answer"):
        check_reward(RewardSource(kind="server", targets=(NO_SERVER,)), [make_prompt()], CallOptions(timeout_s=5.0))
    assert check_reward(RewardSource(kind="model", targets=("m",)), [make_prompt()]) is None
