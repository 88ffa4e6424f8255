"""The recipes lack nothing but models of the hub, and fit their GPUs by the estimates that the page gives."""

import json
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
import transformers

from memory_models import FAMILIES
from page_commands import ROOT, calls
from rlhf_cli.main import main

PAGE = "docs/recipes.md"
TOKENIZER = ROOT / "packages/rlhf-cli/src/rlhf_cli/builtin/model"
ROW = '{"input": "What is 4 + 8?", "label": "12"}\n'


def save(folder: Path, model_class: type, **options: object) -> None:
    """Save the shape of a model of 7 billion weights: its weights are holes in a file."""
    _, shape = FAMILIES["Qwen2-7B"]
    config = transformers.Qwen2Config(**shape, max_position_embeddings=32_768, dtype="bfloat16", **options)
    with torch.device("meta"):
        weights = model_class(config).state_dict()
    config.architectures = [model_class.__name__]
    config.save_pretrained(folder)
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    for file in TOKENIZER.glob("chat_template*"):
        shutil.copy(file, folder)
    head, end = {}, 0
    for name, weight in weights.items():
        size = 2 * weight.numel()
        head[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(head).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("prompts.jsonl", "held_out.jsonl"):
        Path(name).write_text(200 * ROW, encoding="utf-8")
    save(tmp_path / "policy", transformers.Qwen2ForCausalLM)
    save(tmp_path / "reward", transformers.Qwen2ForSequenceClassification, num_labels=1)
    return tmp_path


def test_recipes_lack_nothing_and_fit_as_the_page_says(here, capsys):
    names = {"Qwen/Qwen2.5-7B-Instruct": "./policy", "my-org/reward-model-7b": "./reward"}
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    expected = [int(number) for number in re.findall(r"^Estimate: (\d+) GiB", text, re.M)]
    found = []
    for program, *arguments in calls(PAGE, here):
        assert program == "rlhf" and arguments[-1] == "--dry_run"
        assert main([names.get(word, word) for word in arguments]) == 0
        printed = "".join(capsys.readouterr())
        for title in ("cannot run yet", "still missing", "no effect"):
            assert title not in printed, arguments
        if "--plan_gpu_memory" in arguments:
            [said] = re.findall(r"fullest GPU +([\d.]+) of [\d.]+, fits[;,\n]", printed)
            found.append(round(float(said)))
    assert found == expected and len(found) == 3
