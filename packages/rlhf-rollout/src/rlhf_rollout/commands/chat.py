"""`chat`: a conversation with a model in the terminal."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from rlhf_data.chat.input_template import InputTemplate
from rlhf_data.chat.template import render_prompt
from rlhf_data.chat.tokens import Tokenizer, encode_prompts
from rlhf_data.errors import DataError, EngineError
from rlhf_data.images.files import kept_image
from rlhf_data.images.reader import ImageReader, PartsTokenizer, open_image_reader
from rlhf_data.records import FinishReason
from rlhf_data.rows.row import Row
from rlhf_data.safety import visible
from rlhf_rollout.commands.configs import ChatConfig
from rlhf_rollout.commands.parts import make_engine
from rlhf_rollout.commands.terminal import TERMINAL
from rlhf_rollout.engines.process import start_engine
from rlhf_rollout.engines.stopping import before_stop
from rlhf_rollout.protocols import RolloutEngine, SamplingParams

_PIECE = 8  # tokens: few enough for a smooth display, enough that repeated prefill of the prompt costs little
_CUT_CHARACTER = "\ufffd"  # what a tokenizer decodes incomplete bytes of a character to


def run(config: ChatConfig) -> int:
    """Hold the conversation until the input ends; return 0. Raises ConfigError for a model that cannot be used."""
    data = config.data
    sampling = config.rollout.params(1, config.rollout.seed)
    job = make_engine(config.model, config.engine, data.prompt_max_len + sampling.max_tokens)
    with TERMINAL.progress.doing("loading the model"):
        tokenizer = job.load_tokenizer(data)
        reader = open_image_reader(job.spec.model) if config.conversation.read_images else None
        engine = asyncio.run(start_engine(job.kind, job.masked_spec(tokenizer, reader)))
    input_template = data.input_template
    with_template = input_template is None and bool(getattr(tokenizer, "chat_template", None))
    template = InputTemplate(tokenizer=tokenizer, apply_chat_template=with_template, input_template=input_template)
    if not with_template:
        TERMINAL.say("notice: without a chat template the model sees each question alone, without those before it")
    system = config.conversation.system
    talk = _Conversation([{"role": "system", "content": system}] if system else [], template, reader)
    TERMINAL.say("/clear starts a new conversation, /exit ends the program")
    if reader is not None:
        TERMINAL.say("/image PATH puts an image before the next question")
    # `input` runs outside of the event loop: within it Ctrl-C would take effect only after the next line.
    with asyncio.Runner() as runner:
        try:
            while (question := TERMINAL.ask("> ")) not in (None, "/exit"):
                if question == "/clear":
                    talk = _Conversation(talk.start, template, reader)
                if not question.strip() or question == "/clear":
                    continue
                try:
                    if reader is not None and question.startswith("/image "):
                        talk.shown.append(kept_image(question.removeprefix("/image ").strip(), "the conversation"))
                        continue
                    token_ids = talk.ask(question)
                except DataError as error:
                    if reader is None:
                        raise
                    TERMINAL.say(str(error))
                    if not question.startswith("/image ") and talk.shown:
                        talk.shown.clear()
                        TERMINAL.say("the images before this question are left out")
                    continue
                if len(token_ids) > data.prompt_max_len:
                    size = f"{len(token_ids)} tokens, more than --prompt_max_len {data.prompt_max_len}"
                    TERMINAL.say(f"the conversation has {size}; /clear starts a new one")
                    continue
                images = (*talk.images, *talk.shown)
                reply = _reply(engine, np.array(token_ids, np.int32), sampling, tokenizer, images)
                talk.add(question, runner.run(reply))
        finally:
            runner.run(engine.close())
    return 0


class _Conversation:
    """What was said so far.

    Attributes:
        start: the messages that it begins with.
        images: the paths of its images.
        shown: those of images that belong to the next question.
    """

    def __init__(self, start: list[dict[str, Any]], template: InputTemplate, reader: ImageReader | None) -> None:
        self.start = start
        self.images: tuple[str, ...] = ()
        self.shown: list[str] = []
        self._messages = [*start]
        self._template = template
        self._reader = reader

    def ask(self, question: str) -> list[int]:
        """Return the tokens of the conversation with a question. Raises DataError if it cannot be rendered."""
        asked = [*self._messages, self._message(question)]
        template = self._template
        if self._reader is None:
            row = Row({"input": asked if template.apply_chat_template else question}, "chat", len(asked))
            text = template.render(row, "input")
            encoded = encode_prompts([text], template.tokenizer, has_special_tokens=template.apply_chat_template)
            return encoded[0]
        text = render_prompt(asked, PartsTokenizer(template.tokenizer, self._reader, has_marks=False), origin="chat")
        [token_ids] = encode_prompts([text], template.tokenizer, has_special_tokens=True)
        images = (*self.images, *self.shown)
        return self._reader.expand_prompt(token_ids, images, "the conversation")

    def add(self, question: str, answer: str) -> None:
        """Add a question and its answer."""
        self._messages += [self._message(question), {"role": "assistant", "content": answer}]
        self.images = (*self.images, *self.shown)
        self.shown = []

    def _message(self, question: str) -> dict[str, Any]:
        text = {"type": "text", "text": question}
        content = question if self._reader is None else [*({"type": "image"} for _ in self.shown), text]
        return {"role": "user", "content": content}


async def _reply(
    engine: RolloutEngine,
    token_ids: np.ndarray,
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    images: Sequence[str],
) -> str:
    """Print the response piece by piece, and return all of it."""
    answer = ""
    # On a terminal only: the first piece takes seconds with a long conversation.
    TERMINAL.progress.show("reading the question", announce=False)
    async for text in stream(engine, token_ids, sampling, tokenizer, images):
        TERMINAL.progress.clear()
        print(visible(text), end="", flush=True, file=TERMINAL.out)
        answer += text
    print(file=TERMINAL.out)
    return answer


async def stream(
    engine: RolloutEngine,
    token_ids: np.ndarray,
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    images: Sequence[str] = (),
) -> AsyncIterator[str]:
    """Yield a response piece by piece. Each piece is a request that continues the last one, so any engine can do it.

    `token_ids` [P] is the prompt, which has `images`. `max_tokens` of `sampling` limits the whole response. The seed of
    a piece is the seed of `sampling` plus the position of its first token. Raises EngineError when the engine returns
    no tokens.
    """
    more = {"images": images} if images else {}
    written: list[int] = []
    shown = ""
    ended = False
    num_held = max(map(len, sampling.stop), default=1) - 1
    while not ended and len(written) < sampling.max_tokens:
        piece = dataclasses.replace(
            sampling,
            max_tokens=min(_PIECE, sampling.max_tokens - len(written)),
            seed=None if sampling.seed is None else sampling.seed + len(written),
        )
        context = np.concatenate([token_ids, np.array(written, np.int32)])
        [completion] = await engine.generate(context, piece, **more)
        if not len(completion.token_ids) or completion.finish_reason is FinishReason.ABORT:
            raise EngineError("the engine stopped in the middle of the response")
        written += completion.token_ids.tolist()
        ended = completion.finish_reason is FinishReason.STOP
        whole = tokenizer.decode(written, skip_special_tokens=True)
        text = before_stop(whole, sampling.stop)
        ended = ended or text != whole  # a text of `stop` may begin in one piece and end in the next
        # The bytes of one character may belong to several tokens: hold the text back until they are complete, and with
        # it what may be the beginning of a text of `stop`.
        if not ended and len(written) < sampling.max_tokens:
            text = text[: len(text) - num_held] if not text.endswith(_CUT_CHARACTER) else shown
        if len(text) > len(shown):
            yield text[len(shown) :]
            shown = text
