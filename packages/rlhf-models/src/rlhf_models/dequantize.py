"""A bfloat16 copy of a quantized model, which can be trained: `python -m rlhf_models.dequantize MODEL FOLDER`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from rlhf_data.errors import ConfigError, unknown
from rlhf_data.options.exits import SUCCESS, exit_status
from rlhf_data.own_code import admit_code, entrust, trusted
from rlhf_data.pretrained import clear_errors, load_tokenizer, located_model
from rlhf_models.actor import Actor
from rlhf_models.checkpoint.beyond_text import LeftOut
from rlhf_models.checkpoint.files import quiet_transformers
from rlhf_models.images import language_model_class
from rlhf_models.loading import DEQUANTIZABLE, quantization_of
from rlhf_models.weights import check_saves, save_hf


def dequantize(path: str | Path, folder: str | Path) -> Path:
    """Write a copy of a quantized language model with its weights in bfloat16, and return its folder.

    Args:
        path: a folder or hub name. The whole copy must fit into memory.
        folder: a new or empty folder.

    Raises:
        ConfigError: the model is not quantized by one of `DEQUANTIZABLE`, or the folder is not empty.
        CheckpointError: the folder cannot be written.
    """
    import transformers

    folder = Path(folder).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not an empty folder", hint="name a new folder for the copy")
    name, is_local = located_model(path)
    with clear_errors("model", path), quiet_transformers():
        options = {"local_files_only": is_local, "trust_remote_code": admit_code(name, is_local=is_local)}
        config = transformers.AutoConfig.from_pretrained(name, **options)
        method = str(quantization_of(config))
        if method not in DEQUANTIZABLE:
            raise ConfigError(f"the model {path}: {unknown('quant_method', method, DEQUANTIZABLE)}")
        whole = getattr(transformers, DEQUANTIZABLE[method])(dequantize=True)
        model = language_model_class(config).from_pretrained(
            name, dtype=torch.bfloat16, quantization_config=whole, **options
        )
    vars(model.config.get_text_config()).pop("quantization_config", None)
    model.left_out = LeftOut(name, config, {})  # the files of a processor of images are copied
    entrust(model.config, name)
    # Transformers would save the weights under the names of the quantized ones, and not load them again.
    model._weight_conversions = None
    check_saves(Actor(model))
    return save_hf(model, None, load_tokenizer(path), folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser("python -m rlhf_models.dequantize", description=__doc__)
    parser.add_argument("model", help=f"folder or hub name of a model quantized by {' or '.join(DEQUANTIZABLE)}")
    parser.add_argument("folder", help="new folder for the copy")
    text = "run the Python code that comes with the files of the model; read it before"
    parser.add_argument("--trust_remote_code", action="store_true", help=text)
    words = parser.parse_args(argv)

    def run() -> int:
        print(f"written to {dequantize(trusted(words.model, words.trust_remote_code), words.folder)}")
        return SUCCESS

    return exit_status(run)


if __name__ == "__main__":
    raise SystemExit(main())
