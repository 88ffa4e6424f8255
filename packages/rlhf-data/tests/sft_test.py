"""Supervised examples: tokens, mask, EOS once, nothing cut."""

import pickle

import numpy as np
import pytest

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.prompts import load_prompts
from rlhf_data.sft import SftExample, load_sft_examples
from rlhf_data.testing import BOS_ID, EOS_ID, ByteTokenizer, write_jsonl


def load(path, tokenizer=None, **options):
    return load_sft_examples(path, tokenizer or ByteTokenizer(), input_key="q", output_key="a", **options)


def test_load_sft_examples_masks_the_completion_and_its_one_eos(tmp_path):
    data = load(write_jsonl(tmp_path / "a.jsonl", [{"q": "1+1", "a": 2}]), input_template="{}=")
    example = data.examples[0]
    assert example.token_ids.tolist() == [BOS_ID, *b"1+1=", ord("2"), EOS_ID]
    assert example.loss_mask.tolist() == [False] * 5 + [True] * 2
    assert (example.example_id, example.num_tokens) == ("a.jsonl:1", 7)


def test_load_sft_examples_chat_template_trains_what_it_writes_after_the_prompt(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "hi", "a": "ho"}])
    example = load(path, apply_chat_template=True).examples[0]
    prompt = load_prompts(path, ByteTokenizer(), input_key="q", apply_chat_template=True)[0]
    # The template ends the answer with "<eos>\n"; the newline after the end is not learned.
    assert example.token_ids.tolist() == [*prompt.token_ids.tolist(), *b"ho", EOS_ID]
    assert example.loss_mask.sum() == 3


def test_load_sft_examples_template_that_rewrites_the_prompt_is_refused(tmp_path):
    class Rewriting(ByteTokenizer):
        def apply_chat_template(self, conversation, **options):
            return f"{len(conversation)} messages. " + super().apply_chat_template(conversation, **options)

    with pytest.raises(DataError, match=r"a\.jsonl:1: the chat template does not write the prompt the same way"):
        load(write_jsonl(tmp_path / "a.jsonl", [{"q": "hi", "a": "ho"}]), Rewriting(), apply_chat_template=True)


def test_load_sft_examples_drops_and_counts_too_long(tmp_path):
    # Tokens: <bos> + q + a + <eos> = 4 and 6.
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "x", "a": "y"}, {"q": "xx", "a": "yy"}])
    data = load(path, max_len=5)
    assert [example.num_tokens for example in data.examples] == [4]
    assert (data.num_rows, data.num_too_long, data.longest_tokens) == (2, 1, 6)
    with pytest.raises(DataError, match=r"all 2 examples of .* are longer than max_len 3\n\nhint: the longest has 6"):
        load(path, max_len=3)
    with pytest.raises(ConfigError, match="max_len must be at least 2"):
        load(path, max_len=1)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"q": "x"}, "unknown key `a`; known: q"),
        ({"q": "x", "a": " "}, "`a` is empty"),
        ({"q": "x", "a": None}, "null"),
    ],
)
def test_load_sft_examples_broken_completion_names_file_and_line(tmp_path, row, says):
    with pytest.raises(DataError) as caught:
        load(write_jsonl(tmp_path / "a.jsonl", [{"q": "x", "a": "y"}, row]))
    assert f"{tmp_path / 'a.jsonl'}:2: " in str(caught.value)
    assert says in str(caught.value)


def test_sft_example_without_a_trained_token_is_refused():
    with pytest.raises(DataError, match="no token is trained"):
        SftExample("e", np.array([1, 2]), np.array([False, False]))
    with pytest.raises(DataError, match=r"\(2,\) tokens with a mask of \(1,\)"):
        SftExample("e", np.array([1, 2]), np.array([True]))


def test_sft_example_pickle_round_trip():
    example = SftExample("e", np.array([1, 2]), np.array([False, True]))
    again = pickle.loads(pickle.dumps(example))
    assert again.token_ids.tolist() == [1, 2]
    assert again.loss_mask.tolist() == [False, True]
