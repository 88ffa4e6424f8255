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


def greedy_answer(model, tokenizer, processor, row):
    """Return what plain transformers answers to a row with one image."""
    import torch
    from PIL import Image

    arrays = processor(images=[Image.open(row["images"][0])], return_tensors="pt")
    size = int(arrays["image_grid_thw"].prod()) // processor.merge_size**2
    parts = [{"type": "image"}, {"type": "text", "text": row["input"]}]
    options = {"tokenize": False, "add_generation_prompt": True}
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], **options)
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * size), return_tensors="pt")["input_ids"]
    kinds = (ids == model.config.image_token_id).int()
    more = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, "max_new_tokens": 8, "do_sample": False}
    answer = model.generate(input_ids=ids, **more, **arrays)[0, ids.shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True)


def test_sft_teaches_a_random_model_the_colours_and_numbers_of_shapes_that_it_has_not_seen(folder, monkeypatch):
    monkeypatch.chdir(folder)
    rows = list(drawn_shapes(folder / "pictures", 1100, seed=1))
    seen = [row for row in rows if row["input"] != "side?"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in seen))
    more = "--train_batch_size 16 --micro_train_batch_size 16 --max_epochs 5"
    assert main(flags(*more.split())) == 0

    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    model = AutoModelForImageTextToText.from_pretrained("out/model")
    tokenizer = AutoTokenizer.from_pretrained("out/model")
    processor = AutoImageProcessor.from_pretrained("out/model", backend="pil")
    for question in ("colour?", "count?"):
        asked = [row for row in drawn_shapes(folder / "pictures", 90, seed=2) if row["input"] == question]
        right = [greedy_answer(model, tokenizer, processor, row) == row["output"] for row in asked]
        # One in three is right by chance.
        assert sum(right) > 0.8 * len(right)


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
