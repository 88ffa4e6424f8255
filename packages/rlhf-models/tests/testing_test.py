import pytest
import torch

from rlhf_data.errors import ConfigError
from rlhf_models.testing import tiny_model_dir


def test_tiny_model_dir_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    tiny_model_dir(tmp_path)
    assert torch.rand(1) == expected


def test_tiny_model_dir_unknown_architecture_names_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean `llama`"):
        tiny_model_dir(tmp_path, architecture="lama")


def test_tiny_model_dir_vocabulary_below_the_bytes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least 259"):
        tiny_model_dir(tmp_path, vocab_size=258)
