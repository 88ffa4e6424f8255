"""The command `rlhf-rollout`: rollouts for a file of prompts, with any engine, scored on request."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rlhf_data.errors import ConfigError, RlhfError, missing_file, unknown, with_hint

if TYPE_CHECKING:
    from rlhf_data.prompts import PromptSet
    from rlhf_rollout.engines import EngineSpec
    from rlhf_rollout.generator import GenerationCounts
    from rlhf_rollout.rewards import RewardSource

_NUM_SHOWN_FAILURES = 3
_PROGRESS_INTERVAL_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, 1 when some prompts failed, 2 when it cannot run."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        parser, flags = _parser()
        for argument in arguments:
            flag = argument.partition("=")[0]
            if flag.startswith("--") and flag not in flags:
                raise ConfigError(unknown("option", flag, flags))
        return _generate(parser.parse_args(arguments))
    except RlhfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(with_hint(message, f"{self.prog} --help lists the options"))


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser and the flags that there are."""
    parser = _Parser(prog="rlhf-rollout", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "generate",
        help="write one JSON line a rollout for a file of prompts",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    data = command.add_argument_group("prompts")
    data.add_argument("--prompts", required=True, metavar="FILE", help="rows: .jsonl or .json")
    data.add_argument("--input_key", default="input", help="key of the question in a row")
    data.add_argument("--label_key", help="key of the reference answer, for the reward")
    data.add_argument("--apply_chat_template", action="store_true", help="render with the tokenizer's chat template")
    data.add_argument("--input_template", metavar="TEXT", help="text with one {} for the question")
    data.add_argument("--prompt_max_len", type=int, default=1024, help="tokens; longer prompts are left out")
    data.add_argument("--max_samples", type=int, help="read only so many rows")
    sampling = command.add_argument_group("sampling")
    sampling.add_argument("--num_samples", type=int, default=1, help="rollouts a prompt")
    sampling.add_argument("--max_tokens", type=int, default=256, help="new tokens of a rollout at most")
    sampling.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    sampling.add_argument("--top_p", type=float, default=1.0, help="nucleus mass")
    sampling.add_argument("--top_k", type=int, default=-1, help="-1 for all tokens")
    sampling.add_argument("--seed", type=int, help="makes the rollouts repeatable")
    engine = command.add_argument_group("engine")
    engine.add_argument("--engine", default="vllm", help="vllm, transformers, http or fake")
    engine.add_argument("--model", metavar="DIR", help="folder or hub name; for http the server's name of it")
    engine.add_argument("--tokenizer", metavar="DIR", help="folder or hub name, when it is not the model's")
    engine.add_argument("--base_url", metavar="URL", help="the vLLM server, for http")
    engine.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    engine.add_argument("--max_num_seqs", type=int, default=64, help="rollouts decoded at once")
    engine.add_argument("--gpu_memory_utilization", type=float, default=0.9, help="share of the GPU's memory")
    engine.add_argument("--tensor_parallel_size", type=int, default=1, help="GPUs of the engine")
    reward = command.add_argument_group("reward")
    reward.add_argument(
        "--reward",
        metavar="LIST",
        help="with commas: FILE.py with reward_func, module:function, or URLs of a reward server, which take turns",
    )
    reward.add_argument(
        "--reward_weights", metavar="LIST", help="with commas: a number for each reward, all URLs being one"
    )
    reward.add_argument("--reward_timeout_s", type=float, default=30.0, help="time limit of one call")
    reward.add_argument("--reward_workers", type=int, default=2, help="calls at once, of each function")
    reward.add_argument("--reward_batch_size", type=int, default=64, help="rollouts of a server's request at most")
    output = command.add_argument_group("output")
    output.add_argument("--out", required=True, metavar="FILE.jsonl", help="where the rollouts go")
    output.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    return parser, [flag for action in command._actions for flag in action.option_strings if flag.startswith("--")]


def _generate(options: argparse.Namespace) -> int:
    import asyncio
    from pathlib import Path

    from rlhf_data.prompts import load_prompts
    from rlhf_data.sources import open_sources
    from rlhf_rollout.rewards import check_reward

    out = Path(options.out)
    if out.exists() and not options.overwrite:
        raise ConfigError(with_hint(f"{out} exists", "give another --out, or --overwrite"))
    if not Path(options.prompts).is_file():
        raise ConfigError(missing_file("--prompts file", options.prompts))
    sources = _sources(options)
    spec = _engine_spec(options)
    tokenizer = _tokenizer(options)
    prompts = load_prompts(
        open_sources(Path(options.prompts), max_samples=options.max_samples),
        tokenizer,
        input_key=options.input_key,
        label_key=options.label_key,
        apply_chat_template=options.apply_chat_template,
        input_template=options.input_template,
        prompt_max_len=options.prompt_max_len,
    )
    _say(prompts.summary)
    for source in sources:
        check = check_reward(source, prompts[:4], timeout_s=options.reward_timeout_s)
        if check.problem:
            _say(f"warning: the reward {source.kind} failed a trial call: {check.problem}")
    return asyncio.run(_write_rollouts(options, spec, sources, tokenizer, prompts))


def _sources(options: argparse.Namespace) -> "tuple[RewardSource, ...]":
    from rlhf_rollout.rewards import parse_sources

    weights = None
    if options.reward_weights is not None:
        try:
            weights = [float(weight) for weight in options.reward_weights.split(",")]
        except ValueError:
            message = f"--reward_weights {options.reward_weights}: it must be numbers with commas"
            raise ConfigError(with_hint(message, "such as 1,0.5")) from None
    return parse_sources(options.reward or "", weights=weights)


def _engine_spec(options: argparse.Namespace) -> "EngineSpec":
    from rlhf_rollout.engines import ENGINE_KINDS, EngineSpec

    if options.engine not in ENGINE_KINDS:
        raise ConfigError(unknown("engine", options.engine, ENGINE_KINDS))
    if not options.model and options.engine != "fake":
        raise ConfigError(with_hint(f"engine {options.engine} needs --model", "give a model folder or hub name"))
    if options.max_tokens < 1 or options.prompt_max_len < 1:
        raise ConfigError(
            f"--max_tokens {options.max_tokens} and --prompt_max_len {options.prompt_max_len}: at least 1"
        )
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


def _tokenizer(options: argparse.Namespace) -> Any:
    name = options.tokenizer or options.model
    if options.engine == "fake" and name is None:
        from rlhf_data.testing import ByteTokenizer

        return ByteTokenizer()
    from rlhf_data.chat import load_tokenizer

    return load_tokenizer(name)


async def _write_rollouts(
    options: argparse.Namespace,
    spec: "EngineSpec",
    sources: "Sequence[RewardSource]",
    tokenizer: Any,
    prompts: "PromptSet",
) -> int:
    import contextlib
    import time
    from pathlib import Path

    from rlhf_rollout.engines import build_engine
    from rlhf_rollout.generator import GenerationCounts, generate_groups
    from rlhf_rollout.protocols import SamplingParams
    from rlhf_rollout.records_io import RolloutWriter
    from rlhf_rollout.rewards import build_reward

    sampling = SamplingParams(
        num_samples=options.num_samples,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
    )
    counts, failures, rewards = GenerationCounts(), [], []
    started = told = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        reward = None
        if sources:
            reward = build_reward(
                sources,
                timeout_s=options.reward_timeout_s,
                num_workers=options.reward_workers,
                batch_size=options.reward_batch_size,
            )
            stack.push_async_callback(reward.close)
        engine = build_engine(options.engine, spec)
        stack.push_async_callback(engine.close)
        Path(options.out).unlink(missing_ok=True)
        writer = stack.enter_context(RolloutWriter(options.out))
        results = generate_groups(
            prompts,
            [engine],
            sampling,
            reward,
            max_in_flight=max(1, 2 * options.max_num_seqs // options.num_samples),
            group_id_prefix="generate",
            decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True),
            counts=counts,
        )
        async for result in results:
            if result.group is None:
                failures.append(f"{result.prompt.prompt_id}: {result.failure}")
            else:
                writer.write(result.group)
                rewards += [r.verdict.reward for r in result.group.rollouts if r.verdict and not r.verdict.kind.failed]
            if time.monotonic() - told > _PROGRESS_INTERVAL_S:
                told = time.monotonic()
                _say(f"{counts.num_groups + counts.num_failed_groups} of {len(prompts)} prompts")
    _say(_summary(counts, rewards, time.monotonic() - started, options.out))
    for failure in failures[:_NUM_SHOWN_FAILURES]:
        _say(f"failed: {failure}")
    return 1 if failures else 0


def _summary(counts: "GenerationCounts", rewards: Sequence[float], seconds: float, out: str) -> str:
    tokens_per_s = counts.num_response_tokens / seconds if seconds else 0.0
    lines = [f"{counts.num_generated} rollouts in {seconds:.1f} s, {tokens_per_s:.0f} tokens/s"]
    if counts.num_failed:
        lines.append(f"{counts.num_failed} rollouts failed, of {counts.num_failed_groups} prompts")
    if rewards:
        lines.append(f"mean reward {sum(rewards) / len(rewards):.4f}")
    if counts.verdicts:
        lines.append("verdicts: " + ", ".join(f"{kind} {number}" for kind, number in sorted(counts.verdicts.items())))
    return "\n".join([*lines, f"written to {out}"])


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
