"""The benchmark of a model that reads images: its pictures, its model, and the commands that it runs."""

import json
import re

import numpy as np
import pytest
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rlhf_data.images.reader import open_image_reader
from rlhf_models.testing import tiny_model_dir
from workloads.learning import images


@pytest.fixture
def asked(monkeypatch):
    """The flags of `sft` and of `ppo`, and what was in the folder of the model."""
    found = {}

    def sft(model, flags, folder):
        found["sft"], found["model"] = " ".join(flags), model
        found["seeing"] = AutoModelForImageTextToText.from_pretrained(model)
        found["reader"] = open_image_reader(model)
        shapes = folder.parent / "shapes"
        found["rows"] = [json.loads(line) for line in (shapes / "train.jsonl").read_text().splitlines()]
        found["pictures"] = [Image.open(shapes / path).copy() for row in found["rows"] for path in row["images"]]
        return folder / "model"

    def run(flags, folder):
        found["ppo"] = " ".join(flags)
        return {"accuracy_before": 0.2, "accuracy_after": 0.6}

    monkeypatch.setattr(images, "sft", sft)
    monkeypatch.setattr(images, "run", run)
    return found


def test_a_chat_model_behind_a_random_tower_is_told_first_and_then_rewarded(bench, asked, tmp_path):
    chat = tiny_model_dir(tmp_path / "chat", architecture="llama")
    small = "--rows 12 --held_out 3 --prompts 2 --image_size 64 --vision_layers 1 --vision_width 64 --seeds 4"
    _, report = bench("images", "--model", str(chat), *small.split(), "--", "--vllm_max_num_seqs", "8")
    assert (report["mean_before"], report["worst_after"]) == (0.2, 0.6)
    assert "--output_key label" in asked["sft"] and asked["sft"].endswith("--seed 4")
    assert "/sft4/model" in asked["ppo"] and asked["ppo"].endswith("--vllm_max_num_seqs 8 --seed 4")
    assert "--rollout_batch_size 2 --train_batch_size 16" in asked["ppo"]

    counted = [number_of_shapes(picture) for picture in asked["pictures"]]
    assert len(counted) == 12
    for row, number in zip(asked["rows"], counted, strict=True):
        assert "How many" not in row["input"] or row["label"] == str(number)

    # A picture stands for (64 pixels / 16 per patch / 4 patches per token)^2 tokens.
    arrays = asked["reader"].processed(asked["pictures"][:1])
    assert arrays["pixel_values"].shape[-2:] == (64, 64)
    assert asked["seeing"].model.image_seq_len == 1
    told, seeing = (
        AutoModelForCausalLM.from_pretrained(chat).state_dict(),
        asked["seeing"].model.text_model.state_dict(),
    )
    for name, weight in seeing.items():  # rows of embeddings are added
        np.testing.assert_array_equal(weight[: len(told[f"model.{name}"])], told[f"model.{name}"])


def number_of_shapes(picture) -> int:
    """Count the runs of rows that have a pixel which is not white. Shapes lie below each other."""
    inked = (np.asarray(picture) < 250).any(axis=(1, 2))
    return len(re.findall("1+", "".join(map(str, inked.astype(int)))))
