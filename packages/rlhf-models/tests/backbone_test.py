import weakref
from functools import partial
from types import SimpleNamespace

import pytest
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPTNeoConfig,
    LlamaConfig,
    RecurrentGemmaConfig,
)

from rlhf_data.errors import ConfigError
from rlhf_models.backbone import changes_logits, check_packs


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LlamaConfig(), False),
        (GPTNeoConfig(num_layers=3, attention_types=[[["global"], 3]]), False),  # reads its layers' output by number
        (Gemma2Config(), True),
        (Gemma2Config(final_logit_softcapping=None), False),
        (CohereConfig(logit_scale=0.5), True),
        (CohereConfig(logit_scale=1.0), False),
        (RecurrentGemmaConfig(), True),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_logits_that_are_more_than_the_heads_output_are_found(config, changes):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    for name, size in (sizes | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "pad_token_id": 0}).items():
        setattr(config, name, size)
    model = AutoModelForCausalLM.from_config(config)
    own = model.base_model.forward = partial(model.base_model.forward)  # as of layers that were wrapped
    assert changes_logits(model) == changes
    assert vars(model.base_model).pop("forward") is own
    del own
    assert changes_logits(model) == changes
    # Otherwise the memory of a model that is dropped is freed only by the next collection of garbage.
    layers = weakref.ref(model.base_model)
    del model
    assert layers() is None


class Hearing(nn.Module):
    """A model of layers for text, and a convolution over sounds that text does not reach."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        text = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=64, initializer_range=0.5))
        self.text, self.ear = text.base_model.eval(), nn.Conv1d(1, 1, 3)
        self.config = SimpleNamespace(_attn_implementation="sdpa", get_text_config=lambda: text.config)
        self.forward = self.text.forward

    def get_decoder(self) -> nn.Module:
        return self.text


def test_convolutions_that_read_another_input_keep_a_model_from_being_packed_only_where_text_is():
    model = Hearing()
    check_packs(model)
    model.text.layers[0].short = nn.Conv1d(1, 1, 3)
    with pytest.raises(ConfigError, match="a llama model with the attention sdpa cannot be packed: RuntimeError"):
        check_packs(model)
