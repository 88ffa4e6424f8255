"""Training on fixed examples with images, on real DeepSpeed in this process, against plain transformers."""

import json
import shutil

import pytest

from rlhf_cli.commands.examples import COMMANDS
from tiny_vision import drawn_shapes, tiny_vision_model_dir

main = COMMANDS["sft"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    tiny_vision_model_dir(tmp_path / "model", "qwen2_5_vl")
    rows = [*drawn_shapes(tmp_path / "pictures", 11, seed=1), {"input": "text alone", "output": "yes"}]
    for number, row in enumerate(rows):
        row |= {"chosen": row["output"], "rejected": "pink", "label": number % 2 == 0}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def flags(*more: str) -> list[str]:
    """Flags of `sft`, and of other commands with those of their keys."""
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


def read(model, tokenizer, processor, row, answer=""):
    """Return what plain transformers reads of a row: arguments of a pass, and the number of tokens of the prompt."""
    import torch
    from PIL import Image

    arrays = {}
    parts = [{"type": "text", "text": row["input"]}]
    size = 0
    if "images" in row:
        arrays = dict(processor(images=[Image.open(row["images"][0])], return_tensors="pt"))
        size = int(arrays["image_grid_thw"].prod()) // processor.merge_size**2
        parts.insert(0, {"type": "image"})
    options = {"tokenize": False, "add_generation_prompt": True}
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], **options)
    text = text.replace("<|image_pad|>", "<|image_pad|>" * size)
    num_prompt_tokens = len(tokenizer(text)["input_ids"])
    ids = tokenizer(text + answer, return_tensors="pt")["input_ids"]
    arrays["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **arrays}, num_prompt_tokens


def greedy_answer(model, tokenizer, processor, row):
    """Return what plain transformers answers to a row with one image."""
    arguments, num_prompt_tokens = read(model, tokenizer, processor, row)
    answer = model.generate(**arguments, max_new_tokens=8, do_sample=False)[0, num_prompt_tokens:]
    return tokenizer.decode(answer, skip_special_tokens=True)


def test_sft_teaches_a_random_model_the_colours_and_numbers_of_shapes_that_it_has_not_seen(folder, monkeypatch):
    monkeypatch.chdir(folder)
    rows = list(drawn_shapes(folder / "pictures", 700, seed=1))
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


class Plain:
    """A saved model as plain transformers loads it."""

    def __init__(self, path, has_values=False):
        from safetensors.torch import load_file
        from transformers import AutoImageProcessor, AutoModel, AutoModelForImageTextToText, AutoTokenizer

        self.model = (AutoModel if has_values else AutoModelForImageTextToText).from_pretrained(path)
        self.parts = AutoTokenizer.from_pretrained(path), AutoImageProcessor.from_pretrained(path, backend="pil")
        self.head = load_file(f"{path}/value_head.safetensors")["weight"][0] if has_values else None

    def logits(self, row, answer):
        """Log-probs of all tokens before each token of an answer, and the answer's tokens."""
        import torch

        arguments, start = read(self.model, *self.parts, row, f"{answer}<|im_end|>")
        with torch.no_grad():
            logits = self.model(**arguments).logits[0, start - 1 : -1].log_softmax(-1)
        return logits, arguments["input_ids"][0, start:, None]

    def logprob(self, row, answer):
        """The log-prob of an answer and its end."""
        logits, ids = self.logits(row, answer)
        return float(logits.gather(1, ids).sum())

    def score(self, row, answer):
        """The score of an answer."""
        import torch

        arguments, _ = read(self.model, *self.parts, row, f"{answer}<|im_end|>")
        with torch.no_grad():
            return float(self.model(**arguments).last_hidden_state[0, -1] @ self.head)


def margin_of_scores(rows):
    model = Plain("out/model", has_values=True)
    return [model.score(row, row["chosen"]) - model.score(row, row["rejected"]) for row in rows]


def log_ratios(rows, *keys):
    new = Plain("out/model")
    old = Plain("model")
    return [[new.logprob(row, row[key]) - old.logprob(row, row[key]) for key in keys] for row in rows]


def margin_of_pairs(rows):
    return [0.1 * (chosen - rejected) for chosen, rejected in log_ratios(rows, "chosen", "rejected")]


def reward_of_good_answers(rows):
    return [0.1 * ratio for [ratio] in log_ratios([row for row in rows if row["label"]], "output")]


def distances_from_teacher(rows):
    models = [Plain("teacher"), Plain("out/model")]
    pairs = [[model.logits(row, row["output"])[0] for model in models] for row in rows]
    return [value for teacher, own in pairs for value in (-teacher.exp() * own).sum(-1).tolist()]


@pytest.mark.parametrize(
    ("command", "more", "metric", "expected"),
    [
        ("rm", "--prompt_key input", "margin", margin_of_scores),
        ("rm", "--prompt_key input --packing_samples --lora_rank 4", "margin", margin_of_scores),
        ("dpo", "--prompt_key input --packing_samples --precompute_reference", "margin", margin_of_pairs),
        ("dpo", "--prompt_key input --zero_stage 3 --freeze_visual_encoder", "margin", margin_of_pairs),
        ("dpo", "--prompt_key input --packing_samples --lora_rank 4", "margin", margin_of_pairs),
        ("kto", "--packing_samples", "desirable_reward", reward_of_good_answers),
        ("kd", "--packing_samples --teacher_model teacher", "distillation", distances_from_teacher),
    ],
)
def test_the_metric_of_a_command_is_what_plain_transformers_computes_with_its_model(
    folder, monkeypatch, command, more, metric, expected
):
    import torch
    from transformers import AutoModelForImageTextToText

    monkeypatch.chdir(folder)
    if command == "kd":
        shutil.copytree("model", "teacher")
        teacher = AutoModelForImageTextToText.from_pretrained("model")
        with torch.no_grad():
            for weight in teacher.parameters():
                weight.mul_(1.2)
        teacher.save_pretrained("teacher")  # beside its tokenizer and processor
    assert COMMANDS[command](flags("--eval_dataset", "rows.jsonl", *more.split())) == 0
    metrics = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    before, after = [line[f"eval/{metric}"] for line in metrics if f"eval/{metric}" in line]
    values = expected([json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()])
    assert after == pytest.approx(sum(values) / len(values), abs=2e-5)
    assert abs(after - before) > 1e-2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--torch_compile", "on"], "trained on whole sequences"),
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
