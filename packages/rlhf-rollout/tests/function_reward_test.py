"""Function rewards in worker processes: values, isolation, and functions that raise, hang, die or cannot start."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import ConfigError, RewardError
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.function import FunctionReward, check_reward_function
from rlhf_rollout.rewards.sources import WorkerOptions
from rollout_testing import limit_only

OK, WRONG, CRASH, TIMEOUT = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH, VerdictKind.TIMEOUT


def score(reward, texts, *, prompt=None, **options):
    """Score responses to one prompt in a reward of its own; return the verdicts and the number of replaced workers."""

    async def run():
        function = FunctionReward(reward, **{"num_workers": 1, "timeout_s": 20.0, **options})
        try:
            asked = prompt or make_prompt("2+2=", "4")
            rollouts = [make_rollout(asked, text, index=index) for index, text in enumerate(texts)]
            return await function.score(asked, rollouts), function.num_replaced
        finally:
            await function.close()

    return asyncio.run(run())


def gone(process_id):
    """Whether the process ends within a minute."""
    for _ in range(3000):
        try:
            with open(f"/proc/{process_id}/stat") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
            # A process whose first thread is a zombie ends with the last of the others.
            if state == "Z" and len(os.listdir(f"/proc/{process_id}/task")) == 1:
                return True
        except (FileNotFoundError, ProcessLookupError):  # the second if it ends between opening and reading
            return True
        time.sleep(0.02)
    return False


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


def test_function_reward_built_in_math_by_module_name():
    verdicts, _ = score("rlhf_rollout.rewards.math", ["#### 4", "#### 5", "four"])
    assert [verdict.kind for verdict in verdicts] == [OK, WRONG, VerdictKind.UNPARSABLE]


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


def test_function_reward_what_the_function_prints_goes_to_the_log_and_not_into_the_protocol(write, tmp_path):
    reward = write("""
        import os, subprocess, sys
        print("importing")
        def reward_func(queries, prompts, labels):
            print("Query sample:", queries[0])
            print('{"scored": null}')
            os.write(1, b"raw\\n")
            print("to stderr", file=sys.stderr)
            subprocess.run([sys.executable, "-c", "print('from a child')"])
            return {"rewards": [1.0] * len(queries)}
    """)
    log = tmp_path / "reward.log"
    assert [verdict.kind for verdict in score(reward, ["4", "5"], log_path=log)[0]] == [OK, OK]
    text = log.read_text()
    assert all(part in text for part in ("importing", "Query sample: 2+2=4", "raw", "to stderr", "from a child"))


def test_function_reward_raise_charges_only_the_culprit_with_its_reason(write):
    reward = write("""
        def reward_func(queries, prompts, labels):
            return {"rewards": [float(query.split("=")[1]) for query in queries]}
    """)
    verdicts, num_replaced = score(reward, ["1", "x", "0"])
    assert [verdict.kind for verdict in verdicts] == [OK, CRASH, WRONG]
    assert verdicts[1].detail == "ValueError: could not convert string to float: 'x' (reward.py:3)"
    assert num_replaced == 0


def test_function_reward_wrong_length_is_retried_singly(write):
    reward = write('def reward_func(q, p, l): return {"rewards": [1.0]}')
    assert [verdict.kind for verdict in score(reward, ["1", "2"])[0]] == [OK, OK]
    reward = write('def reward_func(q, p, l): return {"rewards": []}')
    verdicts, _ = score(reward, ["1", "2"])
    assert [verdict.kind for verdict in verdicts] == [CRASH, CRASH]
    assert "`rewards` has 0 numbers for 1 samples" in verdicts[0].detail
    assert "\n" not in verdicts[0].detail


def test_function_reward_not_finite_charges_only_that_sample(write):
    reward = write('def reward_func(q, p, l): return {"rewards": [float(x.split("=")[1]) for x in q]}')
    verdicts, _ = score(reward, ["nan", "1", "inf"])
    assert [verdict.kind for verdict in verdicts] == [CRASH, OK, CRASH]
    assert [verdict.detail for verdict in verdicts] == ["the reward is nan", "", "the reward is inf"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("os._exit(3)", "the reward worker exited with status 3"),
        ("os.kill(os.getpid(), 11)", "the reward worker was ended by SIGSEGV"),
        ("sys.exit('bye')", "SystemExit: bye (reward.py:5)"),
    ],
)
def test_function_reward_worker_that_dies_is_replaced_and_only_the_culprit_charged(write, code, says):
    reward = write(f"""
        import os, sys
        def reward_func(queries, prompts, labels):
            if any(query.endswith("die") for query in queries):
                {code}
            return {{"rewards": [1.0] * len(queries)}}
    """)
    verdicts, num_replaced = score(reward, ["1", "die", "1"])
    assert [verdict.kind for verdict in verdicts] == [OK, CRASH, OK]
    assert verdicts[1].detail == says
    assert num_replaced == (0 if "sys.exit" in code else 2)


@pytest.mark.parametrize("hang", ["time.sleep(1000)", "re.match('(a+)+$', 'a' * 60 + 'b')"])
def test_function_reward_hang_is_killed_and_only_the_culprit_charged(write, hang, monkeypatch):
    reward = write(f"""
        import re, time
        def reward_func(queries, prompts, labels):
            if any(query.endswith("hang") for query in queries):
                {hang}
            return {{"rewards": [1.0] * len(queries)}}
    """)
    limit_only(monkeypatch, lambda queries: any(query.endswith("hang") for query in queries))
    started = time.monotonic()
    verdicts, num_replaced = score(reward, ["1", "hang", "1"], timeout_s=1.0)
    assert time.monotonic() - started < 100
    assert [verdict.kind for verdict in verdicts] == [OK, TIMEOUT, OK]
    assert verdicts[1].detail == "no answer within 1 s"
    assert num_replaced == 2


def test_function_reward_hung_worker_does_not_outlive_a_killed_parent(write, tmp_path):
    pid_path = tmp_path / "pid"
    reward = write(f"""
        import os, re
        def reward_func(queries, prompts, labels):
            open({str(pid_path)!r}, "w").write(str(os.getpid()) + " ")
            re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter's lock: no thread of the worker can run
    """)
    parent = write(
        f"""
        import asyncio, sys
        sys.path[:] = {sys.path!r}
        from record_testing import make_prompt, make_rollout
        from rlhf_rollout.rewards.function import FunctionReward
        prompt = make_prompt()
        asyncio.run(FunctionReward({reward!r}, timeout_s=500.0).score(prompt, [make_rollout(prompt, "4")]))
        """,
        "parent.py",
    )
    process = subprocess.Popen([sys.executable, parent])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (pid_path.exists() and pid_path.read_text().endswith(" ")):
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert gone(int(pid_path.read_text()))


def test_function_reward_never_blocks_the_event_loop(write, tmp_path):
    reward = write(f"""
        import os, time
        def reward_func(queries, prompts, labels):
            open({str(tmp_path / "called")!r}, "a").write("x")
            while not os.path.exists({str(tmp_path / "go")!r}):
                time.sleep(0.01)
            return {{"rewards": [1.0] * len(queries)}}
    """)

    async def run():
        function = FunctionReward(reward, num_workers=2, timeout_s=60.0)
        prompt = make_prompt()
        scoring = asyncio.gather(*(function.score(prompt, [make_rollout(prompt, "4")]) for _ in range(4)))
        called = tmp_path / "called"
        while not (called.exists() and called.read_text() == "xx"):
            await asyncio.sleep(0.01)
        (tmp_path / "go").touch()  # a call that blocked the loop would wait for this in vain
        kinds = [verdicts[0].kind for verdicts in await scoring]
        await function.close()
        return kinds

    assert asyncio.run(run()) == [OK] * 4


def test_function_reward_works_from_one_event_loop_after_another(write):
    function = FunctionReward(write('def reward_func(q, p, l): return {"rewards": [1.0]}'), num_workers=1)
    prompt = make_prompt()
    for _ in range(2):
        verdicts = asyncio.run(function.score(prompt, [make_rollout(prompt, "4")]))
        assert verdicts[0].kind is OK
    asyncio.run(function.close())


def test_function_reward_worker_killed_between_calls_charges_no_one(write):
    reward = write("""
        import os
        def reward_func(queries, prompts, labels):
            return {"rewards": [os.getpid()], "extra_logs": {"guard": os.getppid()}}
    """)

    async def run():
        function = FunctionReward(reward, num_workers=1)
        prompt = make_prompt()
        rollouts = [make_rollout(prompt, "4")]
        first = (await function.score(prompt, rollouts))[0]
        os.kill(int(first.reward), signal.SIGKILL)
        assert gone(int(first.extra["guard"]))  # which ends after the worker
        second = (await function.score(prompt, rollouts))[0]
        await function.close()
        return first, second, function.num_replaced

    first, second, num_replaced = asyncio.run(run())
    assert second.kind is OK
    assert second.reward != first.reward
    assert num_replaced == 1


def test_function_reward_close_ends_a_hung_call_at_once_and_refuses_further_ones(write, tmp_path):
    reward = write(f"""
        import time
        def reward_func(queries, prompts, labels):
            open({str(tmp_path / "called")!r}, "w")
            time.sleep(1000)
    """)

    async def run():
        function = FunctionReward(reward, num_workers=1, timeout_s=500.0)
        prompt = make_prompt()
        pending = asyncio.create_task(function.score(prompt, [make_rollout(prompt, "4")]))
        while not (tmp_path / "called").exists():
            await asyncio.sleep(0.02)
        started = time.monotonic()
        await function.close()
        seconds = time.monotonic() - started
        await asyncio.gather(pending, return_exceptions=True)
        with pytest.raises(RewardError, match="have been shut down"):
            await function.score(prompt, [make_rollout(prompt, "4")])
        return seconds

    assert asyncio.run(run()) < 60


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import nonexistent_module", "ModuleNotFoundError: No module named 'nonexistent_module' (reward.py:2)"),
        ("raise SystemExit('no')", "SystemExit: no (reward.py:2)"),
        ("import os; os._exit(4)", "exited with status 4"),
    ],
)
def test_function_reward_that_cannot_be_imported_is_an_error_with_the_reason(write, code, says):
    reward = write(f"\n{code}\ndef reward_func(q, p, l): ...\n")
    with pytest.raises(RewardError) as caught:
        score(reward, ["1"])
    assert says in str(caught.value)


def test_function_reward_worker_that_starts_no_more_is_an_error_after_three_tries(write, tmp_path):
    reward = write(f"""
        import os
        path = {str(tmp_path / "starts")!r}
        open(path, "a").write("x")
        if os.path.getsize(path) > 1:
            raise OSError("the disk is full")
        def reward_func(queries, prompts, labels):
            os._exit(1)
    """)

    async def run():
        function = FunctionReward(reward, num_workers=1)
        prompt = make_prompt()
        rollouts = [make_rollout(prompt, "4")]
        assert (await function.score(prompt, rollouts))[0].kind is CRASH
        with pytest.raises(RewardError, match="OSError: the disk is full"):
            await function.score(prompt, rollouts)
        await function.close()

    asyncio.run(run())
    assert (tmp_path / "starts").read_text() == "x" * 4  # the one that started, then three that did not


def test_function_reward_impossible_options_are_refused(write):
    reward = write('def reward_func(q, p, l): return {"rewards": [1.0]}')
    for options in ({"num_workers": 0}, {"timeout_s": 0}, {"max_failures": 0}):
        with pytest.raises(ConfigError, match="must be positive"):
            FunctionReward(reward, **options)


def test_check_reward_function_good_one_has_no_problem(write):
    reward = write('def reward_func(q, p, l): return {"rewards": [1.0] * len(q)}')
    assert check_reward_function(reward, [make_prompt()]) is None


def test_check_reward_function_without_prompts_imports_and_calls_nothing(write):
    assert check_reward_function(write("def reward_func(q, p, l): return 1 / 0")) is None


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ("[1.0]", "a value of type list, not a dictionary"),
        ('{"rewards": [1.0]}', "`rewards` has 1 numbers for 2 samples"),
        ('{"rewards": [1.0, float("nan")]}', "the reward is nan in the trial call (sample 1)"),
        ('{"rewards": [1.0, 1.0], "scores": [float("inf"), 1.0]}', "the score is inf in the trial call (sample 0)"),
    ],
)
def test_check_reward_function_unusable_result_is_refused(write, result, says):
    reward = write(f"def reward_func(q, p, l): return {result}")
    with pytest.raises(RewardError) as caught:
        check_reward_function(reward, [make_prompt()])
    assert str(caught.value).startswith(f"{reward}:reward_func: ")
    assert says in str(caught.value)


def test_check_reward_function_raise_and_hang_are_reported_and_not_fatal(write):
    problem = check_reward_function(write("def reward_func(q, p, l): return 1 / 0"), [make_prompt()])
    assert problem == "ZeroDivisionError: division by zero (reward.py:1)"
    hang = write("import time\ndef reward_func(q, p, l): time.sleep(1000)")
    assert (
        check_reward_function(hang, [make_prompt()], timeout_s=0.5)
        == "no answer within 0.5 s for a call with 2 responses"
    )


def test_check_reward_function_that_cannot_be_imported_is_refused(write):
    with pytest.raises(ConfigError, match="has no function `reward_func`"):
        check_reward_function(write("def other(): ..."))
    with pytest.raises(RewardError, match=r"ZeroDivisionError.*\n\nhint: "):
        check_reward_function(write("1 / 0\ndef reward_func(q, p, l): ..."))
    hang = write("import time; time.sleep(1000)\nreward_func = 1")
    with pytest.raises(RewardError, match=r"took longer than 0\.5 s"):
        check_reward_function(hang, worker=WorkerOptions(start_timeout_s=0.5))
    with pytest.raises(RewardError, match="No module named 'no_such_module_at_all'"):
        check_reward_function("no_such_module_at_all:grade")
