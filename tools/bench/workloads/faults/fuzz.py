"""Broken input for every parser of outside bytes: what is neither read nor refused properly.

    python tools/bench/run.py fuzz --seconds 120 --out fuzz.json

Parsers run side by side, in a process per core. `--parts 2` gives each parser two processes, which share its seconds.

An input is a defect if the parser raises anything but an error for the user (`RlhfError`), or takes over ten seconds.
"""

import asyncio
import contextlib
import copy
import hashlib
import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from rlhf_cli.main import command_line
from rlhf_data.errors import RlhfError
from rlhf_data.examples.sft import SftEncoder
from rlhf_data.options.command_line import to_toml
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict, VerdictKind
from rlhf_data.rows.row import RowErrors
from rlhf_data.rows.sources import open_sources
from rlhf_data.testing import ByteTokenizer
from rlhf_rollout.commands import serve as engine_server
from rlhf_rollout.commands.generate import take_up
from rlhf_rollout.commands.post_process import POST_PROCESSORS, training_rows
from rlhf_rollout.commands.serve_rm import create_app
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.rewards.remote import RemoteReward
from rlhf_train.engine.shards import ShardReader, Shards
from rlhf_train.run.checkpoint import Checkpoint, Checkpoints, read_checkpoint, superfluous
from runner import progress

FLAGS = {
    "seconds": (120.0, "for each parser"),
    "parts": (1, "processes for each parser"),
    "seed": (0, "of the first part; the others have the next ones"),
    "only": ("", "part of a parser's name"),
}
LIMIT_S = 10
TOKENS = [b"[", b"{", b'"', b"\\", b"\\ud800", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x00", b"\n", b"\r", b","]
TOKENS += [b"NaN", b"-Infinity", b"1e999", b"9" * 401, b"null", b"true", b"[" * 3000, b'{"a":' * 3000, b"\x1b[2J"]
VALUES: list[Any] = [None, True, -1, 0, 1e39, 1e308, 10**400, "", "\ud800", "\x00", "\x1b[2J", "x" * 70_000, [], {}]
VALUES += [[[]], {"": None}, [None] * 3, float("nan"), "ok", ["ok", "wrong"], [1, 2], {"a": [1, 2]}, {"a\n\ud800": 1}]


class HangError(Exception):
    """An input took longer than `LIMIT_S`."""


def mutate(draw: random.Random, seeds: list[bytes]) -> bytes:
    """Return a broken copy of a seed: a value of its JSON replaced, or bytes changed, or both."""
    data = draw.choice(seeds)
    if draw.random() < 0.5:
        data = b"\n".join(_with_other_value(draw, line) for line in data.split(b"\n"))
    for _ in range(draw.randrange(4)):
        start = draw.randrange(len(data) + 1)
        end = min(start + draw.choice((0, 0, 1, 2, 20)), len(data))
        other = draw.choice(seeds)
        cut = draw.randrange(len(other) + 1)
        new = draw.choice([draw.choice(TOKENS), draw.randbytes(3), b"", data[start:end] * 2, other[cut : cut + 40]])
        data = data[:start] + new + data[end:]
    return data


def _with_other_value(draw: random.Random, line: bytes) -> bytes:
    """Return a line of JSON with another value or key somewhere in it; other lines as they are."""
    try:
        root = [json.loads(line)]
    except ValueError:
        return line
    place: Any = root
    key: Any = 0
    while isinstance(place[key], dict | list) and place[key] and draw.random() < 0.8:
        place = place[key]
        key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if isinstance(place, dict) and draw.random() < 0.2:
        place[draw.choice(("", "\ud800", "rewards", "query", key + key))] = place.pop(key)
    else:
        place[key] = copy.deepcopy(draw.choice(VALUES))
    return json.dumps(root[0], ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass")


def read_rows(data: bytes, folder: Path) -> None:
    """Read a data file in one of its formats, and make an example of each row."""
    suffix = (".jsonl", ".json", ".csv", ".jsonl.gz")[len(data) % 4]
    path = folder / f"rows{suffix}"
    path.write_bytes(data)
    encoder = SftEncoder(tokenizer=ByteTokenizer())
    for row in open_sources(str(path)).read(RowErrors()):
        with contextlib.suppress(RlhfError):
            encoder(row)


def read_config(data: bytes, folder: Path) -> None:
    """Read a configuration, and what it is written as."""
    path = folder / "config.toml"
    path.write_bytes(data)
    line = command_line("ppo")
    config = line.parse(["--config", str(path)]).config
    path.write_text(to_toml(config), encoding="utf-8")
    assert line.parse(["--config", str(path)]).config == config


def read_rewards(data: bytes, folder: Path) -> None:
    """Get the answer of a reward server, and write the verdicts."""
    status = (200, 200, 200, 500)[len(data) % 4]

    async def run() -> list[Verdict]:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=data))
        reward = RemoteReward(["http://127.0.0.1:1/x"], num_retries=0, transport=transport)
        prompt = Prompt("p", [1], "p")
        spans = (Span(SpanSource.PROMPT, prompt.token_ids),)
        rollouts = [Rollout(text, "g0", spans, FinishReason.STOP, text) for text in ("a", "b")]
        try:
            return await reward.score(prompt, rollouts)
        finally:
            await reward.close()

    verdicts = asyncio.run(run())
    assert len(verdicts) == 2
    for verdict in verdicts:
        record = [verdict.reward, verdict.score, verdict.detail, dict(verdict.extra)]
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()


class Lengths:
    """The reward that the server serves."""

    async def score(self, prompt: Any, rollouts: Any) -> list[Verdict]:
        """Return lengths."""
        return [Verdict(VerdictKind.OK, float(len(rollout.text)), 0.0) for rollout in rollouts]


def serve(data: bytes, folder: Path) -> None:
    """Post a body to serve_rm, which must answer, and not with an error of its own."""
    app = create_app(Lengths(), ByteTokenizer(), contextlib.AsyncExitStack())  # type: ignore[arg-type]
    status = asyncio.run(post(app, "/get_reward", data))
    assert status in (200, 413, 422), status


def serve_engine(data: bytes, folder: Path) -> None:
    """Post a body to two calls of `serve`, which must answer, and not with an error of its own."""
    app = engine_server.create_app(FakeEngine(), {})

    async def run() -> list[int]:
        generated = await post(app, "/v1/completions", data)
        await post(app, "/engine/begin_weight_update", b'{"policy_version": 1}')
        return [generated, await post(app, "/engine/receive_weights", data + b"\n12345678")]

    for status in asyncio.run(run()):
        assert status in (200, 409, 413, 422), status


async def post(app: Any, path: str, data: bytes) -> int:
    """Return the status of an application's answer."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        return (await client.post(path, content=data)).status_code


def read_rollouts(data: bytes, folder: Path) -> None:
    """Go on with a file of rollouts, and make training data of it."""
    path = folder / "rollouts.jsonl"
    path.write_bytes(data)
    take_up(path, "d", 2)
    path.write_bytes(data)
    kind = list(POST_PROCESSORS)[1:][len(data) % (len(POST_PROCESSORS) - 1)]
    training_rows(path, kind, min_reward=None, reward_template="{input}{reward}")


def read_manifest(data: bytes, folder: Path) -> None:
    """Look for the newest checkpoint, one of whose manifests is broken, and for those that a limit removes."""
    path = folder / "step-3"
    path.mkdir(exist_ok=True)
    (path / "state.json").write_bytes(b"{}")
    (path / "manifest.json").write_bytes(data)
    checkpoints = Checkpoints(folder)
    checkpoints.newest_whole(lambda text: None)
    superfluous(checkpoints.all(), 1, 10)
    read_checkpoint(path).state()


def read_shards(data: bytes, folder: Path) -> None:
    """Read the state of the driver and the file of a rank."""
    state = Checkpoint(folder, 3, None, False, {})
    (folder / "state.json").write_bytes(data)
    with contextlib.suppress(RlhfError):
        state.state()
    path = folder / "actor-0-of-1.safetensors"
    path.write_bytes(data)
    reader = ShardReader([path])
    reader.read("weight/w", 0, 4)
    reader.whole("random/cpu")


def shards(folder: Path) -> bytes:
    """Return the file of a rank."""
    found = Shards()
    found.add("weight/w", torch.arange(4.0))
    found.add("random/cpu", torch.zeros(8, dtype=torch.uint8))
    found.numbers["num_updates"] = 7
    found.write(folder / "shards")
    return (folder / "shards").read_bytes()


def seeds() -> dict[str, tuple[Callable[[bytes, Path], None], list[bytes]]]:
    """Return each parser with inputs that it accepts."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = [{"input": "one", "output": "two"}, {"input": messages, "output": 3.5}]
    answer = {"rewards": [1, 2.5], "scores": [0, 1], "extra_logs": {"n": [1, 2]}, "verdicts": ["ok", None]}
    body = {"query": ["p a", "p b"], "prompts": ["p ", "p "], "labels": ["1", None]}
    asked = {"prompt": [1, 2], "n": 2, "max_tokens": 4, "temperature": 0.5, "seed": 3, "timeout_s": 5.0}
    head = {"policy_version": 1, "tensors": [["a", "float32", [2], 0, 8]], "checksum": None}
    record = {"run": "d", "text": "t", "input": "i", "label": "l", "finish_reason": "stop", "verdict": "ok"}
    records = [{**record, "group_id": f"g/{n // 2}", "reward": float(n), "text": f"t{n}"} for n in range(4)]
    lines = ["\n".join(map(json.dumps, values)).encode() + b"\n" for values in (rows, records)]
    table = b'input,output\n"a, b",c\nd,"e\n""f"""\n'
    toml = to_toml(command_line("ppo").parse([]).config).encode()
    half = toml[: len(toml) // 2]
    files = {"state.json": [2, hashlib.sha256(b"{}").hexdigest()]}
    manifest = {"format": 1, "step": 3, "metric": 0.5, "lowest": False, "files": files}
    with tempfile.TemporaryDirectory() as name:
        file = shards(Path(name))
    return {
        "rows (JSONL, JSON, CSV, gzip)": (read_rows, [lines[0], json.dumps(rows).encode(), table]),
        "configuration (TOML)": (read_config, [toml, half, b"[training]\nseed = 1\nactor_learning_rate = 1e-6\n"]),
        "answers of reward servers": (read_rewards, [json.dumps(answer).encode(), b'{"rewards": [0.5, -1]}']),
        "bodies of serve_rm": (serve, [json.dumps(body).encode(), b'{"query": ["a"]}']),
        "bodies of serve": (serve_engine, [json.dumps(asked).encode(), json.dumps(head).encode()]),
        "rollouts files": (read_rollouts, [lines[1]]),
        "manifests of checkpoints": (read_manifest, [json.dumps(manifest).encode()]),
        "states and files of checkpoints": (read_shards, [file, json.dumps({"step": 3, "ledger": {}}).encode()]),
    }


def fuzz(
    parse: Callable[[bytes, Path], None], inputs: list[bytes], *, seed: int, seconds: float, most: int
) -> dict[str, Any]:
    """Try mutated inputs until `seconds` have passed or `most` were tried; return the counts and the defects."""
    draw = random.Random(seed)
    found: dict[str, dict[str, str]] = {}
    counts = {"inputs": 0, "refused": 0}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _alarm():
        while time.monotonic() - started < seconds and counts["inputs"] < most:
            data = mutate(draw, inputs)
            counts["inputs"] += 1
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
            try:
                try:
                    parse(data, Path(folder))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except RlhfError:
                counts["refused"] += 1
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{type(error).__name__} in {Path(last.filename).name}:{last.name}"
                found.setdefault(where, {"error": str(error)[:200], "input": repr(data)[:400]})
    return {**counts, "seconds": time.monotonic() - started, "defects": found}


def fuzz_part(name: str, seed: int, seconds: float) -> dict[str, Any]:
    """Run `fuzz` on the parser of this name, in a process of its own."""
    parse, inputs = seeds()[name]
    return fuzz(parse, inputs, seed=seed, seconds=seconds, most=10**9)


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise HangError(f"longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run the campaign."""
    names = [name for name in seeds() if options.only in name]
    runs = {}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        seconds = options.seconds / options.parts
        waiting = {
            name: [pool.submit(fuzz_part, name, options.seed + part, seconds) for part in range(options.parts)]
            for name in names
        }
        for name, futures in waiting.items():
            parts = [future.result() for future in futures]
            sums = {key: sum(part[key] for part in parts) for key in ("inputs", "refused", "seconds")}
            defects = {where: defect for part in parts for where, defect in part["defects"].items()}
            runs[name] = {**sums, "defects": defects}
            progress({"parser": name} | runs[name])
    num_defects = sum(len(run["defects"]) for run in runs.values())
    yield {
        "inputs": sum(run["inputs"] for run in runs.values()),
        "defects": num_defects,
        "runs": runs,
        "missed": [f"{num_defects} kinds of defects"] if num_defects else [],
    }
