"""What the process of a user's code sees of this one, and where its output goes."""

import asyncio
import subprocess
import sys

from record_testing import make_prompt, make_rollout
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.function import FunctionReward
from rlhf_rollout.rewards.sources import CallOptions
from rlhf_rollout.workers import guarded
from rlhf_rollout.workers.guarded import DEFAULT_WORKER, WorkerOptions


def score(reward, worker=DEFAULT_WORKER, **options):
    """Score one response in a reward of its own; return the verdict."""

    async def run():
        function = FunctionReward(reward, CallOptions(worker=worker), **options)
        try:
            prompt = make_prompt("2+2=", "4")
            return (await function.score(prompt, [make_rollout(prompt, "4")]))[0]
        finally:
            await function.close()

    return asyncio.run(run())


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
    assert score(reward).reward == 2.0
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
    assert score(reward).detail == "ValueError: - - /somewhere (reward.py:5)"
    allowed = WorkerOptions(env=("OPENAI_API_KEY", "NOT_SET"))
    assert score(reward, worker=allowed).detail == "ValueError: - key /somewhere (reward.py:5)"


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
    verdict = score(reward)
    assert "ValueError: .corp,localhost,127.0.0.1,::1" in verdict.detail


def test_worker_inherits_proxies_and_the_hub_but_no_password_unless_named(write, monkeypatch, caplog):
    guarded._tell_withheld.cache_clear()
    for name in guarded._URLS:
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
    told = score(reward).detail
    assert told == f"ValueError: https://mirror.example {hosts} - - - - user@domain (reward.py:5)"
    names = "ALL_PROXY,HTTPS_PROXY,http_proxy"
    assert f"do not receive {names}, which holds a password, unless reward_env names it" in caplog.text
    assert "user:pass" not in caplog.text
    caplog.clear()
    allowed = WorkerOptions(env=("HTTPS_PROXY", "http_proxy", "ALL_PROXY"))
    assert "http://user:pass@proxy:3128 user:pass@proxy:3128 http://" in score(reward, worker=allowed).detail
    assert not caplog.text


def test_what_code_prints_goes_to_the_log(write, tmp_path):
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
    assert score(reward, log_path=log).kind is VerdictKind.OK
    text = log.read_text()
    assert all(part in text for part in ("importing", "Query sample: 2+2=4", "raw", "to stderr", "from a child"))


PRINTS = """
    import os
    def reward_func(queries, prompts, labels):
        os.write(1, "\\x1b[31mbe\\tgin\\x7f\\x9b2J caf\\xe9 \\u202eit\\n".encode())
        for _ in range(440):
            print("x" * 10**5)
        return {"rewards": [1.0] * len(queries)}
"""


def test_output_of_a_function_is_cut_in_the_log(write, tmp_path):
    log = tmp_path / "reward.log"
    assert score(write(PRINTS), log_path=log).kind is VerdictKind.OK  # it prints 44 MB
    text = log.read_text()
    assert "gin" in text
    assert text.endswith("x\n[further output is left out]\n")
    assert 10 * 2**20 <= len(text) < 10 * 2**20 + 100


def test_output_of_a_function_cannot_flood_or_steer_the_terminal(write):
    reward = write(PRINTS)
    program = f"""
import sys
sys.path[:] = {sys.path!r}
from record_testing import make_prompt
from rlhf_rollout.rewards.function import check_reward_function
assert check_reward_function({reward!r}, [make_prompt()]) is None
"""
    text = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True).stderr
    assert text.startswith("[31mbe\tgin2J caf\xe9 it\n")  # without the characters that steer a terminal
    assert 2**14 <= len(text) < 2**14 + 100
