"""The process of a reward function: deadlines, children, memory, environment, and what it may answer."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.errors import RewardError
from rlhf_data.records import FinishReason, Rollout, VerdictKind
from rlhf_rollout.rewards import process
from rlhf_rollout.rewards.function import FunctionReward
from rlhf_rollout.rewards.outcomes import Failure
from rlhf_rollout.rewards.process import WorkerProcess
from rlhf_rollout.rewards.sources import WorkerOptions
from rlhf_rollout.rewards.user_function import parse_reward

OK, WRONG, CRASH, TIMEOUT = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH, VerdictKind.TIMEOUT
NO_ANSWER = "something other than an answer came from the reward worker"
SAMPLE = (["2+2=4"], ["2+2="], ["4"])
EXTRAS = {"responses": ["4"], "token_ids": [[52]], "finish_reasons": ["stop"], "group_ids": ["g0"]}


@pytest.fixture
def start():
    """Return a function that starts a worker for a reward."""
    workers = []

    def start(reward, **options):
        workers.append(WorkerProcess(parse_reward(reward), WorkerOptions(**options)))
        workers[-1].start()
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


def score(reward, texts, **options):
    """Score responses to one prompt in a reward of its own; return the verdicts."""

    async def run():
        function = FunctionReward(reward, **{"num_workers": 1, "timeout_s": 20.0, **options})
        try:
            prompt = make_prompt("2+2=", "4")
            rollouts = [make_rollout(prompt, text, index=index) for index, text in enumerate(texts)]
            return await function.score(prompt, rollouts)
        finally:
            await function.close()

    return asyncio.run(run())


def eventually(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def is_gone(process_id):
    return not os.path.exists(f"/proc/{process_id}")


def test_sending_to_a_stopped_worker_ends_at_the_deadline(write, start):
    worker = start(write("import os\ndef reward_func(q, p, l): return {'rewards': [os.getpid()]}"))
    process_id = int(worker.call(SAMPLE, EXTRAS, 20.0).rewards[0])
    os.kill(process_id, signal.SIGSTOP)
    started = time.monotonic()
    outcome = worker.call((["x" * 2**22], [""], [""]), EXTRAS, 1.0)  # more than the connection buffers
    assert (outcome.kind, outcome.detail) == (TIMEOUT, "no answer within 1 s")
    assert time.monotonic() - started < 60
    assert is_gone(process_id)


def test_answers_belong_to_their_calls_when_the_function_forks_or_an_answer_comes_twice(write, start):
    worker = start(
        write("""
        import json, os, sys
        CALLS = [0]
        def reward_func(queries, prompts, labels):
            os.fork()
            CALLS[0] += 1
            scored = {"rewards": [-1.0], "scores": [-1.0], "extra": {}, "verdicts": [None]}
            earlier = json.dumps({"call": CALLS[0] - 1, "scored": scored}).encode() + b"\\n"
            os.write(int(sys.argv[1]), 2 * earlier)  # the worker's connection
            return {"rewards": [len(queries[0])]}
        """)
    )
    rewards = [worker.call((["x" * n], [""], [""]), EXTRAS, 20.0).rewards[0] for n in (3, 5, 7)]
    assert rewards == [3.0, 5.0, 7.0]


def test_bytes_that_are_no_answer_are_a_crash_and_the_end_of_the_worker(write, start):
    code = 'import os, sys\ndef reward_func(q, p, l): os.write(int(sys.argv[1]), b"[1]\\n")'
    worker = start(write(code))
    outcome = worker.call(SAMPLE, EXTRAS, 20.0)
    assert (outcome.kind, outcome.detail) == (CRASH, NO_ANSWER)
    assert not worker.alive


def test_answer_beyond_the_limit_is_a_crash(write, start):
    worker = start(
        write("""
        import os, sys, time
        def reward_func(queries, prompts, labels):
            data = bytes(129 * 2**20)
            while data:
                data = data[os.write(int(sys.argv[1]), data[: 2**23]):]
            time.sleep(1000)
        """)
    )
    outcome = worker.call(SAMPLE, EXTRAS, 60.0)
    assert (outcome.kind, outcome.detail) == (CRASH, NO_ANSWER)


def test_large_answer_is_read_whole(write):
    reward = write("""
        def reward_func(queries, prompts, labels):
            return {"rewards": [1.0], "extra_logs": {str(number): 1.0 for number in range(2**17)}}
    """)
    [verdict] = score(reward, ["4"])
    assert verdict.kind is OK
    assert len(verdict.extra) == 2**17


def test_answer_that_arrives_in_drops_ends_at_the_deadline(write, start):
    worker = start(
        write("""
        import os, sys, time
        def reward_func(queries, prompts, labels):
            for _ in range(1000):
                os.write(int(sys.argv[1]), b"[")
                time.sleep(0.2)
        """)
    )
    started = time.monotonic()
    assert worker.call(SAMPLE, EXTRAS, 1.0).kind is TIMEOUT
    assert time.monotonic() - started < 60


def test_function_that_cannot_be_imported_leaves_no_process_and_no_timer(write):
    module = write("raise ValueError('no')\ndef reward_func(queries, prompts, labels): ...")
    worker = WorkerProcess(parse_reward(module), WorkerOptions())
    with pytest.raises(RewardError, match="cannot import the reward function"):
        worker.start()
    assert not worker.alive
    assert eventually(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))


@pytest.mark.parametrize("status", [0, 3])
def test_function_that_exits_is_a_crash_with_its_status(write, status):
    reward = write(f"""
        import os
        def reward_func(queries, prompts, labels):
            os._exit({status})
    """)
    [verdict] = score(reward, ["4"])
    assert (verdict.kind, verdict.detail) == (CRASH, f"the reward worker exited with status {status}")


def test_close_does_not_wait_for_a_worker_that_is_starting(write, tmp_path):
    reward = write(f"""
        import time
        open({str(tmp_path / "importing")!r}, "w")
        time.sleep(1000)
        def reward_func(queries, prompts, labels): ...
    """)

    async def run():
        function = FunctionReward(reward, num_workers=1, worker=WorkerOptions(start_timeout_s=500.0))
        prompt = make_prompt()
        pending = asyncio.create_task(function.score(prompt, [make_rollout(prompt, "4")]))
        while not (tmp_path / "importing").exists():
            await asyncio.sleep(0.02)
        started = time.monotonic()
        await function.close()
        with pytest.raises(RewardError, match="have been shut down"):
            await pending
        return time.monotonic() - started

    assert asyncio.run(run()) < 60


SPAWNS = """
    import os, subprocess, sys, time
    def reward_func(queries, prompts, labels):
        plain = subprocess.Popen(["sleep", "1000"])
        session = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        daemon = "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True)"
        daemon += "; os.close(1); time.sleep(1000)"
        lost = subprocess.run([sys.executable, "-c", daemon], stdout=subprocess.PIPE, text=True).stdout
        open(PATH, "w").write(f"{os.getpid()} {plain.pid} {session.pid} {lost.strip()} end")
        time.sleep(1000)
"""


def test_children_of_a_hung_call_end_with_it(write, tmp_path):
    pids = tmp_path / "pids"
    pids.touch()
    reward = write(SPAWNS.replace("PATH", repr(str(pids))))
    for timeout_s in (5.0, 60.0):  # a busy machine may need longer to start them
        assert score(reward, ["4"], timeout_s=timeout_s)[0].kind is TIMEOUT
        if pids.read_text().endswith(" end"):
            break
    process_ids = pids.read_text().split()[:-1]
    assert len(process_ids) == 4
    assert all(map(is_gone, process_ids))


def test_children_end_when_the_program_that_scores_is_killed(write, tmp_path):
    pids = tmp_path / "pids"
    reward = write(SPAWNS.replace("PATH", repr(str(pids))))
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
    assert eventually(lambda: pids.exists() and pids.read_text().endswith(" end"))
    process.kill()
    process.wait()
    assert eventually(lambda: all(map(is_gone, pids.read_text().split()[:-1])))


def test_function_that_kills_its_parent_ends_its_worker_only(write, tmp_path):
    reward = write(f"""
        import os, signal, subprocess, time
        def reward_func(queries, prompts, labels):
            if queries[0].endswith("kill"):
                child = subprocess.Popen(["sleep", "1000"])
                open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(1000)
            return {{"rewards": [1.0]}}
    """)
    assert [(v.kind, v.detail) for v in score(reward, ["kill"])] == [(CRASH, "the reward worker was ended by SIGKILL")]
    assert eventually(lambda: all(map(is_gone, (tmp_path / "pids").read_text().split())))


def test_memory_beyond_the_limit_charges_the_culprit_alone(write):
    reward = write("""
        import os
        def reward_func(queries, prompts, labels):
            bytearray(2 ** (30 if any(query.endswith("big") for query in queries) else 29))
            return {"rewards": [os.getpid()] * len(queries)}
    """)
    first, big, last = score(reward, ["1", "big", "2"], worker=WorkerOptions(memory_gb=0.75))
    assert (big.kind, big.detail) == (CRASH, "MemoryError: (reward.py:4)")
    assert first.reward == last.reward > 0  # one worker, which goes on


def test_time_limit_is_that_of_a_sample(write, monkeypatch):
    """Each sample takes half a second by a clock that only calls move."""
    now, sizes = [0.0], []
    call = WorkerProcess.call

    def timed(worker, samples, extras, timeout_s):
        sizes.append(len(samples[0]))
        needs_s = 0.5 * sizes[-1]
        now[0] += min(needs_s, timeout_s)
        if needs_s > timeout_s:
            worker.close()
            return Failure(TIMEOUT, f"no answer within {timeout_s:g} s")
        return call(worker, samples, extras, 60.0)

    monkeypatch.setattr(WorkerProcess, "call", timed)
    monkeypatch.setattr("rlhf_rollout.rewards.function.time", SimpleNamespace(monotonic=lambda: now[0]))
    reward = write("def reward_func(queries, prompts, labels): return {'rewards': [1.0] * len(queries)}")

    async def run():
        function = FunctionReward(reward, num_workers=1, timeout_s=1.0)
        prompt = make_prompt()
        rollouts = [make_rollout(prompt, "4", index=index) for index in range(3)]
        for _ in range(2):
            assert [verdict.kind for verdict in await function.score(prompt, rollouts)] == [OK] * 3
        await function.close()

    asyncio.run(run())
    # Those that succeed alone are scored together again. A later call for three may take as long as it needs.
    assert sizes == [3, 1, 1, 1, 3, 3]


def test_files_of_the_working_folder_take_no_librarys_place(write, tmp_path, monkeypatch):
    for name in ("json", "socket", "random", "numpy"):
        write(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})", f"{name}.py")
    write("BONUS = 2.0", "neighbour.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    reward = write("""
        import random
        from neighbour import BONUS
        def reward_func(queries, prompts, labels):
            return {"rewards": [BONUS + 0 * random.random()]}
    """)
    assert score(reward, ["4"])[0].reward == 2.0
    assert not (tmp_path / "executed").exists()


def test_worker_inherits_only_the_variables_that_are_allowed(write, monkeypatch):
    monkeypatch.setenv("SOME_SECRET_TOKEN", "s")
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    reward = write("""
        import os
        def reward_func(queries, prompts, labels):
            names = ("SOME_SECRET_TOKEN", "OPENAI_API_KEY", "HF_HOME")
            raise ValueError(" ".join(os.environ.get(name, "-") for name in names))
    """)
    assert score(reward, ["4"])[0].detail == "ValueError: - - /somewhere (reward.py:5)"
    allowed = WorkerOptions(env=("OPENAI_API_KEY", "NOT_SET"))
    assert score(reward, ["4"], worker=allowed)[0].detail == "ValueError: - key /somewhere (reward.py:5)"


def test_worker_asks_this_machine_without_the_proxy_that_it_inherits(write, monkeypatch):
    monkeypatch.setenv("NO_PROXY", ".corp")
    monkeypatch.delenv("no_proxy", raising=False)
    reward = write(
        """
        import os
        def reward_func(queries, prompts, labels):
            raise ValueError(os.environ["no_proxy"])
        """
    )
    [verdict] = score(reward, ["a"])
    assert "ValueError: .corp,localhost,127.0.0.1,::1" in verdict.detail


def test_worker_inherits_proxies_and_the_hub_but_no_password_unless_named(write, monkeypatch, caplog):
    process._tell_withheld.cache_clear()
    for name in process._URLS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    monkeypatch.setenv("no_proxy", "localhost,.example")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:pass@proxy:3128")
    monkeypatch.setenv("http_proxy", "user:pass@proxy:3128")
    monkeypatch.setenv("ALL_PROXY", "http://proxy:3128/?key=pass")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("LOGNAME", "user@domain")
    reward = write("""
        import os
        def reward_func(queries, prompts, labels):
            names = ("HF_ENDPOINT", "no_proxy", "HTTPS_PROXY", "http_proxy", "ALL_PROXY", "HF_TOKEN", "LOGNAME")
            raise ValueError(" ".join(os.environ.get(name, "-") for name in names))
    """)
    hosts = "localhost,.example,127.0.0.1,::1"
    told = score(reward, ["4"])[0].detail
    assert told == f"ValueError: https://mirror.example {hosts} - - - - user@domain (reward.py:5)"
    names = "ALL_PROXY,HTTPS_PROXY,http_proxy"
    assert f"do not receive {names}, which holds a password, unless reward_env names it" in caplog.text
    assert "user:pass" not in caplog.text
    caplog.clear()
    allowed = WorkerOptions(env=("HTTPS_PROXY", "http_proxy", "ALL_PROXY"))
    assert "http://user:pass@proxy:3128 user:pass@proxy:3128 http://" in score(reward, ["4"], worker=allowed)[0].detail
    assert not caplog.text


def test_import_that_fails_names_the_option_for_environment_variables(write):
    with pytest.raises(RewardError, match=r"KeyError: 'HF_TOKEN'.*\n\nhint: .*those that ``WorkerOptions.env`` names"):
        score(write("import os\nos.environ['HF_TOKEN']\ndef reward_func(q, p, l): ..."), ["4"])


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
        function = FunctionReward(reward, num_workers=1)
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
    assert score(reward, ["4"])[0].detail == ""


def test_numbers_and_texts_that_cannot_be_used_charge_their_sample_alone(write):
    reward = write("""
        def reward_func(queries, prompts, labels):
            numbers = {"huge": 10**400, "low": -(10**400), "1e39": 1e39, "lone": 1.0}
            if queries[0].endswith("text"):
                raise ValueError("bad \\ud800 \\x1b[2J")
            return {"rewards": [numbers[query[4:]] for query in queries], "extra_logs": {"a\\ud800\\x1bb": 1}}
    """)
    verdicts = score(reward, ["huge", "low", "1e39", "lone"])
    assert [(verdict.kind, verdict.detail) for verdict in verdicts] == [
        (CRASH, "the reward is inf"),
        (CRASH, "the reward is -inf"),
        (CRASH, "the reward is 1e+39, more than float32 can hold"),
        (OK, ""),
    ]
    assert dict(verdicts[3].extra) == {"a\\ud800\\x1bb": 1.0}
    assert score(reward, ["text"])[0].detail == "ValueError: bad \\ud800 \\x1b[2J (reward.py:5)"


def test_slow_import_is_told(write, caplog, monkeypatch):
    monkeypatch.setattr("rlhf_rollout.rewards.process._NOTICE_S", 0.2)
    reward = write("import time; time.sleep(1.5)\ndef reward_func(q, p, l): return {'rewards': [1.0]}")
    assert score(reward, ["4"])[0].kind is OK
    assert f"importing {reward} takes longer than 0.2 s; the limit is 120 s" in caplog.text
