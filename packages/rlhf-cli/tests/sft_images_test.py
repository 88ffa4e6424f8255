"""`sft` on rows with images, on real DeepSpeed in this process."""

import json

import pytest

from rlhf_cli.commands.examples import COMMANDS
from tiny_vision import drawn_shapes, tiny_vision_model_dir

main = COMMANDS["sft"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    tiny_vision_model_dir(tmp_path / "model", "qwen2_5_vl")
    rows = [*drawn_shapes(tmp_path / "pictures", 11, seed=1), {"input": "text alone", "output": "yes"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def flags(*more: str) -> list[str]:
    words = "--pretrain model --dataset rows.jsonl --image_key images --save_path out --max_len 128 --zero_stage 0"
    sizes = "--train_batch_size 4 --micro_train_batch_size 2 --max_epochs 2 --learning_rate 3e-3"
    return [*words.split(), *sizes.split(), "--apply_chat_template", *more]


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_sft_learns_from_images_and_plain_transformers_loads_the_model(folder, capsys, monkeypatch, is_frozen):
    monkeypatch.chdir(folder)
    assert main(flags(*["--freeze_visual_encoder"] * is_frozen, "--eval_dataset", "rows.jsonl")) == 0
    metrics = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    before, after = [line["eval/loss"] for line in metrics if "eval/loss" in line]
    assert after < before - 0.5
    assert "AutoModelForImageTextToText.from_pretrained" in capsys.readouterr().out

    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    old, new = [AutoModelForImageTextToText.from_pretrained(path).state_dict() for path in ("model", "out/model")]
    assert old.keys() == new.keys()
    changed = {name for name, weight in old.items() if not torch.equal(weight, new[name])}
    assert any("visual" in name for name in changed) is not is_frozen
    assert any("layers" in name and "visual" not in name for name in changed)
    AutoImageProcessor.from_pretrained("out/model")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--packing_samples"], "trained in padded batches"),
        (["--lora_rank", "2"], "trained in padded batches"),
        (["--zero_stage", "3"], "trained in padded batches"),
        (["--image_key", "picture"], "no row of --dataset has images"),
        (["--data_cache", "cache"], "drop --data_cache"),
        (["--pretrain", "builtin"], "images are read for qwen2_vl"),
    ],
)
def test_what_does_not_work_with_images_is_refused(folder, capsys, monkeypatch, more, message):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("rlhf_train.offline.job.run_offline", lambda *_: pytest.fail("a run was started"))
    assert main(flags(*more)) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "hint: " in told
