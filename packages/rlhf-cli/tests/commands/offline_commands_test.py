"""The offline commands from their flags to a model folder, on real DeepSpeed in this process."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from rlhf_cli.commands.examples import COMMANDS
from rlhf_cli.main import main as rlhf

WORDS = ("one", "two", "three", "four")
PAIRS = [
    {
        "chosen": f"\n\nHuman: Say {word}.\n\nAssistant: {word}",
        "rejected": f"\n\nHuman: Say {word}.\n\nAssistant: never",
        "better_by": 0.5,
    }
    for word in WORDS
]
ANSWERS = [
    {"question": f"Say {word}.", "answer": answer, "good": answer == word} for word in WORDS for answer in (word, "no")
]
STEPS = [
    {"input": f"{n} + 1 + 1? {n} + 1 = {n + 1}<|endoftext|> so {n + 3}<|endoftext|>", "label": ["+", "-"]}
    for n in range(8)
]
ROWS = {"pairs": PAIRS * 2, "answers": ANSWERS, "steps": STEPS}
QUESTIONS = {"input_key": "question", "output_key": "answer"}
OF = {
    "sft": {"dataset": "answers.jsonl", **QUESTIONS, "apply_chat_template": ""},
    "rm": {"dataset": "pairs.jsonl"},
    "dpo": {"dataset": "pairs.jsonl", "beta": 0.5},
    "kto": {"dataset": "answers.jsonl", **QUESTIONS, "label_key": "good", "beta": 0.5},
    "prm": {"dataset": "steps.jsonl", "placeholder_token": "<|endoftext|>"},
    "kd": {"dataset": "answers.jsonl", **QUESTIONS},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    from rlhf_models.testing import tiny_model_dir

    folder = tmp_path_factory.mktemp("models")
    tiny_model_dir(folder / "base")
    tiny_model_dir(folder / "other", seed=1)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def flags(command: str, models: Path, **changes: object) -> list[str]:
    options = {
        "pretrain": models / "base",
        "save_path": "out",
        "max_len": 64,
        "train_batch_size": 4,
        "micro_train_batch_size": 2,
        "learning_rate": 1e-3,
        "zero_stage": 0,
        **OF[command],
    }
    options |= {"teacher_model": models / "other"} if command == "kd" else {}
    return [word for name, value in (options | changes).items() for word in (f"--{name}", *str(value).split())]


def run(command: str, argv: list[str]) -> int:
    return COMMANDS[command](argv)


def measured(folder: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("sft", {"dft": ""}),
        ("rm", {}),
        ("rm", {"margin_loss": "", "margin_key": "better_by"}),
        ("rm", {"loss": "logexp", "packing_samples": "", "micro_batch_tokens": 128}),
        ("dpo", {"label_smoothing": 0.1, "nll_loss_coef": 0.1}),
        ("dpo", {"ipo": "", "length_average": "", "precompute_reference": ""}),
        ("dpo", {"loss_type": "simpo", "beta": 2, "simpo_gamma": 0.3}),
        ("dpo", {"loss_type": "orpo"}),
        ("dpo", {"loss_type": "discopop", "discopop_tau": 0.5}),
        ("kto", {"desirable_loss_weight": 2}),
        ("prm", {}),
        ("kd", {"kd_coef": 0.9}),
        ("kd", {"kd_divergence": "jsd", "jsd_beta": 0.3, "kd_coef": 1}),
    ],
    ids=lambda part: part if isinstance(part, str) else " ".join(part) or "plain",
)
def test_command_learns_its_examples_and_says_where_everything_lies(folder, models, capsys, command, changes):
    data = OF[command]["dataset"]
    assert run(command, flags(command, models, max_epochs=4, eval_dataset=data, **changes)) == 0
    out = capsys.readouterr().out
    before, after = measured(folder, "eval/loss")
    assert after < before
    assert f"{before:.4f} -> {after:.4f}" in out
    # 8 examples x 4 epochs / 4 = 8 updates.
    assert len(measured(folder, "train/grad_norm")) == 8
    for part in ("config.toml", "metrics.jsonl", "model"):
        assert str(folder / "out" / part) in out
    loader = (
        "AutoModelForSequenceClassification.from_pretrained"
        if command == "rm"
        else "AutoModelForCausalLM.from_pretrained"
    )
    assert f"{loader}('{folder / 'out' / 'model'}')" in out
    assert rlhf(["report", str(folder / "out")]) == 0
    page = (folder / "out" / "report.html").read_text(encoding="utf-8")
    [shown] = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["runs"]
    assert (shown["command"], shown["last_step"]) == (command, 8)
    assert shown["curves"]["eval/loss"] == [[0, 8], pytest.approx([before, after], rel=1e-5)]


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_dpo_with_states_and_reference_in_cpu_memory_leaves_the_same_model(folder, models, capsys, lora_rank):
    weights = []
    for name, offload in (("plain", {}), ("offload", {"adam_offload": "", "ref_reward_offload": ""})):
        options = {"save_path": name, "bf16": "", "zero_stage": 2, "l2": 0.1, "max_epochs": 2, "lora_rank": lora_rank}
        options["ref_pretrain"] = models / "other"
        assert run("dpo", flags("dpo", models, **options, **offload)) == 0
        weights.append((folder / name / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != (models / "base" / "model.safetensors").read_bytes()
    notices = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    reason = "has no effect: there is no GPU, whose memory it saves"
    assert [line.partition("--")[2] for line in notices] == [f"{name} {reason}" for name in offload]


def test_rm_leaves_a_reward_model_that_orders_pairs_with_the_moments_of_its_scores(folder, models):
    assert run("rm", flags("rm", models, max_epochs=8, eval_dataset="pairs.jsonl")) == 0
    assert measured(folder, "eval/accuracy")[-1] == 1.0

    from rlhf_models.loading import load_config, load_reward_model
    from rlhf_models.reward import stored_moments

    mean, _ = stored_moments(load_config(folder / "out" / "model"))
    assert mean == pytest.approx(measured(folder, "eval/score")[-1])
    load_reward_model(folder / "out" / "model", dtype="float32")


def test_prm_leaves_a_model_that_says_how_it_is_asked_and_judges_steps(folder, models):
    saved = {"save_steps": 24, "save_hf_ckpt": ""}
    assert run("prm", flags("prm", models, max_epochs=12, eval_dataset="steps.jsonl", **saved)) == 0
    assert measured(folder, "eval/accuracy")[-1] == 1.0
    assert rlhf(["checkpoints", "out", "--export", "24", "--output_path", "exported"]) == 0
    asked = [
        json.loads((folder / path / "config.json").read_text())["process_reward"]
        for path in ("out/model", "out/checkpoints/step-24/hf", "exported")
    ]
    assert asked == [asked[0]] * 3

    from transformers import AutoTokenizer

    from rlhf_models.process_reward import StepJudge

    tokenizer = AutoTokenizer.from_pretrained(folder / "out" / "model")
    ask = StepJudge(
        str(folder / "out" / "model"), "\n", dtype="float32", attn_implementation="auto", device="cpu", batch_size=4
    )
    for row in ROWS["steps"]:
        ids = np.array(tokenizer(row["input"])["input_ids"])
        [steps] = ask([(ids, np.ones(len(ids), bool))])
        assert [value > 0.5 for _, value in steps] == [label == "+" for label in row["label"]]


def test_dpo_with_adapters_a_reference_and_a_template_leaves_all_of_them_in_the_model(folder, models, capsys):
    template = "{% for message in messages %}[{{ message['content'] }}]<|im_end|>{% endfor %}"
    (folder / "template.jinja").write_text(template)
    rows = [{"prompt": f"Say {word}.", "chosen": word, "rejected": "never"} for word in WORDS]
    (folder / "prompted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"lora_rank": 2, "ref_pretrain": models / "other", "best_metric_key": "eval/margin", "eval_steps": 1}
    changes |= {"tokenizer_chat_template": "template.jinja", "apply_chat_template": "", "prompt_key": "prompt"}
    changes |= {"chat_template_kwargs": '{"message":1}'}  # it is for this run, and not saved
    changes |= {"save_steps": 1, "save_hf_ckpt": "", "max_ckpt_num": 1}
    data = {"dataset": "prompted.jsonl,prompted.jsonl", "dataset_probs": "1,3", "eval_dataset": "prompted.jsonl"}
    assert run("dpo", flags("dpo", models, **data, **changes)) == 0
    assert str(folder / "out" / "model" / "adapter") in capsys.readouterr().out
    (folder / "template.jinja").unlink()  # checkpoints have its text
    [checkpoint] = (folder / "out" / "checkpoints").glob("step-*")
    step = checkpoint.name.removeprefix("step-")
    assert rlhf(["checkpoints", "out", "--export", step, "--output_path", "exported"]) == 0
    merge = ["--lora_path", "out/model/adapter", "--output_path", "merged", "--bf16", "false"]
    assert rlhf(["lora_combiner", "--model_path", str(models / "base"), *merge]) == 0

    from transformers import AutoTokenizer

    for name in ("out/model", "out/best_model", f"out/checkpoints/step-{step}/hf", "exported", "merged"):
        assert (folder / name / "config.json").exists()
        assert AutoTokenizer.from_pretrained(folder / name).chat_template == template, name


def test_config_that_a_run_leaves_runs_again_from_another_folder(folder, models, capsys, monkeypatch):
    argv = flags("dpo", models, dataset="./pairs.jsonl,pairs.jsonl", data_cache="cache")
    assert run("dpo", [*argv, "--dry_run"]) == 0
    (folder / "run.toml").write_text(capsys.readouterr().out.partition("\n16 examples")[0])
    (folder / "elsewhere").mkdir()
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(folder / "elsewhere"))
    assert run("dpo", ["--config", "../run.toml", "--dry_run"]) == 0
    assert "16 examples x 1 epochs = 4 updates of 4 on 1 process(es), 2 per pass" in capsys.readouterr().out
    assert [path.name for path in (folder / "elsewhere").iterdir()] == []


@pytest.mark.parametrize(
    ("command", "changes", "message"),
    [
        ("sft", {"max_len": 4096}, "has a context of"),
        ("rm", {"chosen_key": "chosn"}, "--chosen_key: "),
        ("rm", {"margin_loss": "", "loss": "logexp"}, "--loss logexp has no margin"),
        ("rm", {"margin_loss": ""}, "unknown key `margin`"),
        ("dpo", {"max_len": 3}, "longer than --max_len 3"),
        ("dpo", {"ipo": "", "loss_type": "orpo"}, "--ipo and --loss_type orpo are two losses"),
        ("dpo", {"best_metric_key": "eval/los", "eval_dataset": "pairs.jsonl"}, "did you mean `eval/loss`?"),
        ("dpo", {"best_metric_key": "eval/loss"}, "--eval_dataset is missing"),
        ("dpo", {"micro_batch_tokens": 9, "packing_samples": ""}, "the longest example has"),
        ("dpo", {"apply_chat_template": "", "tokenizer_chat_template": "x.jinja"}, "x.jinja does not exist"),
        ("kd", {"output_key": "reply"}, "--output_key None if rows have none"),
        ("prm", {"placeholder_token": "step"}, "the placeholder 'step' is"),
        ("prm", {"reward_tokens": "good bad"}, "--reward_tokens: 'good' is"),
        ("kd", {"teacher_model": "None"}, "--teacher_model is missing"),
        ("kd", {"teacher_model": "./absent"}, "--teacher_model: "),
    ],
    ids=lambda part: part if isinstance(part, str) else " ".join(part),
)
def test_bad_input_is_refused_before_a_model_loads(folder, models, capsys, monkeypatch, command, changes, message):
    monkeypatch.setattr("rlhf_train.offline.job.run_offline", lambda *_: pytest.fail("a run was started"))
    assert run(command, flags(command, models, **changes)) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "out").exists()


@pytest.mark.parametrize("good", [[True, False], [True], [False]])
def test_kto_tells_of_answers_of_one_kind(folder, models, capsys, good):
    rows = [row for row in ANSWERS if row["good"] in good]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run("kto", [*flags("kto", models), "--dry_run"]) == 0
    told = f"all 4 answers are {'desirable' if good[0] else 'undesirable'}; KTO learns from both kinds"
    assert (told in capsys.readouterr().err) == (len(good) == 1)
