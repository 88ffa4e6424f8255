"""`chat`: a conversation with a model in the terminal."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_data.chat import InputTemplate, Tokenizer, encode_prompts
from rlhf_data.errors import EngineError
from rlhf_data.options import matching
from rlhf_data.records import FinishReason
from rlhf_data.rows import Row
from rlhf_rollout.commands.configs import ChatConfig
from rlhf_rollout.commands.parts import PROGRESS, EngineJob, make_engine, make_sampling, say
from rlhf_rollout.engines import build_engine
from rlhf_rollout.protocols import RolloutEngine, SamplingParams

_PIECE = 8  # tokens: few enough to read along, many enough that re-reading the prompt costs little
_CUT_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob:
    """One conversation.

    Attributes:
        engine: what answers.
        sampling: how; one response per question.
        system: the system message; None for none.
        input_template: text with one `{}` for a question, instead of the tokenizer's chat template.
        prompt_max_len: tokens that a conversation may have.
    """

    engine: EngineJob
    sampling: SamplingParams
    system: str | None
    input_template: str | None
    prompt_max_len: int


def make_job(config: ChatConfig) -> ChatJob:
    """Return the job that a configuration describes."""
    return ChatJob(
        engine=make_engine(config.model, config.engine, config.rollout, config.data.prompt_max_len),
        sampling=make_sampling(config.rollout, 1, config.rollout.seed),
        **matching(ChatJob, config.conversation, config.data),
    )


def run(job: ChatJob) -> int:
    """Talk until the input ends; return 0. Raises ConfigError for a model that cannot be used."""
    with PROGRESS.doing("loading the model"):
        tokenizer = job.engine.load_tokenizer()
        engine = build_engine(job.engine.kind, job.engine.spec)
    with_template = job.input_template is None and bool(getattr(tokenizer, "chat_template", None))
    template = InputTemplate(tokenizer=tokenizer, apply_chat_template=with_template, input_template=job.input_template)
    if not with_template:
        say("without a chat template every question stands alone")
    start: list[dict[str, Any]] = [{"role": "system", "content": job.system}] if job.system else []
    messages = [*start]
    say("/clear begins anew, /exit ends")
    # Questions are asked outside of the event loop, which would delay Ctrl-C.
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
                if len(token_ids) > job.prompt_max_len:
                    limit = f"--prompt_max_len {job.prompt_max_len}"
                    say(f"{len(token_ids)} tokens are more than {limit}: /clear begins anew")
                    continue
                answer = runner.run(_reply(engine, np.array(token_ids, np.int32), job.sampling, tokenizer))
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
    """Yield a response piece by piece, each a request that continues the last one, which any engine can do.

    `max_tokens` of `sampling` limits the whole response; each piece is drawn with the seed plus its position.
    `token_ids` [P] is the prompt. Raises EngineError when the engine returns nothing.
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
