"""Tokenizers that write a space before each text, as SentencePiece does: pieces have the tokens of the whole."""

import random

import pytest

from rlhf_data.chat.conversation import encode_conversation
from rlhf_data.chat.tokens import encode_continuation, encode_prompts
from rlhf_data.examples.preference import PreferenceEncoder, ProcessEncoder, UnpairedEncoder
from rlhf_data.examples.sft import SftEncoder
from rlhf_data.rows.row import Row
from sentencepiece_testing import KINDS, TEMPLATES, make_tokenizer

TALK = [
    {"role": "user", "content": "What is 3 plus 4?"},
    {"role": "assistant", "content": "It is 7."},
    {"role": "user", "content": "And 5 plus 6?"},
    {"role": "assistant", "content": "It is\n11, é."},
]
# What is trained after each of the prompts, by template.
LEARNED = {
    "llama2": [" It is 7. </s>", " It is\n11, é. </s>"],
    "mistral": ["It is 7.</s>", "It is\n11, é.</s>"],
    "zephyr": ["It is 7.</s>", "It is\n11, é.</s>"],
}


def spelled(tokenizer, ids):
    """The text of tokens, with every space that one of them writes."""
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    raw = b"".join(bytes([int(t[3:5], 16)]) if t.startswith("<0x") else t.encode() for t in tokens)
    return raw.decode().replace("▁", " ")


def covered(text, offsets, mask):
    """The characters of the tokens in a mask, each once, however many tokens it has."""
    places = sorted({at for (start, end), flag in zip(offsets, mask, strict=True) if flag for at in range(start, end)})
    return "".join(text[at] for at in places)


@pytest.mark.parametrize("all_turns", [True, False])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_conversation_has_the_tokens_of_its_whole_rendering_and_trains_the_answers(kind, template, all_turns):
    tokenizer = make_tokenizer(kind, template)
    ids, mask = encode_conversation(Row({}, "o", 1), TALK, tokenizer, all_turns=all_turns)
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    last = len(whole["input_ids"]) - whole["input_ids"][::-1].index(tokenizer.eos_token_id)
    assert ids.tolist() == whole["input_ids"][:last]
    learned = LEARNED[template] if all_turns else LEARNED[template][-1:]
    assert covered(text, whole["offset_mapping"][:last], mask) == "".join(learned)
    prompt = tokenizer.apply_chat_template(TALK[:-1], add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("kind", KINDS)
def test_plain_prompt_and_answer_have_the_tokens_of_both_together(kind):
    tokenizer = make_tokenizer(kind)
    row = Row({"prompt": "What is 3 plus 4?", "chosen": "It is 7.", "rejected": "Yes", "label": 1}, "o", 1)
    keys = {"tokenizer": tokenizer, "input_template": "Q: {}\nA:"}
    single = {"input_key": "prompt", "output_key": "chosen", **keys}
    pair = PreferenceEncoder(prompt_key="prompt", **keys)(row)
    for made, answer in (
        (SftEncoder(**single)(row), "It is 7."),
        (UnpairedEncoder(**single)(row), "It is 7."),
        (pair.chosen, "It is 7."),
        (pair.rejected, "Yes"),
    ):
        whole = tokenizer(f"Q: What is 3 plus 4?\nA:{answer}", add_special_tokens=False)["input_ids"]
        assert made.token_ids.tolist() == [*whole, tokenizer.eos_token_id]
        asked = tokenizer("Q: What is 3 plus 4?\nA:", add_special_tokens=False)["input_ids"]
        assert made.loss_mask.tolist() == [False] * len(asked) + [True] * (len(whole) - len(asked) + 1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("first", ["▁", "A", "▁", "It", "▁is"]),
        ("always", ["▁", "A", "▁", "It", "▁is"]),
        ("prepend", ["▁", "A", "▁", "It", "▁is"]),
        ("bytes", ["A", "Ġ", "It", "Ġis"]),
    ],
)
def test_token_that_would_be_in_prompt_and_answer_is_in_neither(kind, expected):
    tokenizer = make_tokenizer(kind)
    assert tokenizer.convert_ids_to_tokens(tokenizer("A It is", add_special_tokens=False)["input_ids"])[-2] in (
        "▁It",
        "ĠIt",
    )
    asked, answer = (
        encode_prompts(["A "], tokenizer, has_special_tokens=False)[0],
        encode_continuation("It is", tokenizer, "A "),
    )
    assert tokenizer.convert_ids_to_tokens([*asked, *answer]) == expected
    row = Row({"input": "A ", "output": "It is"}, "o", 1)
    example = SftEncoder(tokenizer=tokenizer)(row)
    assert example.token_ids.tolist() == [*asked, *answer, tokenizer.eos_token_id]
    assert example.loss_mask.tolist() == [False] * len(asked) + [True] * (len(answer) + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", ["known", "unknown"])
def test_pieces_of_random_texts_spell_the_whole(kind, context):
    tokenizer = make_tokenizer(kind)
    draw = random.Random(0)
    words = ["It is", " plus", " 4?", "\n", "\n\n", " ", "  ", "7.", "[/INST]", "é", "Yes", "ки", " user", "</s>", "a"]
    num_same = 0
    for _ in range(300):
        pieces = ["".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(3)]
        text = "".join(pieces)
        ids = encode_continuation(pieces[0], tokenizer, "")
        ids += encode_continuation(pieces[1], tokenizer, pieces[0] if context == "known" else None)
        ids += encode_continuation(pieces[2], tokenizer, pieces[0] + pieces[1] if context == "known" else None)
        whole = tokenizer(text, add_special_tokens=False)["input_ids"]
        num_same += ids == whole
        if kind == "bytes":
            assert tokenizer.decode(ids) == tokenizer.decode(whole) == text
            if context == "unknown":  # tokens of bytes need no context
                assert ids == [token for part in pieces for token in tokenizer(part)["input_ids"]]
        elif context == "known" or "</s>" not in text:
            assert spelled(tokenizer, ids) == spelled(tokenizer, whole)
    assert num_same > 150


STEP = ["▁It", "▁is", "▁3"]


@pytest.mark.parametrize("kind", ["first", "prepend"])
def test_steps_have_no_space_that_their_text_has_not(kind):
    tokenizer = make_tokenizer(kind)

    def tokens(text, labels):
        row = Row({"input": text, "label": labels}, "o", 1)
        example = ProcessEncoder(tokenizer=tokenizer, placeholder="ки")(row)
        found = tokenizer.convert_ids_to_tokens(example.token_ids.tolist())
        assert [found[at] for at in example.positions] == ["▁ки"] * len(labels)
        return found

    assert tokens("It is 3 ки\nIt is 4 ки", [1, 0]) == [*STEP, "▁ки", "<0x0A>", "It", "▁is", "▁4", "▁ки"]
    # Without a space before it, the placeholder is another token in the whole, and the pieces are put together.
    assert tokens("It is 3ки\nIt is 4 ки", [1, 0]) == [*STEP, "▁ки", "<0x0A>", "It", "▁is", "▁4", "▁", "▁ки"]
