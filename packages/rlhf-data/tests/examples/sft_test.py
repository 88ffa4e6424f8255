"""Supervised examples: tokens, mask, EOS once, nothing cut."""

import pickle

import numpy as np
import pytest

from record_testing import write_jsonl
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.load import load_examples
from rlhf_data.examples.sft import SftEncoder, SftExample, completed
from rlhf_data.prompts import load_prompts
from rlhf_data.rows.row import Row
from rlhf_data.rows.sources import open_sources
from rlhf_data.testing import BOS_ID, EOS_ID, ByteTokenizer


def load(path, tokenizer=None, max_len=2048, **options):
    encoder = SftEncoder(tokenizer=tokenizer or ByteTokenizer(), **({"input_key": "q", "output_key": "a"} | options))
    return load_examples(open_sources(path), encoder, max_len=max_len)


def one(tmp_path, row, tokenizer=None, **options):
    example = load(write_jsonl(tmp_path / "a.jsonl", [row]), tokenizer, **options).examples[0]
    return example.token_ids.tolist(), example.loss_mask.tolist()


def test_sft_encoder_masks_the_completion_and_its_one_eos(tmp_path):
    data = load(write_jsonl(tmp_path / "a.jsonl", [{"q": "1+1", "a": 2}]), input_template="{}=")
    example = data.examples[0]
    assert example.token_ids.tolist() == [BOS_ID, *b"1+1=", ord("2"), EOS_ID]
    assert example.loss_mask.tolist() == [False] * 5 + [True] * 2
    assert (example.example_id, example.num_tokens) == ("a.jsonl:1", 7)


def test_sft_encoder_chat_template_trains_what_it_writes_after_the_prompt(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "hi", "a": "ho"}])
    example = load(path, apply_chat_template=True).examples[0]
    prompt = load_prompts(open_sources(path), ByteTokenizer(), input_key="q", apply_chat_template=True)[0]
    # The template ends the answer with "<eos>\n"; the newline after the end is not learned.
    assert example.token_ids.tolist() == [*prompt.token_ids.tolist(), *b"ho", EOS_ID]
    assert example.loss_mask.sum() == 3


CONVERSATION = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]
# <bos>user: a<eos>\nassistant: | b<eos> | \nuser: c<eos>\nassistant: | d<eos>
TURNS = [
    [BOS_ID, *b"user: a", EOS_ID, *b"\nassistant: "],
    [*b"b", EOS_ID],
    [*b"\nuser: c", EOS_ID, *b"\nassistant: "],
    [*b"d", EOS_ID],
]


@pytest.mark.parametrize(("multiturn", "trained"), [(False, [0, 0, 0, 1]), (True, [0, 1, 0, 1])])
def test_sft_encoder_conversation_trains_the_last_answer_or_all(tmp_path, multiturn, trained):
    for row, key in (({"q": CONVERSATION}, None), ({"q": CONVERSATION[:-1], "a": "d"}, "a")):
        ids, mask = one(tmp_path, row, output_key=key, apply_chat_template=True, multiturn=multiturn)
        assert ids == [token for turn in TURNS for token in turn]
        assert mask == [bool(flag) for flag, turn in zip(trained, TURNS, strict=True) for _ in turn]


@pytest.mark.parametrize("add_bos", [True, False])
def test_answer_to_an_empty_prompt_trains_all_but_the_first_token(add_bos):
    ids, mask = completed(Row({}, "x", 1), "", "ab", ByteTokenizer(add_bos=add_bos))
    assert ids.tolist() == [BOS_ID] * add_bos + [*b"ab", EOS_ID]
    assert mask.tolist() == [False] + [True] * (len(ids) - 1)


def test_sft_encoder_pretrain_trains_all_but_the_first_token(tmp_path):
    ids, mask = one(tmp_path, {"q": "ab"}, output_key=None, pretrain=True)
    assert (ids, mask) == ([BOS_ID, *b"ab", EOS_ID], [False, True, True, True])
    ids, mask = one(tmp_path, {"q": "a<eos>", "a": "b"}, pretrain=True)
    assert (ids, mask) == ([BOS_ID, *b"a", EOS_ID, *b"b", EOS_ID], [False] + [True] * 4)
    assert one(tmp_path, {"q": "a<eos>"}, output_key=None, pretrain=True)[0] == [BOS_ID, *b"a", EOS_ID]


def test_sft_encoder_truncated_answer_gets_no_eos(tmp_path):
    cut = {"q": "x", "a": "y", "finish_reason": "length"}
    assert one(tmp_path, cut) == ([BOS_ID, *b"xy"], [False, False, True])
    ids, mask = one(tmp_path, cut, apply_chat_template=True)
    assert ids == [BOS_ID, *b"user: x", EOS_ID, *b"\nassistant: y"]
    assert sum(mask) == 1 and mask[-1]
    assert one(tmp_path, cut, output_key=None, pretrain=True)[0] == [BOS_ID, *b"x"]
    assert one(tmp_path, cut | {"finish_reason": "stop"})[0][-1] == EOS_ID


def test_sft_encoder_drops_and_counts_too_long(tmp_path):
    # Tokens: <bos> + q + a + <eos> = 4 and 6.
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "x", "a": "y"}, {"q": "xx", "a": "yy"}])
    data = load(path, max_len=5)
    assert [example.num_tokens for example in data.examples] == [4]
    assert (data.counts.num_rows, data.counts.num_too_long, data.counts.longest_tokens) == (2, 1, 6)
    with pytest.raises(
        DataError, match=r"all 2 examples of .* are longer than ``max_len=3``\n\nhint: the longest has 6"
    ):
        load(path, max_len=3)
    with pytest.raises(ConfigError, match="max_len must be at least 2"):
        load(path, max_len=1)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"q": "x"}, "unknown key `a`; known: q"),
        ({"q": "x", "a": " "}, "`a` is empty"),
        ({"q": "x", "a": None}, "null"),
        ({"q": "", "a": "x"}, "`q` is empty"),
        ({"q": [{"role": "user", "content": "x"}], "a": "y"}, "messages need ``apply_chat_template``"),
    ],
)
def test_sft_encoder_broken_row_names_file_and_line(tmp_path, row, says):
    with pytest.raises(DataError) as caught:
        load(write_jsonl(tmp_path / "a.jsonl", [{"q": "x", "a": "y"}, row]))
    assert f"{tmp_path / 'a.jsonl'}:2: " in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        ("user assistant user", "the last message must be the assistant's, it is of role `user`"),
        ("assistant", "message 0: `assistant` follows `nothing`"),
        ("system assistant", "message 1: `assistant` follows `system`"),
        ("user assistant assistant", "message 2: `assistant` follows `assistant`"),
        ("user user assistant", "message 1: `user` follows `user`"),
        ("user system assistant", "message 1: a message of role `system` must come first, it follows `user`"),
        ("user asistant", "message 1 of `q`: unknown role `asistant`"),
    ],
)
def test_sft_encoder_role_order_names_file_line_and_message(tmp_path, roles, says):
    messages = [{"role": role, "content": "x"} for role in roles.split()]
    with pytest.raises(DataError) as caught:
        one(tmp_path, {"q": messages}, output_key=None, apply_chat_template=True)
    assert f"a.jsonl:1: {says}" in str(caught.value)


def test_sft_encoder_empty_turn_is_refused(tmp_path):
    messages = [*CONVERSATION[:1], {"role": "assistant", "content": " "}, *CONVERSATION[2:]]
    with pytest.raises(DataError, match="message 1: the assistant's answer is empty"):
        one(tmp_path, {"q": messages}, output_key=None, apply_chat_template=True)


def test_sft_encoder_options_that_do_not_fit_are_refused():
    for options in ({"multiturn": True}, {"multiturn": True, "pretrain": True, "apply_chat_template": True}):
        with pytest.raises(ConfigError, match="``multiturn`` trains every answer"):
            SftEncoder(tokenizer=ByteTokenizer(), **options)
    with pytest.raises(ConfigError, match="without ``output_key``"):
        SftEncoder(tokenizer=ByteTokenizer(), output_key=None)


def test_sft_example_without_a_trained_token_is_refused():
    with pytest.raises(DataError, match="no token is trained"):
        SftExample("e", np.array([1, 2]), np.array([False, False]))
    with pytest.raises(DataError, match=r"\(2,\) tokens with a mask of \(1,\)"):
        SftExample("e", np.array([1, 2]), np.array([True]))


def test_sft_example_has_a_mask_of_its_own_that_nobody_can_change():
    given = np.array([0, 1])
    example = SftExample("e", np.array([1, 2]), given)
    assert example.loss_mask.dtype == bool
    with pytest.raises(ValueError, match="read-only"):
        example.loss_mask[0] = True
    given[0] = 1
    assert example.loss_mask.tolist() == [False, True]


def test_sft_example_pickle_round_trip():
    example = SftExample("e", np.array([1, 2]), np.array([False, True]))
    again = pickle.loads(pickle.dumps(example))
    assert again.token_ids.tolist() == [1, 2]
    assert again.loss_mask.tolist() == [False, True]
