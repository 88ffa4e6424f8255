"""Tokens per second of vLLM alone, with one or several engines on one GPU.

    python tools/bench/run.py generation --engines 1 2 3 --out generation.json

Each engine is a `VllmEngine` with random weights in a process of its own. All engines start before the first
measurement and stay. For each number in `--engines`, so many of them share the prompts of a round: they begin together,
and the round ends when the last one is done. Prompts are new in each round, and prefixes of earlier rounds are dropped,
as after a weight update. Defaults are the sizes of W1 of `online.py`.

A variant is a name and settings: fields of `EngineSpec` or of vLLM's `EngineArgs`, environment variables in upper case,
`mps=true`, which lets its engines share the GPU by NVIDIA's Multi-Process Service instead of time slices, and
`idle_slots=false`, `bulk_decoding=false` and other names of `VLLM_PATCHES`, which leave out a speed-up of vLLM:

    --variant base --variant v1 VLLM_USE_V2_MODEL_RUNNER=0 --variant mps mps=true --variant blocks block_size=64

With `--model FOLDER --questions FILE.jsonl`, a published model answers the `question` of rows, by its chat template and
until it ends, so that drafts meet real text:

    --model SmolLM2 --questions gsm8k.jsonl --variant base --variant ngram speculative=ngram speculative_tokens=4

The report then has, of the first engine, the numbers of drafts, of their tokens and of the accepted ones, and how far
log-probs are from those of transformers.

More samples than an engine has slots (`max_num_seqs=256`) of mixed lengths (`--mean_response_tokens`, before they are
cut at `--response_tokens`) are what engines have in an asynchronous run: whenever a response ends, another begins.

The engines of all variants are on the GPU together, and those that do not generate wait. A variant whose engines fail
is reported with its error. The report is written after each number of engines. It has, of the first engine, the
milliseconds per step in parts of the engine core, and from one more round of a single engine the time of its GPU
kernels.

Without a GPU the times mean nothing, but the benchmark can be tried with `--shape tiny --prompts 4 --samples 2
--prompt_tokens 16 --response_tokens 8`.
"""

import contextlib
import dataclasses
import json
import math
import multiprocessing
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from models import SHAPES, place, random_model
from rlhf_data.errors import ConfigError, EngineError, RlhfError
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.mps import MpsDaemon
from rlhf_rollout.protocols import SamplingParams
from runner import UsageError, progress, read_lines
from workloads.speed.generation_engine import engine_process

FLAGS = {
    "engines": ([1, 2, 3], "numbers of engines to measure"),
    "prompts": (64, "per round"),
    "samples": (8, "per prompt"),
    "prompt_tokens": 256,
    "response_tokens": 512,
    "mean_response_tokens": (float, "of mixed lengths; default: all are full"),
    "sigma": (float, "of log-normal lengths; default: they are geometric"),
    "rounds": (3, "per number of engines"),
    "timeout_s": (300.0, "of an engine's start, and of a round"),
    "variant": {"nargs": "+", "action": "append", "metavar": ("NAME", "KEY=VALUE")},
    "model": (str, "folder of a published model; default: random weights of --shape"),
    "questions": (str, "rows of JSON with `question`; default: random tokens"),
    "shape": {"choices": SHAPES, "default": "qwen2-0.5b"},
}


def parse_variant(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return name and settings of `NAME KEY=VALUE ...`; values are JSON, or else strings.

    Raises:
        ConfigError: a word after the name has no `=`.
    """
    settings: dict[str, Any] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} of variant {words[0]} has no value", hint="write KEY=VALUE")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return words[0], settings


class Work(NamedTuple):
    """What engines generate in a round: for each of N prompts [N, P] the tokens of its responses [N, S]."""

    prompts: Sequence[np.ndarray]
    lengths: np.ndarray

    @classmethod
    def drawn(
        cls, options: Namespace, vocab_size: int, rng: np.random.Generator, questions: Sequence[np.ndarray] = ()
    ) -> "Work":
        """Return new prompts, or some of `questions`, with lengths as `options` says."""
        if questions:
            prompts = [questions[row] for row in rng.choice(len(questions), options.prompts, replace=False)]
        else:
            prompts = rng.integers(vocab_size, size=(options.prompts, options.prompt_tokens))
        lengths = np.full((options.prompts, options.samples), options.response_tokens)
        if options.mean_response_tokens:
            mean, sigma = options.mean_response_tokens, options.sigma
            if sigma is None:
                drawn = rng.geometric(1 / mean, size=lengths.shape)
            else:
                drawn = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, size=lengths.shape).round().astype(int)
            lengths = np.clip(drawn, 1, lengths)
        return cls(prompts, lengths)


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=engine_process, args=(other, *args))
        self._process.start()
        other.close()

    def send(self, task: Any) -> None:
        """Send a task, the sign to begin it, or None to end."""
        with contextlib.suppress(OSError):  # `receive` tells of a process that has ended
            self._pipe.send(task)

    def receive(self, timeout_s: float) -> Any:
        """Return its answer. Raises EngineError when it failed, ended, or took longer than `timeout_s`."""
        if not self._pipe.poll(timeout_s):
            raise EngineError(f"an engine did not answer within {timeout_s:g} s")
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            self._process.join(10)
            raise EngineError(f"an engine's process ended with code {self._process.exitcode}") from None
        if kind == "failed":
            raise EngineError(value)
        return value

    def end(self) -> None:
        """End the process."""
        self.send(None)
        self._process.join(10)
        self._process.kill()


def engine_spec(options: Namespace, model: Path) -> EngineSpec:
    """Return the settings of the engines of a model, whose KV cache holds all sequences."""
    here = place()
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * here.dtype.itemsize
    most = -(-options.prompts // min(options.engines)) * options.samples
    max_model_len = options.prompt_tokens + options.response_tokens
    return EngineSpec(
        model=str(model),
        dtype=here.dtype_name,
        max_model_len=max_model_len,
        max_num_seqs=most,
        # Engines that start at the same time cannot measure what is free; vLLM asks only that so much is.
        gpu_memory_utilization=0.02,
        kv_cache_memory_bytes=most * (max_model_len + 128) * token_bytes,
        weight_transfer="ipc" if here.device.type == "cuda" else "shared_memory",
    )


def start_engines(
    settings: Mapping[str, Any], number: int, spec: EngineSpec, sampling: SamplingParams, mps: Mapping[str, str]
) -> list[EngineProcess]:
    """Start engines with the settings of a variant; return them without waiting until they are loaded."""
    own = {field.name for field in dataclasses.fields(EngineSpec)}
    changed = {key: value for key, value in settings.items() if key in own}
    others = {key: value for key, value in settings.items() if key not in own and key != "mps"}
    if settings.get("mps"):
        others |= mps
    specs = [dataclasses.replace(spec, **{"seed": seed} | changed) for seed in range(number)]
    return [EngineProcess(each, sampling, others) for each in specs]


def run_round(
    engines: Sequence[EngineProcess], work: Work, timeout_s: float, *, profiled_steps: int = 0
) -> dict[str, Any]:
    """Let engines generate shares of the work at the same time; return seconds, tokens and the first's figures.

    If the round takes about `profiled_steps` steps, its figures have the time of kernels in the middle of them.

    Raises:
        EngineError: an engine failed or took longer than `timeout_s`.
    """
    for number, engine in enumerate(engines):
        share = {name: part[number :: len(engines)] for name, part in work._asdict().items()}
        engine.send(share | {"profiled_steps": profiled_steps})
    for engine in engines:
        engine.receive(timeout_s)
    start = time.perf_counter()
    for engine in engines:
        engine.send("begin")
    answers = [engine.receive(timeout_s) for engine in engines]
    seconds = time.perf_counter() - start
    return answers[0] | {"seconds": seconds, "tokens": sum(answer["tokens"] for answer in answers)}


def figures_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians of rounds, and the parts of a step in the last one."""
    return {
        "seconds": statistics.median(each["seconds"] for each in rounds),
        "tokens_per_second": statistics.median(each["tokens"] / each["seconds"] for each in rounds),
        "rounds": [each["seconds"] for each in rounds],
        "steps": rounds[-1]["steps"],
        "milliseconds_per_step": rounds[-1]["milliseconds_per_step"],
        "drafts": rounds[-1].get("drafts"),
    }


def read_questions(file: str, model: Path, prompt_tokens: int) -> list[np.ndarray]:
    """Return the token ids of the questions of a file that have at most `prompt_tokens`, with the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = read_lines(Path(file))
    asked = ([{"role": "user", "content": row["question"]}] for row in rows)
    options = {"add_generation_prompt": True, "tokenize": False}
    texts = [tokenizer.apply_chat_template(messages, **options) for messages in asked]
    found = [np.array(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    return [ids for ids in found if len(ids) <= prompt_tokens]


def logprob_gap(model: Path, answers: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Return the largest and the mean distance, in nats, of log-probs from those of transformers on the same weights.

    An answer has its prompt [P], its tokens [n] and their log-probs [n].
    """
    import torch
    from transformers import AutoModelForCausalLM

    here = place()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=here.dtype).to(here.device).requires_grad_(False)
    gaps = []
    for prompt, tokens, logprobs in answers:
        ids = torch.tensor(np.concatenate([prompt, tokens]), dtype=torch.long, device=here.device)[None]
        rows = reference(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        own = rows.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
        gaps.append(np.abs(own - logprobs))
    gap = np.concatenate(gaps)
    return {"largest": float(gap.max()), "mean": float(gap.mean()), "tokens": len(gap)}


def measure_variant(
    engines: Sequence[EngineProcess], draw: Callable[[], Work], options: Namespace
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield numbers of engines and their figures, after a round of all engines that warms them up.

    Raises:
        EngineError: an engine failed.
    """
    run_round(engines, draw(), options.timeout_s)
    for number in sorted(options.engines):
        sharing = engines[:number]
        figures = figures_of([run_round(sharing, draw(), options.timeout_s) for _ in range(options.rounds)])
        if number == 1 and options.questions:
            last = run_round(sharing, draw(), options.timeout_s)
            figures |= {"logprob_gap": logprob_gap(Path(options.model), last["answers"])}
        elif number == 1:
            last = run_round(sharing, draw(), options.timeout_s, profiled_steps=figures["steps"])
            figures |= {"profile": last["profile"]}
        yield number, figures


@contextlib.contextmanager
def noted(variant: dict[str, Any]) -> Iterator[None]:
    """Note the error of a variant that cannot be measured."""
    try:
        yield
    except RlhfError as error:
        variant["error"] = str(error)


def measure_variants(
    variants: Mapping[str, dict[str, Any]], spec: EngineSpec, draw: Callable[[], Work], options: Namespace
) -> Iterator[None]:
    """Start and measure the variants, put figures or errors into them, and yield after each number of engines."""
    sampling = SamplingParams(num_samples=options.samples, max_tokens=options.response_tokens)
    engines: dict[str, list[EngineProcess]] = {}
    mps: dict[str, str] = {}
    with contextlib.ExitStack() as stack:

        def start(variant: Mapping[str, Any], number: int) -> list[EngineProcess]:
            if variant["settings"].get("mps") and not mps:
                daemon = MpsDaemon()
                stack.callback(daemon.stop)
                mps.update(daemon.start())
            started = start_engines(variant["settings"], number, spec, sampling, mps)
            for engine in started:
                stack.callback(engine.end)
            return started

        with contextlib.suppress(RlhfError):  # compiles for all others
            [first] = start(next(iter(variants.values())), 1)
            first.receive(options.timeout_s)
            first.end()
        for name, variant in variants.items():
            with noted(variant):
                engines[name] = start(variant, max(options.engines))
        for name, started in engines.items():
            with noted(variants[name]):
                variants[name]["seconds_start"] = [engine.receive(options.timeout_s) for engine in started]
        for name, started in engines.items():
            variant = variants[name]
            with noted(variant):
                for number, figures in measure_variant(started, draw, options) if "error" not in variant else ():
                    variant.setdefault("engines", {})[str(number)] = figures
                    progress({"variant": name, "engines": number} | figures)
                    yield


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measure all variants."""
    if not 1 <= min(options.engines) <= max(options.engines) <= options.prompts:
        raise UsageError("--engines must lie between 1 and the number of --prompts")
    if options.questions and not options.model:
        raise UsageError("--questions needs --model, whose tokenizer reads them")
    settings = dict(parse_variant(words) for words in options.variant or [["base"]])
    model = Path(options.model or random_model(options.shape, folder / "model"))
    questions = read_questions(options.questions, model, options.prompt_tokens) if options.questions else ()
    vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    spec = engine_spec(options, model)
    rng = np.random.default_rng(0)
    variants: dict[str, dict[str, Any]] = {name: {"settings": own} for name, own in settings.items()}
    report = {
        "max_num_seqs": spec.max_num_seqs,
        "kv_cache_memory_bytes": spec.kv_cache_memory_bytes,
        "variants": variants,
    }
    for _ in measure_variants(variants, spec, lambda: Work.drawn(options, vocab_size, rng, questions), options):
        yield report
    missed = [f"{name}: {variant['error']}" for name, variant in variants.items() if "error" in variant]
    yield report | {"missed": missed}
