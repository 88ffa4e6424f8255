"""rlhf-rollout as an inference team installs it: one wheel and what it asks for, its commands, and what names an extra.

With `pytest -s` the commands and their output are printed.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from boundaries import BOUNDARIES
from clean_installs import clean_environ, install
from rlhf_rollout.host import free_port

[ROLLOUT] = [boundary for boundary in BOUNDARIES if boundary.distribution == "rlhf-rollout"]
MATH = "rlhf_rollout.rewards.math"
TIMEOUT_S = 120

# A trainer's round on a server, without torch: weights from memory of this process, then tokens with their version.
TRAINER = """
import asyncio, json, os, sys
import numpy as np
from rlhf_rollout import EngineSpec, SamplingParams, TensorSlot, WeightBucket, build_engine

async def main():
    weights = np.arange(5000, dtype=np.float32)
    memory = os.memfd_create("weights")
    os.write(memory, weights.tobytes())
    slot = TensorSlot("w", "float32", weights.shape, 0, weights.nbytes)
    engine = build_engine("http", EngineSpec(model="fake", base_url=sys.argv[1]))
    await engine.begin_weight_update(3)
    await engine.receive_weights(WeightBucket("shared_memory", (slot,), (f"/proc/{os.getpid()}/fd/{memory}", 0)))
    await engine.finish_weight_update()
    [completion] = await engine.generate(np.array([1, 2]), SamplingParams(max_tokens=4, min_tokens=4, seed=1))
    print(json.dumps([completion.policy_version, completion.token_ids.tolist()]))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel, without an extra."""
    return install(ROLLOUT, tmp_path_factory.mktemp("alone")).parent


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of an environment with the extra `server`."""
    return install(ROLLOUT, tmp_path_factory.mktemp("server"), "server").parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"input": f"{n} + 1 =", "label": str(n + 1), "output": f"#### {n + n % 2}"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(folder: Path, programs: Path, *words: str, status: int = 0, typed: str = "") -> str:
    """Run a program of an environment in a folder; return what it printed."""
    command = [str(programs / words[0]), *words[1:]]
    options = {"cwd": folder, "env": environment(folder), "input": typed, "timeout": TIMEOUT_S}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    said = done.stdout + done.stderr
    print(f"$ {' '.join(words) if words[0] != 'python' else 'python ...'}\n{said}", end="")
    assert done.returncode == status, said
    assert "Traceback" not in said or "ModuleNotFoundError: No module named 'torch'" in said
    return said


def environment(folder: Path) -> dict[str, str]:
    return clean_environ() | {"HOME": str(folder), "TMPDIR": str(folder)}


@contextmanager
def serving(folder: Path, programs: Path, *words: str) -> Iterator[str]:
    """Run a server; yield its URL."""
    port = free_port()
    command = [programs / "rlhf-rollout", *words, "--port", str(port)]
    print(f"$ rlhf-rollout {' '.join(words)} --port {port} &")
    process = subprocess.Popen(command, cwd=folder, env=environment(folder))
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                httpx.get(f"{url}/health").raise_for_status()
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def test_one_wheel_generates_scores_measures_and_chats_without_torch(alone: Path, folder: Path) -> None:
    assert "No module named 'torch'" in run(folder, alone, "python", "-c", "import torch", status=1)
    listed = run(folder, alone, "rlhf-rollout", "--help")
    assert all(f"  {name} " in listed for name in ("generate", "score", "serve", "serve_rm", "bench", "chat"))
    command = ("rlhf-rollout", "generate", "--engine", "fake", "--prompt_data", "rows.jsonl", "--label_key", "label")
    said = run(folder, alone, *command, "--remote_rm_url", MATH, "--output_path", "out.jsonl")
    assert "4 rollouts in " in said and len((folder / "out.jsonl").read_text().splitlines()) == 4
    command = ("rlhf-rollout", "score", "--dataset", "rows.jsonl", "--label_key", "label", "--remote_rm_url", MATH)
    run(folder, alone, *command, "--output_path", "scored.jsonl")
    scored = [json.loads(line)["reward"] for line in (folder / "scored.jsonl").read_text().splitlines()]
    assert scored == [0.0, 1.0, 0.0, 1.0]
    command = ("rlhf-rollout", "bench", "--engine", "fake", "--prompt_data", "rows.jsonl", "--out", "report.json")
    assert "requests/s" in run(folder, alone, *command)
    assert "torch" not in json.loads((folder / "report.json").read_text())["machine"]["versions"]
    run(folder, alone, "rlhf-rollout", "chat", "--engine", "fake", typed="hello\n")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("serve --engine fake", "rlhf-rollout[server]"),
        (f"serve_rm --remote_rm_url {MATH}", "rlhf-rollout[server]"),
        ("generate --prompt_data rows.jsonl --output_path o --pretrain .", "rlhf-data[hf]"),
        ("serve_rm --reward_pretrain .", "rlhf-rollout[server]"),
        ("score --dataset rows.jsonl --output_path o --reward_pretrain .", "rlhf-data[hf]"),
        ("generate --prompt_data hub/name --output_path o --engine fake", "rlhf-data[datasets]"),
    ],
)
def test_extra_that_is_missing_is_named_with_the_command_that_installs_it(
    alone: Path, folder: Path, words: str, hint: str
) -> None:
    said = run(folder, alone, "rlhf-rollout", *words.split(), status=2)
    assert "error: " in said and f"hint: in a checkout, pip install './packages/{hint}'" in said


@pytest.mark.parametrize(("kind", "extra"), [("vllm", "vllm"), ("transformers", "models")])
def test_engine_whose_library_is_missing_names_its_extra(alone: Path, folder: Path, kind: str, extra: str) -> None:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096, "vocab_size": 8}))
    code = f"""
from rlhf_rollout import EngineSpec, build_engine
try:
    build_engine({kind!r}, EngineSpec(model="."))
except Exception as error:
    print(type(error).__name__, error)
"""
    said = run(folder, alone, "python", "-c", code)
    assert said.startswith(f"EngineError engine {kind} needs the module ")
    assert f"hint: in a checkout, pip install './packages/rlhf-rollout[{extra}]'" in said


def test_servers_of_the_extra_are_driven_from_the_bare_install(alone: Path, server: Path, folder: Path) -> None:
    assert "No module named 'torch'" in run(folder, server, "python", "-c", "import torch", status=1)
    with serving(folder, server, "serve", "--engine", "fake") as url:
        version, token_ids = json.loads(run(folder, alone, "python", "-c", TRAINER, url))
        assert version == 3 and len(token_ids) == 4
        assert "rlhf_rollout_weight_updates_total 1.0" in httpx.get(f"{url}/metrics").text
        assert httpx.get(f"{url}/version").json()["policy_version"] == 3
    with serving(folder, server, "serve_rm", "--remote_rm_url", MATH) as url:
        command = (
            "rlhf-rollout",
            "score",
            "--dataset",
            "rows.jsonl",
            "--label_key",
            "label",
            "--output_path",
            "s.jsonl",
        )
        run(folder, alone, *command, "--remote_rm_url", f"{url}/get_reward")
    scored = [json.loads(line)["reward"] for line in (folder / "s.jsonl").read_text().splitlines()]
    assert scored == [0.0, 1.0, 0.0, 1.0]
