"""Pairs, judged answers and judged steps: values, masks, and every row that cannot be used."""

import numpy as np
import pytest

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.preference import (
    PreferenceEncoder,
    PreferenceExample,
    ProcessEncoder,
    ProcessExample,
    UnpairedEncoder,
    UnpairedExample,
)
from rlhf_data.examples.sft import SftExample
from rlhf_data.rows.row import Row
from rlhf_data.testing import BOS_ID, EOS_ID, ByteTokenizer

HUMAN = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"


def pair(values, **options):
    example = PreferenceEncoder(tokenizer=ByteTokenizer(), **options)(Row(values, "p/a.jsonl", 7))
    return example, [(part.token_ids.tolist(), part.loss_mask.tolist()) for part in (example.chosen, example.rejected)]


def masked(prompt, answer):
    return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_preference_encoder_prompt_and_answers():
    values = {"p": "q", "chosen": "yes", "rejected": "no"}
    example, (chosen, rejected) = pair(values, prompt_key="p", input_template="{}?")
    assert chosen == masked([BOS_ID, *b"q?"], [*b"yes", EOS_ID])
    assert rejected == masked([BOS_ID, *b"q?"], [*b"no", EOS_ID])
    assert (example.example_id, example.margin, example.num_tokens) == ("a.jsonl:7", None, 7 + 6)


def test_preference_encoder_dialogues_share_all_up_to_the_last_answer():
    _, (chosen, rejected) = pair({"chosen": HUMAN + " d", "rejected": HUMAN + " e f"})
    assert chosen == masked([BOS_ID, *HUMAN.encode()], [*b" d", EOS_ID])
    assert rejected == masked([BOS_ID, *HUMAN.encode()], [*b" e f", EOS_ID])


def test_preference_encoder_texts_without_a_prompt_train_all_but_the_first_token():
    _, (chosen, _) = pair({"chosen": "yes", "rejected": "no"})
    assert chosen == masked([BOS_ID], [*b"yes", EOS_ID])
    encoder = PreferenceEncoder(tokenizer=ByteTokenizer(add_bos=False))
    example = encoder(Row({"chosen": "yes", "rejected": "no"}, "a", 1))
    assert (example.chosen.token_ids.tolist(), example.chosen.loss_mask.tolist()) == masked(b"y", [*b"es", EOS_ID])


@pytest.mark.parametrize(
    "values",
    [
        {"chosen": [user("q"), assistant("yes")], "rejected": [user("q"), assistant("no")]},
        {"p": [user("q")], "chosen": [assistant("yes")], "rejected": [assistant("no")]},
        {"p": [user("q")], "chosen": "yes", "rejected": "no"},
        {"p": "q", "chosen": "yes", "rejected": "no"},
    ],
)
def test_preference_encoder_conversations_in_every_shape(values):
    options = {"prompt_key": "p"} if "p" in values else {}
    _, (chosen, rejected) = pair(values, apply_chat_template=True, **options)
    prompt = [BOS_ID, *b"user: q", EOS_ID, *b"\nassistant: "]
    assert chosen == masked(prompt, [*b"yes", EOS_ID])
    assert rejected == masked(prompt, [*b"no", EOS_ID])


@pytest.mark.parametrize("margin", [3, 3.0, "3"])
def test_preference_encoder_margin_is_a_number(margin):
    example, _ = pair({"chosen": "a", "rejected": "b", "m": margin}, margin_key="m")
    assert example.margin == 3.0


@pytest.mark.parametrize(
    ("values", "options", "says"),
    [
        ({"chosen": "a"}, {}, "unknown key `rejected`; known: chosen"),
        ({"chosen": "a", "rejected": " "}, {}, "`rejected` is empty"),
        ({"chosen": HUMAN, "rejected": HUMAN + " e"}, {}, "an answer is empty"),
        ({"chosen": "a", "rejected": None}, {}, "`rejected` must be text or a number, got null"),
        ({"chosen": "a", "rejected": "a"}, {}, "`chosen` and `rejected` are the same"),
        ({"chosen": HUMAN + " e", "rejected": "\n\nHuman: z\n\nAssistant: e"}, {}, "differ before their last answer"),
        ({"chosen": HUMAN + " e", "rejected": "e"}, {}, "differ before their last answer"),
        ({"chosen": [user("a")], "rejected": "e"}, {}, "messages need ``apply_chat_template``"),
        ({"chosen": "a", "rejected": "e"}, {"apply_chat_template": True}, "`chosen` is text, which has no messages"),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("b")]},
            {"apply_chat_template": True},
            "the two conversations differ before their last message",
        ),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), user("b")]},
            {"apply_chat_template": True},
            "message 1: `user` follows `user`",
        ),
        ({"chosen": "a", "rejected": "b", "m": "much"}, {"margin_key": "m"}, "`m` must be a number, got 'much'"),
        ({"chosen": "a", "rejected": "b", "m": "nan"}, {"margin_key": "m"}, "the margin must be finite, got nan"),
    ],
)
def test_preference_encoder_row_that_cannot_be_used_names_itself(values, options, says):
    with pytest.raises(DataError) as caught:
        pair(values, **options)
    assert "a.jsonl:7: " in str(caught.value)
    assert says in str(caught.value)


def test_preference_encoder_template_without_a_prompt_has_no_effect_and_is_refused():
    with pytest.raises(ConfigError, match="no effect without ``prompt_key``\n\nhint: give ``prompt_key``"):
        PreferenceEncoder(tokenizer=ByteTokenizer(), input_template="{}")


def judged(values, **options):
    return UnpairedEncoder(tokenizer=ByteTokenizer(), **options)(Row(values, "a.jsonl", 7))


@pytest.mark.parametrize(("label", "verdict"), [(True, True), (1, True), ("1", True), ("False", False), (0.0, False)])
def test_unpaired_encoder_reads_the_verdict(label, verdict):
    example = judged({"input": "q", "output": "a", "good": label}, label_key="good")
    assert (example.token_ids.tolist(), example.loss_mask.tolist()) == masked([BOS_ID, *b"q"], [*b"a", EOS_ID])
    assert (example.is_desirable, example.num_tokens, example.example_id) == (verdict, 4, "a.jsonl:7")


@pytest.mark.parametrize("label", [None, 2, "good", [1], 0.5])
def test_unpaired_encoder_other_verdicts_are_refused(label):
    with pytest.raises(DataError, match=r"a\.jsonl:7: `label` must be true or false, 1 or 0, got "):
        judged({"input": "q", "output": "a", "label": label})


def test_unpaired_encoder_trains_the_answer_only():
    with pytest.raises(ConfigError, match="a verdict is about one answer"):
        UnpairedEncoder(tokenizer=ByteTokenizer(), pretrain=True)


def steps(values, placeholder="#", **options):
    return ProcessEncoder(tokenizer=ByteTokenizer(), placeholder=placeholder, **options)(Row(values, "a.jsonl", 7))


def test_process_encoder_finds_the_placeholders_and_their_labels():
    example = steps({"input": "q a#b##", "label": ["+", "-", 0.25]})
    # <bos> q ' ' a # b # #: the placeholders are the tokens 4, 6 and 7.
    assert example.token_ids.tolist() == [BOS_ID, *b"q a#b##"]
    assert example.positions.tolist() == [4, 6, 7]
    assert example.labels.tolist() == [1.0, 0.0, 0.25]
    assert (example.num_tokens, example.labels.dtype, example.positions.dtype) == (8, np.float32, np.int32)
    other = steps({"input": "a#", "label": ["good"]}, reward_tokens=("good", "bad"), input_template=">{}")
    assert (other.positions.tolist(), other.labels.tolist()) == ([3], [1.0])
    assert steps({"input": "a#", "label": [False]}).labels.tolist() == [0.0]


def test_process_encoder_writes_a_placeholder_after_each_of_several_texts():
    whole, parts = steps({"input": "q a#b#", "label": [1, 0]}), steps({"input": ["q a", "b"], "label": [1, 0]})
    for name in ("token_ids", "positions", "labels"):
        assert getattr(parts, name).tolist() == getattr(whole, name).tolist()
    templated = steps({"input": ["a", "b"], "label": [1, 0]}, input_template="[{}]")
    assert templated.token_ids.tolist() == [BOS_ID, *b"[a#b#]"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"input": "a#b", "label": [1, 0]}, "1 placeholders '#' and 2 labels"),
        ({"input": "a", "label": []}, "0 placeholders '#' and 0 labels"),
        ({"input": ["a", "b#c"], "label": [1, 0]}, "3 placeholders '#' and 2 labels"),
        ({"input": ["a", {"b": 1}], "label": [1, 0]}, "`input` must be text, or a list of texts that end with a step"),
        ({"input": [], "label": []}, "`input` is empty"),
        ({"input": "a#", "label": "+"}, "`label` must be a list of labels, got text"),
        ({"input": "a#", "label": "a+"}, "hint: for rows in the form of Math-Shepherd, whose labels are text, use"),
        ({"input": "a#", "label": 1}, "`label` must be a list of labels, got a number"),
        ({"input": "a#", "label": ["?"]}, "a label must be '+' or '-', or a number, got '?'"),
        ({"input": "a#", "label": [None]}, "`label` must be a number, got None"),
        ({"input": "a#", "label": [1.5]}, "the labels of steps must be from 0 to 1, got [1.5]"),
        ({"input": "a#", "label": [float("nan")]}, "from 0 to 1"),
        ({"input": "a#"}, "unknown key `label`"),
    ],
)
def test_process_encoder_row_that_cannot_be_used_names_itself(values, says):
    with pytest.raises(DataError) as caught:
        steps(values)
    assert str(caught.value).startswith("a.jsonl:7: ")
    assert says in str(caught.value)


def test_process_encoder_placeholder_of_several_tokens_is_refused():
    with pytest.raises(ConfigError, match="the placeholder 'ки' is 4 tokens, not one\n\nhint: use a special token"):
        steps({}, placeholder="ки")


def test_records_refuse_what_does_not_fit():
    good = SftExample("e", np.array([1, 2]), np.array([False, True]))
    with pytest.raises(DataError, match="margin must be finite"):
        PreferenceExample("e", good, good, float("inf"))
    with pytest.raises(DataError, match="no token is trained"):
        UnpairedExample("e", np.array([1]), np.array([False]), True)
    for positions, labels, says in (
        ([0, 1], [1.0], "2 steps with 1 labels"),
        ([], [], "0 steps"),
        ([1, 1], [1.0, 0.0], "must ascend within 2 tokens"),
        ([-1], [1.0], "must ascend"),
        ([2], [1.0], "must ascend"),
    ):
        with pytest.raises(DataError, match=says):
            ProcessExample("e", np.array([1, 2]), np.array(positions), np.array(labels))
