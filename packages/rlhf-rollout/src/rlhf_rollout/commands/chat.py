"""A conversation with a model in the terminal."""

import argparse
import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from rlhf_data.chat import InputTemplate, Tokenizer, encode_prompts
from rlhf_data.errors import EngineError
from rlhf_data.records import FinishReason
from rlhf_data.rows import Row
from rlhf_rollout.commands.from_options import engine_spec, engine_tokenizer, sampling_params, say
from rlhf_rollout.engines import build_engine
from rlhf_rollout.protocols import RolloutEngine, SamplingParams

_PIECE = 8  # tokens: soon enough to read along, and prompts are read anew not too often
_CUT_CHARACTER = "\ufffd"


def chat(options: argparse.Namespace) -> int:
    """Run `rlhf-rollout chat` until the end of the input."""
    spec, tokenizer = engine_spec(options), engine_tokenizer(options)
    with_template = options.input_template is None and bool(getattr(tokenizer, "chat_template", None))
    template = InputTemplate(
        tokenizer=tokenizer, apply_chat_template=with_template, input_template=options.input_template
    )
    sampling = sampling_params(options, 1)
    if not with_template:
        say("without a chat template every question stands alone")
    start: list[dict[str, Any]] = [{"role": "system", "content": options.system}] if options.system else []
    messages = [*start]
    engine = build_engine(options.engine, spec)
    say("/clear begins anew, /exit ends")
    # Questions are asked outside of the event loop, which would hold Ctrl-C back.
    with asyncio.Runner() as runner:
        try:
            while (question := _ask()) not in (None, "/exit"):
                if question == "/clear":
                    messages = [*start]
                if not question.strip() or question == "/clear":
                    continue
                asked = [*messages, {"role": "user", "content": question}]
                row = Row({"input": asked if with_template else question}, "chat", len(asked))
                prompt = template.render(row, "input")
                [token_ids] = encode_prompts([prompt], tokenizer, has_special_tokens=with_template)
                if len(token_ids) > options.prompt_max_len:
                    limit = f"--prompt_max_len {options.prompt_max_len}"
                    say(f"{len(token_ids)} tokens are more than {limit}: /clear begins anew")
                    continue
                answer = runner.run(_reply(engine, np.array(token_ids, np.int32), sampling, tokenizer))
                messages = [*asked, {"role": "assistant", "content": answer}]
        finally:
            runner.run(engine.close())
    return 0


def _ask() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None


async def _reply(engine: RolloutEngine, token_ids: np.ndarray, sampling: SamplingParams, tokenizer: Tokenizer) -> str:
    """Print the response as it comes, and return it."""
    answer = ""
    async for text in stream(engine, token_ids, sampling, tokenizer):
        print(text, end="", flush=True)
        answer += text
    print()
    return answer


async def stream(
    engine: RolloutEngine, token_ids: np.ndarray, sampling: SamplingParams, tokenizer: Tokenizer
) -> AsyncIterator[str]:
    """Yield a response piece by piece, each a request that goes on from the last: any engine can do that.

    The `max_tokens` of `sampling` are of the whole response, its seed is of every piece with the piece's place added.
    `token_ids` [P] are the prompt. Raises EngineError when the engine gave nothing.
    """
    written: list[int] = []
    shown = ""
    ended = False
    while not ended and len(written) < sampling.max_tokens:
        piece = dataclasses.replace(
            sampling,
            max_tokens=min(_PIECE, sampling.max_tokens - len(written)),
            seed=None if sampling.seed is None else sampling.seed + len(written),
        )
        context = np.concatenate([token_ids, np.array(written, np.int32)])
        [completion] = await engine.generate(context, piece)
        if not len(completion.token_ids) or completion.finish_reason is FinishReason.ABORT:
            raise EngineError("the engine gave up the response")
        written += completion.token_ids.tolist()
        ended = completion.finish_reason is FinishReason.STOP
        text = tokenizer.decode(written, skip_special_tokens=True)
        # The bytes of a character may be spread over tokens.
        if ended or len(written) == sampling.max_tokens or not text.endswith(_CUT_CHARACTER):
            yield text[len(shown) :]
            shown = text
