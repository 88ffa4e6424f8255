"""Reward functions that compare the responses of a call: who is charged for a failure, and who may abstain."""

import asyncio

from record_testing import make_prompt, make_rollout
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.function import FunctionReward
from rlhf_rollout.rewards.mix import ScoredFailures
from rlhf_rollout.rewards.outcomes import Failure, judge
from rlhf_rollout.rewards.sources import CallOptions
from rlhf_rollout.rewards.user_function import Scored


def test_function_that_compares_charges_the_failing_response_alone(write):
    reward = write("""
        import statistics

        def reward_func(queries, prompts, labels):
            numbers = [float(query.removeprefix(prompt)) for query, prompt in zip(queries, prompts)]
            mean = statistics.mean(numbers)
            deviation = statistics.stdev(numbers) if len(numbers) > 1 else float("nan")
            return {"rewards": [(number - mean) / deviation for number in numbers]}
    """)

    async def run():
        function = FunctionReward(reward)
        prompts = [make_prompt(f"{number}=", prompt_id=str(number)) for number in range(4)]
        texts = ["1", "2", "no number", "3"]
        groups = [
            function.score(prompt, [make_rollout(prompt, text, group_id=prompt.prompt_id)])
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        verdicts = await asyncio.gather(*groups)
        await function.close()
        return [verdict for [verdict] in verdicts]

    verdicts = asyncio.run(run())
    assert [verdict.reward for verdict in verdicts] == [-1.0, 0.0, None, 1.0]  # 1, 2 and 3 have the deviation 1
    assert verdicts[2].kind is VerdictKind.CRASH
    assert "could not convert string to float" in verdicts[2].detail


def test_judge_together_falls_back_on_what_samples_got_alone():
    parts = []

    async def ask(samples, failure):
        parts.append("".join(samples))
        if len(samples) > 1 or samples[0] == "c":
            return Failure(VerdictKind.CRASH, "boom\n\nhint: x")
        return Scored([2.0], [2.0], {}, [None])

    def kinds(together):
        parts.clear()
        verdicts = asyncio.run(judge("abc", ask, together=together))
        assert verdicts[0].detail == ("scored alone; in one call: boom; hint: x" if together else "")
        return [verdict.kind.failed for verdict in verdicts]

    assert kinds(True) == [False, False, True]
    assert parts == ["abc", "a", "b", "c", "ab"]
    assert kinds(False) == [False, False, True]
    assert parts == ["abc", "a", "b", "c"]
    parts.clear()
    asyncio.run(judge("ac", ask, together=True))
    assert parts == ["ac", "a", "c"]  # a single one has nothing to be compared with


def test_function_may_abstain_of_some_responses_and_of_all_to_a_prompt(write):
    reward = write("""
        def reward_func(queries, prompts, labels):
            kept = [query.endswith("x") for query in queries]
            return {"rewards": [1.0 if each else None for each in kept], "extra_logs": {"n": [None] * len(queries)}}
    """)

    async def run():
        function = ScoredFailures(FunctionReward(reward, CallOptions(timeout_s=60.0)), -1.0)
        prompts = [make_prompt(f"{number}=", prompt_id=str(number)) for number in range(2)]
        groups = []
        for prompt, texts in zip(prompts, (["x", "a"], ["b", "c"]), strict=True):
            rollouts = [make_rollout(prompt, text, group_id=prompt.prompt_id) for text in texts]
            groups.append(function.score(prompt, rollouts))
        verdicts = await asyncio.gather(*groups)
        await function.close()
        return verdicts

    rewards = [[verdict.reward for verdict in group] for group in asyncio.run(run())]
    assert rewards == [[1.0, None], [None, None]]
