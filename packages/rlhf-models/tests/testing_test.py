import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_data.errors import ConfigError
from rlhf_models.testing import tiny_model_dir, tiny_tokenizer

TEXTS = ["Hello 12+3= 15", "two\nlines,  two spaces", "<|im_start|>user\nan <|im_end|>", "caf\u00e9 \u4e16\u754c"]


def test_tiny_model_dir_loads_in_plain_transformers(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(model_dir)) == 512
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert model.num_parameters() < 200_000
    assert model.config.tie_word_embeddings


def test_tiny_model_dir_seed_decides_the_weights(tmp_path):
    first, same, other = (
        AutoModelForCausalLM.from_pretrained(tiny_model_dir(tmp_path / str(i), seed=seed)).model.norm.weight.sum()
        + AutoModelForCausalLM.from_pretrained(tmp_path / str(i)).model.embed_tokens.weight.sum()
        for i, seed in enumerate((0, 0, 1))
    )
    assert first == same != other


def test_tiny_model_dir_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    tiny_model_dir(tmp_path)
    assert torch.rand(1) == expected


def test_tiny_model_dir_overrides_reach_the_config(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(tmp_path, vocab_size=5000, tied=False, hidden_size=32, num_attention_heads=1)
    )
    assert model.lm_head.weight.shape == (5000, 32)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


@pytest.mark.parametrize("text", TEXTS)
def test_tiny_tokenizer_saved_and_loaded_encodes_as_before(model_dir, text):
    loaded = AutoTokenizer.from_pretrained(model_dir)
    assert loaded.encode(text) == tiny_tokenizer().encode(text)
    assert loaded.decode(loaded.encode(text)) == text


def test_tiny_tokenizer_chat_template_opens_the_answer(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_tiny_model_dir_unknown_architecture_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean `llama`"):
        tiny_model_dir(tmp_path, architecture="lama")


def test_tiny_model_dir_vocabulary_below_the_bytes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 259"):
        tiny_model_dir(tmp_path, vocab_size=258)
