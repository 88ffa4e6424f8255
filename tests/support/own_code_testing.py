"""A tiny model with Python code of its own, for tests of whether it runs."""

import json
from pathlib import Path
from typing import Any

from rlhf_models.testing import tiny_model_dir


def own_code_model_dir(path: str | Path, marker: str | Path, **options: Any) -> Path:
    """Write a tiny model with Python code of its own: a config, a model and a tokenizer.

    The code creates the file `marker` when it is imported. The model is a Qwen2 whose hidden states have the other
    sign, so that transformers' own class computes something else. Options, result and errors are those of
    `tiny_model_dir`.
    """
    folder = tiny_model_dir(path, **options)
    for name, text in _OWN_CODE.items():
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\n{text}", encoding="utf-8")
    classes = {
        "config.json": {
            "AutoConfig": "configuration_mine.MineConfig",
            "AutoModel": "modeling_mine.MineModel",
            "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
        },
        "tokenizer_config.json": {"AutoTokenizer": [None, "tokenization_mine.MineTokenizer"]},
    }
    other = {"config.json": {"model_type": "mine", "architectures": ["MineForCausalLM"]}}
    other["tokenizer_config.json"] = {"tokenizer_class": "MineTokenizer"}
    for name, auto_map in classes.items():
        content = json.loads((folder / name).read_text(encoding="utf-8")) | other[name] | {"auto_map": auto_map}
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


_OWN_CODE = {
    "configuration_mine": """
from transformers import Qwen2Config

class MineConfig(Qwen2Config):
    model_type = "mine"
""",
    "modeling_mine": """
from transformers import Qwen2ForCausalLM, Qwen2Model
from .configuration_mine import MineConfig

class MineModel(Qwen2Model):
    config_class = MineConfig

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **options):
        options |= {"position_ids": position_ids, "inputs_embeds": inputs_embeds}
        output = super().forward(input_ids, **options)
        output[0].neg_()  # in place, because vLLM takes a tuple
        return output

class MineForCausalLM(Qwen2ForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = MineModel(config)
        self.post_init()
""",
    "tokenization_mine": """
from transformers import PreTrainedTokenizerFast

class MineTokenizer(PreTrainedTokenizerFast):
    pass
""",
}
