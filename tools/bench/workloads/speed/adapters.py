"""What LoRA adapters cost in an engine that applies several side by side, and whether each answer came through its own.

    python tools/bench/run.py adapters --model MODEL --questions gsm8k.jsonl --out adapters.json

The adapters are random, of one rank, in all linear layers. Engines without an adapter, with one, and with all of them
answer the same questions, each with `--response_tokens` tokens. The requests of a round name the adapters of its work
in turn: "base" names none, "mixed" all of them and none.

`logprob_gaps` is of the last round of "mixed": the mean distance, in nats, of an answer's log-probs from those of peft
in float32, by the adapter that the request named and by the one that peft applied. It has to be smallest where both are
one. Answers may not end early, so the engine leaves out end tokens, and peft's do, too.
"""

import asyncio
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM

from models import place
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.engines.adapter_files import LoraModule
from rlhf_rollout.engines.model_files import end_token_ids
from rlhf_rollout.engines.process import start_engine
from rlhf_rollout.protocols import Completion, RolloutEngine, SamplingParams
from runner import progress
from workloads.speed.generation import read_questions

FLAGS = {
    "model": {"type": Path, "required": True, "help": "folder of a chat model"},
    "questions": {"required": True, "help": "JSON lines with `question`"},
    "prompts": (256, "per round"),
    "prompt_tokens": (512, "at most; longer questions are left out"),
    "response_tokens": (128, "of each answer"),
    "adapters": (4, "of the last engine"),
    "rank": (16, "of each adapter"),
    "rounds": (3, "of each work; the first warms up"),
    "compared": (8, "answers of each adapter that peft computes, too"),
}
_SIZE = 0.01  # standard deviation of a random B


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the report after each engine, and once more with the gaps."""
    modules = [LoraModule(f"adapter-{number}", str(folder / f"adapter-{number}")) for number in range(options.adapters)]
    for seed, module in enumerate(modules):
        _save_adapter(options, Path(module.path), seed)
    asked = read_questions(options.questions, options.model, options.prompt_tokens)[: options.prompts]
    report: dict[str, Any] = {"prompts": len(asked), "engines": {}}
    for count in sorted({0, 1, len(modules)}):
        engine, named, answers = asyncio.run(_engine(options, modules[:count], asked))
        report["engines"][str(count)] = engine
        progress({f"{count} adapters": engine})
        yield report
    yield report | {"logprob_gaps": _gaps(options, modules, asked, named, answers)}


def _save_adapter(options: Namespace, folder: Path, seed: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    config = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear")
    adapted = peft.get_peft_model(model, config).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in adapted.named_parameters():
        if ".lora_B." in name:
            weight.normal_(std=_SIZE, generator=generator)
    adapted.save_pretrained(folder)


async def _engine(
    options: Namespace, modules: Sequence[LoraModule], asked: Sequence[np.ndarray]
) -> tuple[dict[str, Any], list[str | None], list[Completion]]:
    """Return the figures of an engine by work, and the adapters and answers of its last round."""
    spec = EngineSpec(
        model=str(options.model),
        dtype=place().dtype_name,
        max_model_len=options.prompt_tokens + options.response_tokens,
        max_num_seqs=len(asked),
        gpu_memory_utilization=0.5,
        lora_modules=tuple(modules),
    )
    names = [module.name for module in modules]
    works: dict[str, list[str | None]] = {"base": [None]}
    if names:
        works |= {"one": [names[0]], "all": [*names], "mixed": [None, *names]}
    engine = await start_engine("vllm", spec)
    found = {}
    try:
        for work, in_turn in works.items():
            named = [in_turn[index % len(in_turn)] for index in range(len(asked))]
            rounds = []
            for _ in range(options.rounds):
                seconds, answers = await _round(engine, options, asked, named)
                rounds.append(seconds)
            tokens = sum(len(answer.token_ids) for answer in answers)
            found[work] = {"tokens_per_s": tokens / statistics.median(rounds[1:] or rounds), "seconds": rounds}
    finally:
        await engine.close()
    return found, named, answers


async def _round(
    engine: RolloutEngine, options: Namespace, asked: Sequence[np.ndarray], named: Sequence[str | None]
) -> tuple[float, list[Completion]]:
    length = options.response_tokens
    calls = [
        engine.generate(ids.astype(np.int32), SamplingParams(max_tokens=length, min_tokens=length, adapter=name))
        for ids, name in zip(asked, named, strict=True)
    ]
    start = time.perf_counter()
    answers = await asyncio.gather(*calls)
    return time.perf_counter() - start, [answer for [answer] in answers]


def _gaps(
    options: Namespace,
    modules: Sequence[LoraModule],
    asked: Sequence[np.ndarray],
    named: Sequence[str | None],
    answers: Sequence[Completion],
) -> dict[str, dict[str, float]]:
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(place().device)
    model = peft.PeftModel.from_pretrained(base, modules[0].path, adapter_name=modules[0].name)
    for module in modules[1:]:
        model.load_adapter(module.path, module.name)
    model.eval()
    names = [None, *(module.name for module in modules)]
    ends = end_token_ids(options.model, options.model)
    gaps: dict[str, dict[str, float]] = {}
    for name in names:
        own = [index for index, each in enumerate(named) if each == name][: options.compared]
        gaps[name or "base"] = {
            other or "base": statistics.fmean(_gap(model, other, asked[index], answers[index], ends) for index in own)
            for other in names
        }
    return gaps


@torch.no_grad()
def _gap(
    model: peft.PeftModel, adapter: str | None, prompt: np.ndarray, answer: Completion, ends: Sequence[int]
) -> float:
    ids = torch.tensor(np.concatenate([prompt, answer.token_ids]), dtype=torch.long, device=model.device)[None]
    if adapter is None:
        with model.disable_adapter():
            logits = model(ids).logits
    else:
        model.set_adapter(adapter)
        logits = model(ids).logits
    logits[..., ends] = -torch.inf
    logprobs = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
    return float((logprobs[:, 0].cpu() - torch.tensor(answer.logprobs)).abs().mean())
