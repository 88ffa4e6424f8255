"""The conversation: pieces that make the response, characters that are whole, history, and what ends it."""

import asyncio
import builtins

import numpy as np
import pytest
from PIL import Image

from rlhf_data.errors import EngineError
from rlhf_data.images.reader import open_image_reader
from rlhf_data.prompts import load_prompts
from rlhf_data.rows.sources import open_sources
from rlhf_data.testing import EOS_ID, ByteTokenizer
from rlhf_rollout.commands.chat import stream
from rlhf_rollout.commands.main import main
from rlhf_rollout.engines import build_engine
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import SamplingParams
from tiny_vision import tiny_vision_model_dir

TOKENIZER = ByteTokenizer()


def going_on(text, prompts=None):
    """An engine's script that writes `text` after a prompt that ends in a colon and a space, wherever it was left."""

    def script(prompt, seed):
        start = max(index for index in range(len(prompt)) if bytes(prompt[index : index + 2]) == b": ") + 2
        if prompts is not None and start == len(prompt):
            prompts.append(TOKENIZER.decode(prompt))
        return [*text.encode()[len(prompt) - start :], EOS_ID]

    return script


def pieces(text, max_tokens=100, stop=(), **options):
    async def run():
        engine, prompt = FakeEngine(script=going_on(text), **options), np.array([*b"say: "], np.int32)
        sampling = SamplingParams(max_tokens=max_tokens, stop=stop)
        return [piece async for piece in stream(engine, prompt, sampling, TOKENIZER)]

    return asyncio.run(run())


def test_stream_gives_the_response_in_pieces():
    parts = pieces("one two three four five")
    assert "".join(parts) == "one two three four five"
    # Eight tokens a piece: 23 bytes and the stop token.
    assert [len(part) for part in parts] == [8, 8, 7]


def test_stream_ends_at_the_token_limit():
    assert "".join(pieces("one two three four five", max_tokens=11)) == "one two thr"


def test_stream_shows_no_half_of_a_character():
    # The ninth byte is the second of é's two: the first piece ends within it.
    parts = pieces("1234567é8")
    assert "".join(parts) == "1234567é8"
    assert all("\ufffd" not in part for part in parts)
    assert "".join(pieces("1234567é8", max_tokens=8)) == "1234567\ufffd"  # nothing is held back for ever


@pytest.mark.parametrize("size", range(1, 12))
def test_stream_shows_nothing_of_a_text_that_ends_it_even_over_pieces(size):
    start = "123456789ab"[:size]  # pieces have eight tokens
    assert "".join(pieces(start + "STOP more", stop=("STOP", "more"))) == start
    assert "".join(pieces(start + "STO", stop=("STOP",))) == start + "STO"


def test_stream_passes_the_engines_failure_on():
    with pytest.raises(EngineError, match="told to fail"):
        pieces("one two three", fail_after=1)


@pytest.fixture
def talk(monkeypatch, capsys):
    """Return a function that has a conversation and returns the prompts that the engine saw and what was printed."""

    def run(*lines, more=(), answer="fine, and you?"):
        prompts, typed = [], iter(lines)
        monkeypatch.setattr(builtins, "input", lambda mark: next(typed, None) or raise_end())
        monkeypatch.setattr(
            "rlhf_rollout.engines.process.build_engine",
            lambda kind, spec: FakeEngine(spec, script=going_on(answer, prompts)),
        )
        assert main(["chat", "--engine", "fake", *more]) == 0
        return prompts, capsys.readouterr()

    def raise_end():
        raise EOFError

    return run


def test_chat_keeps_the_conversation_until_it_is_cleared(talk):
    prompts, said = talk("hello", "more", "/clear", "new", "/exit", "never", more=("--system", "be kind"))
    first = "<bos>system: be kind<eos>\nuser: hello<eos>\nassistant: "
    assert prompts == [
        first,
        f"{first}fine, and you?<eos>\nuser: more<eos>\nassistant: ",
        "<bos>system: be kind<eos>\nuser: new<eos>\nassistant: ",
    ]
    assert said.out == "fine, and you?\n" * 3


def test_chat_ends_with_the_input_and_refuses_what_is_too_long(talk):
    prompts, said = talk("x" * 80, "hi", more=("--prompt_max_len", "60"))
    assert len(prompts) == 1
    assert "tokens, more than --prompt_max_len 60" in said.err
    assert said.out == "fine, and you?\n"


def test_response_does_not_steer_the_terminal_and_the_model_sees_it_as_it_is(talk):
    evil = "\x1b[2J\x1b]0;t\x07"
    prompts, said = talk("one", "\ud800", "two", answer=evil)
    assert said.out == "\\x1b[2J\\x1b]0;t\\x07\n" * 2
    assert evil in prompts[1] and len(prompts) == 2
    assert "this line is not UTF-8; type it again" in said.err


def test_chat_without_chat_template_asks_each_question_alone(talk):
    prompts, said = talk("a", "b", more=("--input_template", "Q {} A: "))
    assert prompts == ["<bos>Q a A: ", "<bos>Q b A: "]
    assert "the model sees each question alone" in said.err


def test_chat_reads_images_that_are_named_before_a_question(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tiny_vision_model_dir(tmp_path / "model", "qwen2_5_vl")
    Image.new("RGB", (32, 32), "red").save("red one.png")
    (tmp_path / "rows.jsonl").write_text('{"input": "colour?", "images": "red one.png"}')
    reader = open_image_reader(path)
    rows = open_sources(str(tmp_path / "rows.jsonl"))
    [row] = load_prompts(rows, reader.tokenizer, apply_chat_template=True, image_key="images", reader=reader)
    asked = []

    async def start(kind, spec):
        engine = build_engine(kind, spec)
        answer = engine.generate

        async def generate(token_ids, sampling, images=(), **options):
            asked.append((token_ids.tolist(), tuple(images)))
            return await answer(token_ids, sampling, images=images, **options)

        engine.generate = generate
        return engine

    lines = iter(["/image red one.png", "/image none.png", "colour?", "<image>?", "/clear", "colour?"])
    monkeypatch.setattr(builtins, "input", lambda mark: next(lines, "/exit"))
    monkeypatch.setattr("rlhf_rollout.commands.chat.start_engine", start)
    words = ["chat", "--pretrain", "model", "--engine", "transformers", "--generate_max_len", "3", "--seed", "1"]
    assert main([*words, "--read_images"]) == 0
    (first, [image]), (second, again), (third, none) = asked
    assert first == row.token_ids.tolist()
    assert Image.open(image).getpixel((0, 0)) == (255, 0, 0)
    assert second[: len(first)] == first and second.count(reader.image_id) == 16 and again == (image,)
    assert none == () and reader.image_id not in third
    assert "there is no image none.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "says"),
    [(["--engine", "fake"], "engine fake takes no images"), (["--input_template", "{}"], "needs the chat template")],
)
def test_chat_refuses_images_where_nothing_reads_them(capsys, more, says):
    assert main(["chat", "--pretrain", "model", "--read_images", *more]) == 2
    assert says in capsys.readouterr().err
