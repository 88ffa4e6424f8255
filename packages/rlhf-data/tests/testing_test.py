"""The stand-in tokenizer behaves like the ones it stands for."""

import pytest

from rlhf_data.testing import BOS_ID, EOS_ID, ByteTokenizer


def test_byte_tokenizer_round_trip_and_special_tokens():
    tokenizer = ByteTokenizer()
    ids = tokenizer("ä<eos>x")["input_ids"]
    assert ids == [BOS_ID, 0xC3, 0xA4, EOS_ID, ord("x")]
    assert tokenizer.decode(ids) == "<bos>ä<eos>x"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "äx"
    assert tokenizer(["a", "b"], add_special_tokens=False)["input_ids"] == [[97], [98]]


def test_byte_tokenizer_chat_template_returns_a_dictionary_unless_told():
    messages = [{"role": "user", "content": "hi"}]
    options = {"tokenize": True, "add_generation_prompt": True}
    ids = ByteTokenizer().apply_chat_template(messages, **options, return_dict=False)
    assert ByteTokenizer().decode(ids) == "<bos>user: hi<eos>\nassistant: "
    assert ByteTokenizer().apply_chat_template(messages, **options) == {"input_ids": ids}
    with pytest.raises(ValueError, match="no user message"):
        ByteTokenizer().apply_chat_template([], **options)
