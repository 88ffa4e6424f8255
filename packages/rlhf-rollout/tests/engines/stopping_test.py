"""Texts that end a completion, against a search of the whole text after every token."""

import random

import numpy as np
import pytest

from rlhf_data.errors import ConfigError
from rlhf_data.testing import ByteTokenizer
from rlhf_rollout.engines.stopping import StopWatch, answer_decoder, before_stop, decoder
from rlhf_rollout.protocols import SamplingParams


def watched(token_ids, decode, **sampling):
    """The number of tokens up to the one that completes a text; None if none does."""
    watch = StopWatch(SamplingParams(**sampling), decode)
    return next((number for number, token in enumerate(token_ids, 1) if watch.completes(token)), None)


def searched(text, stop, min_tokens):
    """The same for one token per byte: the number of bytes up to the first end of a text after `min_tokens`."""
    ends = [
        len(text[: start + len(one)].encode())
        for one in stop
        for start in range(len(text))
        if text.startswith(one, start)
    ]
    return min((end for end in ends if end > min_tokens), default=None)


def test_the_token_that_completes_a_text_is_found_among_characters_of_several_tokens():
    rng = random.Random(7)
    found = 0
    for _ in range(500):
        text = "".join(rng.choices("ab\u00e9\u20ac\U0001f600", k=rng.randrange(1, 20)))
        stop = tuple("".join(rng.choices("ab\u00e9\u20ac", k=rng.randrange(1, 4))) for _ in range(rng.randrange(1, 4)))
        min_tokens = rng.choice([0, 0, 3, 6])
        expected = searched(text, stop, min_tokens)
        found += expected is not None
        tokens = list(text.encode())
        assert watched(tokens, decoder(None), stop=stop, min_tokens=min_tokens) == expected, (text, stop, min_tokens)
    assert 100 < found < 450


def test_a_text_may_begin_in_tokens_that_were_there_before():
    tokens = list(b"abEN")
    sampling = SamplingParams(stop=("END",), min_tokens=2)
    assert [StopWatch(sampling, decoder(None), tokens).completes(byte) for byte in b"Dx"] == [False, False]
    watch = StopWatch(SamplingParams(stop=("END",)), decoder(None), tokens)
    assert [watch.completes(byte) for byte in b"D"] == [True]


def test_bytes_that_are_no_character_do_not_hide_a_text():
    tokens = [0xE2] * 9 + list(b"END") + [65]
    assert watched(tokens, decoder(None), stop=("END",)) == 12
    assert watched([0xE2] * 9, decoder(None), stop=("\ufffd",)) == 4
    rng = random.Random(3)
    for _ in range(500):
        tokens = [*rng.choices(range(128, 256), k=rng.randrange(9)), *"\u0244\U0001f600".encode()]
        assert watched(tokens, decoder(None), stop=("\u0244\U0001f600",)) == len(tokens), tokens


def test_a_text_may_span_words_whose_spaces_depend_on_what_is_before_them():
    from tokenizers import Tokenizer, decoders, models

    words = ["<unk>", "\u2581the", "\u2581end", "ing", "</s>"]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    plain.decoder = decoders.Metaspace()
    plain.add_special_tokens(["</s>"])

    def decode(ids):
        return plain.decode(ids, skip_special_tokens=False)

    assert watched([1, 1, 2, 3], decode, stop=("the end",)) == 3
    assert watched([1, 1, 2, 3], decode, stop=("ending",)) == 4
    assert watched([1, 4, 2], decode, stop=("</s>",)) == 2
    assert watched([2, 3], decode, stop=("the",)) is None


def test_the_text_of_an_answer_ends_before_the_first_text():
    assert before_stop("one\nQuestion: two\nQuestion:", ("Question:", "two")) == "one\n"
    assert before_stop("one", ("two",)) == "one"


def test_special_tokens_count_by_their_text(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1, "</s>": 2}, "<unk>"))
    core.add_special_tokens(["</s>"])
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(tmp_path)
    assert decoder(tmp_path)([0, 2]).endswith("</s>")
    tokens = ByteTokenizer().encode("ab<bos>cd", add_special_tokens=False)
    assert watched(tokens, decoder(None), stop=("<bos>",)) == 3


@pytest.mark.parametrize(("own", "cleans", "text"), [(False, False, "a ."), (False, True, "a."), (True, False, "own")])
def test_answers_are_decoded_as_their_tokenizer_does(own, cleans, text):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    class Own(PreTrainedTokenizerFast):
        def _decode(self, token_ids, **options):
            return "own"

    core = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1, "</s>": 2, ".": 3}, "<unk>"))
    core.add_special_tokens(["</s>"])
    kind = Own if own else PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=cleans)
    assert answer_decoder(tokenizer)(np.array([0, 3, 2], np.int32)) == text


@pytest.mark.parametrize("stop", ["END", ("END", ""), (3,)])
def test_stop_must_be_texts(stop):
    with pytest.raises(ConfigError, match="stop must be a list of texts that are not empty"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"min_p": -0.1}, "``min_p`` is -0.1; it must be at least 0 and at most 1"),
        ({"min_p": 1.1}, "``min_p`` is 1.1; it must be at least 0 and at most 1"),
        ({"repetition_penalty": 0}, "``repetition_penalty`` is 0; it must be above 0"),
    ],
)
def test_bounds_of_filters(options, says):
    with pytest.raises(ConfigError, match=says):
        SamplingParams(**options)
