"""Function rewards in worker processes: values, isolation, and functions that raise, hang, die or cannot start."""

import asyncio
from types import SimpleNamespace

import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import RewardError
from rlhf_data.records import FinishReason, Rollout, VerdictKind
from rlhf_rollout.rewards.function import FunctionReward, RewardCall, ask, check_reward_function, reward_code
from rlhf_rollout.rewards.sources import CallOptions
from rlhf_rollout.rewards.user_function import parse_reward
from rlhf_rollout.workers.guarded import DEFAULT_WORKER
from rlhf_rollout.workers.pool import WorkerPool
from rlhf_rollout.workers.rpc import CallError

OK, WRONG, CRASH, TIMEOUT = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH, VerdictKind.TIMEOUT


def score(reward, texts, *, prompt=None, **options):
    """Score responses to one prompt in a reward of its own; return the verdicts and the number of replaced workers."""

    async def run():
        function = FunctionReward(reward, CallOptions(**{"timeout_s": 20.0, **options}))
        try:
            asked = prompt or make_prompt("2+2=", "4")
            rollouts = [make_rollout(asked, text, index=index) for index, text in enumerate(texts)]
            return await function.score(asked, rollouts), function.num_replaced
        finally:
            await function.close()

    return asyncio.run(run())


def test_function_reward_passes_queries_prompts_and_labels(write):
    reward = write("""
        def reward_func(queries, prompts, labels):
            assert queries == ["2+2=4", "2+2=5"] and prompts == ["2+2="] * 2 and labels == ["4"] * 2, (queries, labels)
            right = [query == prompt + label for query, prompt, label in zip(queries, prompts, labels)]
            return {"rewards": right, "extra_logs": {"right": sum(right)}}
    """)
    verdicts, num_replaced = score(reward, ["4", "5"])
    assert [(verdict.kind, verdict.reward) for verdict in verdicts] == [(OK, 1.0), (WRONG, 0.0)]
    assert [dict(verdict.extra) for verdict in verdicts] == [{"right": 1.0}] * 2
    assert num_replaced == 0


def test_function_reward_prompt_without_label_gives_an_empty_one(write):
    reward = write('def reward_func(q, p, l): return {"rewards": [label == "" for label in l]}')
    assert score(reward, ["4"], prompt=make_prompt("x", None))[0][0].kind is OK


def test_function_reward_no_rollouts_calls_nothing(write):
    assert score(write("def reward_func(q, p, l): return 1 / 0"), []) == ([], 0)


def test_function_reward_file_sees_its_own_folder_and_a_clean_interpreter(write):
    write("BONUS = 3.0", "reward_helpers.py")
    reward = write("""
        import sys
        heavy = [name for name in ("torch", "ray", "vllm", "transformers", "pytest") if name in sys.modules]
        from reward_helpers import BONUS
        def reward_func(queries, prompts, labels):
            if heavy or "pytest" in sys.modules:
                raise RuntimeError(f"loaded: {heavy}")
            return {"rewards": [BONUS]}
    """)
    assert score(reward, ["4"])[0][0].reward == 3.0


def test_function_reward_wrong_length_is_retried_singly(write):
    reward = write('def reward_func(q, p, l): return {"rewards": [1.0]}')
    assert [verdict.kind for verdict in score(reward, ["1", "2"])[0]] == [OK, OK]
    reward = write('def reward_func(q, p, l): return {"rewards": []}')
    verdicts, _ = score(reward, ["1", "2"])
    assert [verdict.kind for verdict in verdicts] == [CRASH, CRASH]
    assert "`rewards` has 0 numbers for 1 samples" in verdicts[0].detail
    assert "\n" not in verdicts[0].detail


@pytest.mark.parametrize(("threshold", "right"), [(1.0, [True, False]), (0.3, [True, True])])
def test_function_reward_counts_as_right_what_reaches_the_threshold(write, threshold, right):
    reward = write('def reward_func(q, p, l): return {"rewards": [9.0, 9.0], "scores": [1.0, 1 / 3]}')
    verdicts, _ = score(reward, ["a", "b"], success_threshold=threshold)
    assert [verdict.kind is OK for verdict in verdicts] == right


# Notes each call in the file "called" of its folder, and answers once there is a file "go".
WAITS = """
    import os, time
    FOLDER = os.path.dirname(__file__)
    def reward_func(queries, prompts, labels):
        open(FOLDER + "/called", "a").write("x")
        while not os.path.exists(FOLDER + "/go"):
            time.sleep(0.01)
        return {"rewards": [1.0] * len(queries)}
"""


def test_large_answer_is_read_whole(write):
    reward = write("""
        def reward_func(queries, prompts, labels):
            return {"rewards": [1.0], "extra_logs": {str(number): 1.0 for number in range(2**17)}}
    """)
    [verdict] = score(reward, ["4"])[0]
    assert verdict.kind is OK
    assert len(verdict.extra) == 2**17


def test_async_function_with_extras_receives_lists_of_each_sample_on_one_event_loop(write):
    reward = write("""
        import asyncio
        LOOPS = set()
        async def reward_func(queries, prompts, labels, *, responses, token_ids, finish_reasons, group_ids):
            await asyncio.sleep(0)
            LOOPS.add(id(asyncio.get_running_loop()))
            assert len(LOOPS) == 1
            assert queries == [prompt + response for prompt, response in zip(prompts, responses)]
            lengths = [len(ids) for ids in token_ids]
            assert finish_reasons == ["stop", "length"] and len(set(group_ids)) == 1, (finish_reasons, group_ids)
            return {"rewards": lengths, "extra_logs": {"first": [ids[0] for ids in token_ids]}}
    """)

    async def run():
        function = FunctionReward(reward)
        prompt = make_prompt("2+2=", "4")
        rollouts = [make_rollout(prompt, "4"), make_rollout(prompt, "55", index=1)]
        rollouts[1] = Rollout("r1", rollouts[0].group_id, rollouts[1].spans, FinishReason.LENGTH, "55")
        first = await function.score(prompt, rollouts)
        assert await function.score(prompt, rollouts) == first
        await function.close()
        return rollouts, first

    rollouts, verdicts = asyncio.run(run())
    answers = [rollout.spans[1].token_ids for rollout in rollouts]
    assert [verdict.reward for verdict in verdicts] == [len(answer) for answer in answers]
    assert [verdict.extra["first"] for verdict in verdicts] == [answer[0] for answer in answers]


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        ("q, p, l", "{}"),
        ("responses, p, l, group_ids", "{'group_ids'}"),
        ("q, p, l, **more", "{'responses', 'token_ids', 'finish_reasons', 'group_ids'}"),
    ],
)
def test_function_receives_the_extras_that_it_has_parameters_for(write, parameters, wanted):
    reward = write(f"""
        def reward_func({parameters}):
            given = locals()
            names = set(given.get("more", given)) & {{"token_ids", "finish_reasons", "group_ids", "responses"}}
            names -= {{"responses"}} if "more" not in given else set()
            assert names == set({wanted}), names
            return {{"rewards": [1.0]}}
    """)
    assert score(reward, ["4"])[0][0].detail == ""


def test_numbers_and_texts_that_cannot_be_used_charge_their_sample_alone(write):
    reward = write("""
        def reward_func(queries, prompts, labels):
            numbers = {"huge": 10**400, "low": -(10**400), "1e39": 1e39, "lone": 1.0}
            if queries[0].endswith("text"):
                raise ValueError("bad \\ud800 \\x1b[2J")
            return {"rewards": [numbers[query[4:]] for query in queries], "extra_logs": {"a\\ud800\\x1bb": 1}}
    """)
    verdicts, _ = score(reward, ["huge", "low", "1e39", "lone"])
    assert [(verdict.kind, verdict.detail) for verdict in verdicts] == [
        (CRASH, "the reward is inf"),
        (CRASH, "the reward is -inf"),
        (CRASH, "the reward is 1e+39, more than float32 can hold"),
        (OK, ""),
    ]
    assert dict(verdicts[3].extra) == {"a\\ud800\\x1bb": 1.0}
    assert score(reward, ["text"])[0][0].detail == "ValueError: bad \\ud800 \\x1b[2J (reward.py:5)"


def test_answer_beyond_the_limit_is_a_crash(write):
    reward = write("""
        import os, sys, time
        def reward_func(queries, prompts, labels):
            data = bytes(129 * 2**20)
            while data:
                data = data[os.write(int(sys.argv[1]), data[: 2**23]):]
            time.sleep(1000)
    """)
    [verdict], _ = score(reward, ["4"], timeout_s=60.0)
    detail = "something other than an answer came from the reward worker"
    assert (verdict.kind, verdict.detail) == (CRASH, detail)


def test_caller_that_gives_up_leaves_its_worker_to_the_call(write, tmp_path):
    reward = write(WAITS)

    async def run():
        function = FunctionReward(reward, CallOptions(timeout_s=60.0))
        samples = [(make_prompt(), [make_rollout(make_prompt(), "4")])]
        asked = [asyncio.create_task(function._ask([(prompt, rollout)], None)) for prompt, [rollout] in samples * 2]
        while not (tmp_path / "called").exists():
            await asyncio.sleep(0.01)
        asked[0].cancel()
        await asyncio.sleep(0.2)
        called = (tmp_path / "called").read_text()  # the second call waits for the first
        (tmp_path / "go").touch()
        scored = await asked[1]
        await function.close()
        return called, scored.rewards, function.num_replaced

    assert asyncio.run(run()) == ("x", [1.0], 0)


@pytest.mark.parametrize(("body", "is_fatal"), [("1 / 0", False), ("os._exit(1)", True), ("{'rewards': [1]}", False)])
def test_call_that_fails_says_whether_it_has_cost_the_worker(write, body, is_fatal):
    code = reward_code(parse_reward(write(f"import os\ndef reward_func(q, p, l): return {body}")), DEFAULT_WORKER)

    async def run():
        pool = WorkerPool(code, num_processes=1, timeout_s=20.0)
        try:
            return await ask(pool, RewardCall([(make_prompt(), make_rollout(make_prompt(), "4"))]), 20.0)
        finally:
            await pool.close()

    assert asyncio.run(run())[1] is is_fatal


def test_time_limit_is_that_of_a_sample(write, monkeypatch):
    """Each sample takes half a second by a clock that only calls move."""
    now, sizes = [0.0], []

    async def timed(pool, call, timeout_s):
        sizes.append(len(call.samples))
        needs_s = 0.5 * sizes[-1]
        call.activity.since = now[0]
        now[0] += min(needs_s, timeout_s)
        if needs_s > timeout_s:
            raise CallError("late", is_late=True)
        return {"rewards": [1.0] * sizes[-1], "scores": [1.0] * sizes[-1], "extra": {}, "verdicts": [None] * sizes[-1]}

    monkeypatch.setattr(WorkerPool, "call", timed)
    monkeypatch.setattr("rlhf_rollout.rewards.function.time", SimpleNamespace(monotonic=lambda: now[0]))
    reward = write("def reward_func(queries, prompts, labels): ...")

    async def run():
        function = FunctionReward(reward, CallOptions(timeout_s=1.0))
        prompt = make_prompt()
        rollouts = [make_rollout(prompt, "4", index=index) for index in range(3)]
        for _ in range(2):
            assert [verdict.kind for verdict in await function.score(prompt, rollouts)] == [OK] * 3
        await function.close()

    asyncio.run(run())
    # Those that succeed alone are scored together again. A later call for three may take as long as it needs.
    assert sizes == [3, 1, 1, 1, 3, 3]


async def test_reward_function_is_checked_from_within_an_event_loop(write):
    problem = check_reward_function(write("def reward_func(q, p, l): return 1 / 0"), [make_prompt()])
    assert "ZeroDivisionError" in problem


def test_check_reward_function_without_prompts_imports_and_calls_nothing(write):
    assert check_reward_function(write("def reward_func(q, p, l): return 1 / 0")) is None


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ('{"rewards": [1.0]}', "`rewards` has 1 numbers for 2 samples"),
        ('{"rewards": [1.0, float("nan")]}', "the reward is nan in the trial call (sample 1)"),
        ('{"rewards": [1.0, 1.0], "scores": [float("inf"), 1.0]}', "the score is inf in the trial call (sample 0)"),
    ],
)
def test_check_reward_function_unusable_result_is_refused(write, result, says):
    reward = write(f"def reward_func(q, p, l): return {result}")
    with pytest.raises(RewardError) as caught:
        check_reward_function(reward, [make_prompt()], CallOptions(batch_size=2))
    assert str(caught.value).startswith(f"{reward}:reward_func: ")
    assert says in str(caught.value) and "this call holds one response" not in str(caught.value)


def test_check_reward_function_raise_and_hang_are_reported_and_not_fatal(write):
    problem = check_reward_function(write("def reward_func(q, p, l): return 1 / 0"), [make_prompt()])
    assert problem == "ZeroDivisionError: division by zero (reward.py:1)"
    hang = write("import time\ndef reward_func(q, p, l): time.sleep(1000)")
    problem = check_reward_function(hang, [make_prompt()], CallOptions(timeout_s=0.5, batch_size=2))
    assert problem == "no answer within 0.5 s for a call with 2 responses"


def test_check_reward_function_that_cannot_be_imported_is_refused(write):
    with pytest.raises(RewardError, match=r"ZeroDivisionError.*\n\nhint: "):
        check_reward_function(write("1 / 0\ndef reward_func(q, p, l): ..."))
    with pytest.raises(RewardError, match="No module named 'no_such_module_at_all'"):
        check_reward_function("no_such_module_at_all:grade")
