"""From the options of the commands to engines, tokenizers and rewards."""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rlhf_data.chat import Tokenizer
from rlhf_data.errors import ConfigError, unknown
from rlhf_data.pretrained import load_tokenizer, located
from rlhf_data.testing import ByteTokenizer
from rlhf_rollout.engines import ENGINE_KINDS, EngineSpec
from rlhf_rollout.protocols import RewardFunction, SamplingParams
from rlhf_rollout.rewards import LocalScorer, ModelReward, RewardSource, build_reward, parse_sources
from rlhf_rollout.rewards.sources import model_paths, parse_weights


def reward_sources(options: argparse.Namespace) -> tuple[RewardSource, ...]:
    """Return what gives rewards, as the options name it. Raises ConfigError, also for a model that is not there."""
    weights = parse_weights(options.reward_weights)
    sources = parse_sources(options.reward or "", options.reward_pretrain or "", weights)
    for path in model_paths(sources):
        located(path)
    return sources


def needed_sources(options: argparse.Namespace) -> tuple[RewardSource, ...]:
    """Return the same for a command that is nothing without one."""
    sources = reward_sources(options)
    if not sources:
        raise ConfigError("there is no reward", hint="give --reward_pretrain DIR, or --reward FILE.py")
    return sources


def reward_tokenizer(options: argparse.Namespace, sources: Sequence[RewardSource]) -> Tokenizer:
    """Return the tokenizer named, or the first reward model's; functions and servers get text, of whatever tokens."""
    models = model_paths(sources)
    if options.tokenizer is None and not models:
        return ByteTokenizer()
    return load_tokenizer(options.tokenizer or models[0])


def open_reward(
    options: argparse.Namespace, sources: Sequence[RewardSource], tokenizer: Tokenizer, stack: AsyncExitStack
) -> RewardFunction:
    """Return the reward of the sources; `stack` ends what runs behind it. Raises ConfigError for a model that cannot be
    loaded, or that reads other tokens than the tokenizer's."""
    models = []
    for path in model_paths(sources):
        scorer = _scorer(options, path, tokenizer)
        stack.callback(scorer.close)
        models.append(ModelReward([scorer], batch_size=options.reward_batch_size))
    reward = build_reward(
        sources,
        timeout_s=options.reward_timeout_s,
        num_workers=options.reward_workers,
        batch_size=options.reward_batch_size,
        models=models,
    )
    stack.push_async_callback(reward.close)
    return reward


def _scorer(options: argparse.Namespace, path: str, tokenizer: Tokenizer) -> LocalScorer:
    try:
        import torch

        from rlhf_models.loading import check_same_tokenizer
    except ImportError as error:
        raise ConfigError("reward models need rlhf-models", hint="install rlhf-rollout[models]") from error
    if isinstance(tokenizer, ByteTokenizer):
        raise ConfigError("a reward model needs the tokenizer of its tokens", hint="give --tokenizer")
    check_same_tokenizer(path, tokenizer)
    scorer = LocalScorer(
        path,
        dtype=options.reward_dtype,
        device="cuda" if torch.cuda.is_available() else "cpu",
        batch_size=options.reward_batch_size,
        normalize=options.normalize_reward,
    )
    if options.normalize_reward and not scorer.has_moments:
        say(f"--normalize_reward has no effect: no moments are stored with {path}")
    return scorer


def engine_spec(options: argparse.Namespace) -> EngineSpec:
    """Return the engine's description, checked."""
    if options.engine not in ENGINE_KINDS:
        raise ConfigError(unknown("engine", options.engine, ENGINE_KINDS))
    if not options.model and options.engine != "fake":
        raise ConfigError(f"engine {options.engine} needs --model", hint="give a model folder or hub name")
    if options.max_tokens < 1 or options.prompt_max_len < 1:
        lengths = f"--max_tokens {options.max_tokens} and --prompt_max_len {options.prompt_max_len}"
        raise ConfigError(f"{lengths}: at least 1")
    if options.engine in ("transformers", "vllm"):
        located(options.model)
    return EngineSpec(
        model=options.model or "fake",
        tokenizer=options.tokenizer,
        dtype=options.dtype,
        max_model_len=options.prompt_max_len + options.max_tokens,
        max_num_seqs=options.max_num_seqs,
        gpu_memory_utilization=options.gpu_memory_utilization,
        tensor_parallel_size=options.tensor_parallel_size,
        base_url=options.base_url,
    )


def engine_tokenizer(options: argparse.Namespace) -> Tokenizer:
    """Return the tokenizer named, or the model's."""
    name = options.tokenizer or options.model
    return ByteTokenizer() if options.engine == "fake" and name is None else load_tokenizer(name)


def sampling_params(options: argparse.Namespace, num_samples: int) -> SamplingParams:
    """Return how to sample."""
    return SamplingParams(
        num_samples=num_samples,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
    )


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write a JSONL file, whole or not at all; return the number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, count = path.with_name(path.name + ".part"), 0
    try:
        with draft.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                count += 1
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return count


def say(text: str) -> None:
    """Tell the user something beside the results."""
    print(text, file=sys.stderr)
