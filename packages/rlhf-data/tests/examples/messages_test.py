"""Messages in every form that rows have, and prompts that end with the beginning of an answer."""

import pytest

from rlhf_data.chat.input_template import InputTemplate
from rlhf_data.chat.messages import calls_as_text, row_messages
from rlhf_data.errors import DataError
from rlhf_data.examples.preference import PreferenceEncoder, UnpairedEncoder
from rlhf_data.examples.sft import SftEncoder
from rlhf_data.rows.row import Row
from rlhf_data.testing import BOS_ID, EOS_ID, ByteTokenizer

QUESTION = {"role": "user", "content": "2+2?"}
BEGUN = {"role": "assistant", "content": "It is "}
PROMPT = [BOS_ID, *b"user: 2+2?", EOS_ID, *b"\nassistant: "]


def row_of(**values):
    return Row(values, "x/a.jsonl", 7)


def pair_of(example):
    return example.token_ids.tolist(), example.loss_mask.tolist()


def masked(prompt, answer):
    return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)


def sft(values, tokenizer=None, **options):
    encoder = SftEncoder(
        tokenizer=tokenizer or ByteTokenizer(),
        **({"apply_chat_template": True, "input_key": "q", "output_key": "a"} | options),
    )
    return pair_of(encoder(row_of(**values)))


def text_part(text):
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "User", "content": "2+2?"}, {"role": "ASSISTANT", "content": "4"}],
        [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}],
        [{"from": "Human", "value": "2+2?"}, {"from": "assistant", "value": "4"}],
        [{"role": None, "content": None, "from": "user", "value": "2+2?"}, {"from": "gpt", "value": "4"}],
        [{"role": "user", "content": [text_part("2+"), text_part("2?")]}, {"role": "assistant", "content": "4"}],
        [{"role": "user", "content": [text_part("2+2?") | {"image_url": None}]}, {"role": "assistant", "content": "4"}],
    ],
)
def test_row_messages_of_every_form_are_roles_and_texts(messages):
    read = row_messages(row_of(q=messages), "q")
    assert [(message["role"], message["content"]) for message in read] == [("user", "2+2?"), ("assistant", "4")]
    assert "from" not in read[0]
    assert sft({"q": messages}, output_key=None) == masked(PROMPT, [*b"4", EOS_ID])


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "asistant", "content": "x"}, "message 1 of `q`: unknown role `asistant`"),
        ({"from": "robot", "value": "x"}, "message 1 of `q`: unknown role `robot`"),
        ({"from": "gpt", "value": None}, "message 1 of `q` needs a text `role` and a text `content`"),
        ({"role": "user", "content": []}, "message 1 of `q` needs a text `role` and a text `content`"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "message 1 of `q` has a part of type"),
        ({"role": "user", "content": [text_part(None)]}, "message 1 of `q` needs a text `role` and a text `content`"),
        ({"role": "user", "content": "x\ud800"}, "`q` holds half of a surrogate pair"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "\udfff", "arguments": {}}}]},
            "`q` holds half of a surrogate pair",
        ),
        ({"role": "user", "content": "x", "cost": float("nan")}, "`q` cannot be written as JSON"),
        ({"role": "user", "content": ["x"]}, "message 1 of `q` needs a text `role` and a text `content`"),
    ],
)
def test_row_messages_of_no_known_form_name_the_row_and_the_message(message, says):
    with pytest.raises(DataError) as caught:
        row_messages(row_of(q=[QUESTION, message]), "q")
    assert f"x/a.jsonl:7: {says}" in str(caught.value)


COMPLETIONS = [
    ("2+2?", [{"role": "assistant", "content": "4"}]),
    ([QUESTION], [{"from": "gpt", "value": "4"}]),
    ([QUESTION], [QUESTION, {"role": "assistant", "content": "4"}]),  # the answer repeats the prompt
    ("2+2?", [QUESTION, {"role": "assistant", "content": "4"}]),
]


@pytest.mark.parametrize(("prompt", "completion"), COMPLETIONS)
def test_completions_may_be_messages(prompt, completion):
    assert sft({"q": prompt, "a": completion}) == masked(PROMPT, [*b"4", EOS_ID])


@pytest.mark.parametrize(("prompt", "completion"), COMPLETIONS)
def test_answers_with_verdicts_and_pairs_may_be_messages(prompt, completion):
    keys = {"input_key": "q", "output_key": "a"}
    encoder = UnpairedEncoder(tokenizer=ByteTokenizer(), apply_chat_template=True, **keys)
    assert pair_of(encoder(row_of(q=prompt, a=completion, label=True))) == masked(PROMPT, [*b"4", EOS_ID])
    worse = [*completion[:-1], {"role": "assistant", "content": "5"}]
    pair = PreferenceEncoder(tokenizer=ByteTokenizer(), apply_chat_template=True, prompt_key="q")(
        row_of(q=prompt, chosen=completion, rejected=worse)
    )
    assert pair_of(pair.chosen) == masked(PROMPT, [*b"4", EOS_ID])
    assert pair_of(pair.rejected) == masked(PROMPT, [*b"5", EOS_ID])


def test_answers_that_repeat_the_prompt_behind_a_system_message_keep_it():
    system = {"role": "system", "content": "Go."}
    ids, _ = sft({"q": "2+2?", "a": [system, QUESTION, {"role": "assistant", "content": "4"}]})
    assert ids == [BOS_ID, *b"system: Go.", EOS_ID, *b"\nuser: 2+2?", EOS_ID, *b"\nassistant: 4", EOS_ID]


def test_answers_of_several_turns_do_not_repeat_the_prompt():
    """A user who says the same twice says it twice."""
    yes = {"role": "user", "content": "yes"}
    said = [{"role": "assistant", "content": "Sure?"}, yes, {"role": "assistant", "content": "ok"}]
    ids, _ = sft({"q": [yes], "a": said})
    assert bytes(ids).count(b"user: yes") == 2


def test_completions_of_messages_need_the_chat_template():
    with pytest.raises(DataError, match="`a` is a list of messages\n\nhint: messages need ``apply_chat_template``"):
        sft({"q": "2+2?", "a": [{"role": "assistant", "content": "4"}]}, apply_chat_template=False)


def test_prompt_that_ends_with_the_beginning_of_an_answer_is_continued():
    template = InputTemplate(tokenizer=ByteTokenizer(), apply_chat_template=True)
    text = template.render(row_of(q=[QUESTION, BEGUN]), "q")
    assert text == "<bos>user: 2+2?<eos>\nassistant: It is "


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ({"role": "assistant", "content": " "}, "the last message is the assistant's and empty"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            r"the last message calls tools, so no answer can follow it\n\nhint: add their results",
        ),
    ],
)
def test_prompt_that_ends_with_what_cannot_be_continued_is_refused(last, says):
    template = InputTemplate(tokenizer=ByteTokenizer(), apply_chat_template=True)
    with pytest.raises(DataError, match=f"x/a.jsonl:7: {says}"):
        template.render(row_of(q=[QUESTION, last]), "q")


def test_continuations_are_trained_after_the_prompt_of_generation():
    begun = [*PROMPT, *b"It is "]
    expected = masked(begun, [*b"4.", EOS_ID])
    assert sft({"q": [QUESTION, BEGUN], "a": "4."}) == expected
    assert sft({"q": [QUESTION, BEGUN], "a": [{"role": "assistant", "content": "4."}]}) == expected
    assert sft({"q": [QUESTION, BEGUN], "a": "4.", "finish_reason": "length"}) == masked(begun, b"4.")
    encoder = PreferenceEncoder(tokenizer=ByteTokenizer(), apply_chat_template=True, prompt_key="q")
    pair = encoder(row_of(q=[QUESTION, BEGUN], chosen="4.", rejected="5."))
    assert (pair_of(pair.chosen), pair_of(pair.rejected)) == (expected, masked(begun, [*b"5.", EOS_ID]))


def test_continuations_with_all_turns_are_refused():
    with pytest.raises(DataError, match=r"x/a\.jsonl:7: the answer continues the prompt's last message"):
        sft({"q": [QUESTION, BEGUN], "a": "4."}, multiturn=True)


def test_continuations_begin_as_in_generation_with_a_template_that_writes_no_start_token():
    """The tokenizer would add one to a text that comes without a chat template."""

    class Bare(ByteTokenizer):
        def apply_chat_template(self, conversation, **options):
            return super().apply_chat_template(conversation, **options).removeprefix("<bos>")

    assert Bare()("a")["input_ids"] == [BOS_ID, *b"a"]
    begun = [*PROMPT[1:], *b"It is "]
    assert sft({"q": [QUESTION, BEGUN], "a": "4."}, Bare()) == masked(begun, [*b"4.", EOS_ID])
    assert sft({"q": "2+2?", "a": "4."}, Bare()) == masked(PROMPT[1:], [*b"4.", EOS_ID])


@pytest.mark.parametrize("call", ["add", {"name": "add"}, {"function": "add"}, {"function": {"name": "add"}}])
def test_calls_without_arguments_stay_as_they_are(call):
    [message] = row_messages(row_of(q=[{"role": "assistant", "content": None, "tool_calls": [call]}]), "q")
    assert message == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert calls_as_text([message]) == [message]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.mark.parametrize("content", ["4.", None])
def test_tool_calls_that_would_be_lost_from_an_answer_are_refused(content):
    """Neither a continuation nor an answer that a length limit cut has an end where a template writes calls."""
    calling = [{"role": "assistant", "content": content, "tool_calls": [CALL]}]
    continued = r"^x/a\.jsonl:7: the answer continues .*, but it calls tools\n\nhint: leave that beginning out"
    with pytest.raises(DataError, match=continued):
        sft({"q": [QUESTION, BEGUN], "a": calling})
    encoder = PreferenceEncoder(tokenizer=ByteTokenizer(), apply_chat_template=True, prompt_key="q")
    for answers in ({"chosen": calling, "rejected": "5."}, {"chosen": "5.", "rejected": calling}):
        with pytest.raises(DataError, match=continued):
            encoder(row_of(q=[QUESTION, BEGUN], **answers))
    with pytest.raises(DataError, match=r"^x/a\.jsonl:7: a length limit cut the answer, .*\n\nhint: leave its calls"):
        sft({"q": "2+2?", "a": calling, "finish_reason": "length"})


class TrimmingTokenizer(ByteTokenizer):
    """A tokenizer whose template trims messages, as Llama 3's does."""

    def apply_chat_template(self, conversation, **options):
        trimmed = [message | {"content": message["content"].strip()} for message in conversation]
        return super().apply_chat_template(trimmed, **options)


def test_continuations_keep_the_white_space_that_a_template_trims():
    ids, mask = sft({"q": [QUESTION, BEGUN], "a": "4."}, TrimmingTokenizer())
    assert (ids, mask) == masked([*PROMPT, *b"It is"], [*b" 4.", EOS_ID])


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_continuations_with_a_hugging_face_tokenizer():
    """The prompt ends where the message does: no end of the answer, and no second header."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    core = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["?", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    prompt = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nIt is "
    template = InputTemplate(tokenizer=tokenizer, apply_chat_template=True)
    assert template.render(row_of(q=[QUESTION, BEGUN]), "q") == prompt
    ids, mask = sft({"q": [QUESTION, BEGUN], "a": "4."}, tokenizer)
    assert tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if not flag]) == prompt
    assert tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if flag]) == "4.<|im_end|>"


def test_row_messages_leave_out_keys_that_are_null():
    """Tables fill the keys of other rows' messages with null, and templates ask `'tool_calls' in message`."""
    nulls = {"tool_calls": None, "name": None, "from": None, "value": None}
    assert row_messages(row_of(q=[{**QUESTION, **nulls}, {**BEGUN, **nulls}]), "q") == [QUESTION, BEGUN]
    told = {"from": "human", "value": "2+2?", "role": None, "content": None, "weight": 0}
    assert row_messages(row_of(q=[told]), "q") == [{**QUESTION, "weight": 0}]
    with pytest.raises(DataError, match="needs a text `role` and a text `content`"):
        row_messages(row_of(q=[{"role": "user", "content": None, "name": None}]), "q")
