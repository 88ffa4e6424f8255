"""Checkpoints of runs on fixed examples as their users see them: signals, --resume, and `rlhf checkpoints`."""

import json
import os
import re
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_cli.console.views import OfflineView
from rlhf_cli.main import main
from rlhf_models.loading import load_actor, load_critic, load_reward_model
from rlhf_models.lora import LoraSpec, add_lora
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_train.engine.shards import Shards
from rlhf_train.run.checkpoint import Checkpoints, write_receipt

PAIRS = [{"prompt": f"{number}+1=", "chosen": str(number + 1), "rejected": "no"} for number in range(12)]
TRAIN = ["--pretrain", "builtin", "--train_batch_size", "4", "--max_epochs", "2"]
TRAIN += ["--max_len", "64", "--zero_stage", "0"]
SFT = ["sft", *TRAIN, "--dataset", "rows.jsonl", "--input_key", "prompt", "--output_key", "chosen"]
RM = ["rm", *TRAIN, "--dataset", "rows.jsonl", "--eval_dataset", "rows.jsonl", "--prompt_key", "prompt"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with rows, and with the runs `whole` of `sft` and `lora` of `rm`, of 6 updates each."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUILD_WORKING_DIRECTORY", str(folder))
        assert main([*SFT, "--save_path", "whole", "--save_steps", "2"]) == 0
        flags = ["--save_steps", "3", "--eval_steps", "3", "--best_metric_key", "eval/loss", "--lora_rank", "2"]
        assert main([*RM, "--save_path", "lora", *flags]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(home, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(home))


def same_model(one: Path, other: Path) -> bool:
    weights, others = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def table(capsys, *words: str) -> list[list[str]]:
    """Run `rlhf checkpoints` and return the cells of its lines, without the header."""
    capsys.readouterr()
    main(["checkpoints", *words])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "metric", "size", "age", "state"]
    return [re.split(r"  +", line.strip()) for line in lines]


def terminate_in(monkeypatch, last, *words: str) -> None:
    """Run a command that gets SIGTERM at the end of its update `last`."""

    def update(self, number, num_updates, metrics):
        if number == last:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(OfflineView, "update", update)
        assert main(words) == 128 + signal.SIGTERM


def test_terminated_run_says_how_it_continues_and_does_so_with_the_folder_alone(home, capsys, monkeypatch):
    terminate_in(monkeypatch, 3, *SFT, "--save_path", "run/")
    assert f"`rlhf sft --resume {home}/run` continues this run" in capsys.readouterr().err
    assert not (home / "run/model").exists()
    assert [row[0] for row in table(capsys, "run")] == ["3"]
    assert main(["sft", "--resume", "run"]) == 0
    assert f"the run continues from {home}/run/checkpoints/step-3" in capsys.readouterr().err
    assert same_model(home / "run/model", home / "whole/model")
    # The original command does the same; this time there is nothing left to do but to save the model.
    (home / "run/model/model.safetensors").unlink()
    assert main([*SFT, "--save_path", "run", "--load_checkpoint"]) == 0
    assert same_model(home / "run/model", home / "whole/model")
    *lines, summary = map(json.loads, (home / "run/metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert summary.keys() == {"step", "time/total"} and summary["step"] == 6


@pytest.mark.parametrize("shorter", [[], ["--max_epochs", "1"]])
def test_ended_run_starts_nothing(home, capsys, monkeypatch, shorter):
    with monkeypatch.context() as patch:
        patch.setattr("rlhf_train.offline.job.run_offline", lambda *_: pytest.fail("a run was started"))
        assert main(["sft", "--resume", "whole", *shorter]) == 0
    said = capsys.readouterr()
    wanted = f"the run in {home}/whole has done its 6 update(s): nothing is left to do\n\nhint: a larger --max_epochs"
    assert wanted in said.out
    assert "learning rates" not in said.err


def test_interrupted_run_that_is_made_shorter_saves_the_model_that_it_has(home, capsys, monkeypatch):
    terminate_in(monkeypatch, 5, *RM, "--save_path", "shorter")
    assert main(["rm", "--resume", "shorter", "--max_epochs", "1"]) == 0
    assert "notice: 5 updates are done, more than the 3 of this run: it saves its model" in capsys.readouterr().err
    assert (home / "shorter/model/model.safetensors").exists()
    *_, update_5, evaluation, summary = map(json.loads, (home / "shorter/metrics.jsonl").read_text().splitlines())
    assert (update_5["step"], evaluation["step"], summary["step"]) == (5, 5, 5)
    assert "eval/loss" in evaluation and summary.keys() == {"step", "time/total"}
    assert main(["rm", "--resume", "shorter", "--max_epochs", "1"]) == 0
    assert "has done its 5 update(s): nothing is left to do" in capsys.readouterr().out


def test_other_examples_or_batch_sizes_are_refused(home, capsys):
    assert main(["sft", "--resume", "whole", "--max_samples", "8"]) == 1
    said = capsys.readouterr().err
    assert "--max_samples was not set and is 8: from here on" in said
    assert "the checkpoint's run had num_examples 12, and this one has 8\n\nhint: continue with" in said
    assert main(["sft", "--resume", "whole", "--train_batch_size", "8"]) == 1
    assert "had train_batch_size 4, and this one has 8" in capsys.readouterr().err


def test_checkpoints_are_listed_with_metric_size_age_and_what_is_wrong(home, capsys, tmp_path):
    assert [row[0] for row in table(capsys, "whole")] == ["2", "4", "6"]
    best = json.loads((home / "lora/best_model/state.json").read_text())
    for row in table(capsys, "lora", "--verify"):
        path = home / f"lora/checkpoints/step-{row[0]}"
        size = sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
        assert row[2:] == [f"{size / 2**20:.1f} MiB", row[3], "whole"]
        assert re.fullmatch(r"\d+ (s|min)", row[3])
        assert row[0] != str(best["step"]) or row[1] == f"{best['value']:.4g}"
    checkpoints = Checkpoints(tmp_path / "run/checkpoints", max_num=9)
    for step in (1, 2, 3):
        (checkpoints.begin(step) / "actor").write_bytes(b"1234")
        checkpoints.commit(step, {}, [], None)
    (tmp_path / "run/checkpoints/step-2/actor").write_bytes(b"123x")
    (tmp_path / "run/checkpoints/step-3/manifest.json").write_text("{")
    run = str(tmp_path / "run")
    assert [row[-1] for row in table(capsys, run)][:2] == ["whole", "whole"]
    states = [row[-1] for row in table(capsys, run, "--verify")]
    assert states[:2] == ["whole", "actor has changed since it was written"]
    assert "manifest.json cannot be read" in states[2]
    assert main(["checkpoints", run, "--verify"]) == 1
    assert main(["checkpoints", run]) == 0


def test_prune_keeps_the_newest_and_the_best_and_leaves_what_is_torn(tmp_path, capsys):
    checkpoints = Checkpoints(tmp_path / "run/checkpoints", max_num=9, lowest=True)
    for step, loss in enumerate((0.5, 0.1, 0.4, 0.3, 0.2), start=1):
        (checkpoints.begin(step) / "actor").write_bytes(b"1234")
        checkpoints.commit(step, {}, [], loss)
    (tmp_path / "run/checkpoints/step-5/actor").write_bytes(b"123x")
    run = str(tmp_path / "run")
    assert main(["checkpoints", run, "--prune", "1", "--dry_run"]) == 0
    assert len(checkpoints.all()) == 5
    assert main(["checkpoints", run, "--prune", "1"]) == 0
    assert "2 of 5 checkpoints are whole and kept" in capsys.readouterr().out
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [2, 4, 5]


def test_export_gives_the_model_that_the_run_saved(home, tmp_path, capsys):
    assert main(["checkpoints", "whole", "--export", "6", "--output_path", str(tmp_path / "sft")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"written to {tmp_path / 'sft'}"
    assert same_model(tmp_path / "sft", home / "whole/model")
    load_actor(tmp_path / "sft", dtype="float32")
    assert main(["checkpoints", "lora", "--export", "6", "--output_path", str(tmp_path / "rm")]) == 0
    assert same_model(tmp_path / "rm", home / "lora/model")
    own, saved = (
        load_reward_model(path, dtype="float32", normalize=True) for path in (tmp_path / "rm", home / "lora/model")
    )
    assert own.moments == saved.moments
    assert torch.equal(own.value_head.weight, saved.value_head.weight)
    assert (tmp_path / "rm/adapter/adapter_model.safetensors").exists()


def test_export_puts_the_parts_of_several_ranks_together(tmp_path):
    """Each weight of an actor, its draft model and a critic is cut into uneven parts, which three ranks wrote."""
    run = tmp_path / "run"
    base = tiny_model_dir(tmp_path / "base")
    drafts = tiny_model_dir(tmp_path / "drafts", num_hidden_layers=1)
    models = {"actor": load_actor(base, dtype="float32"), "critic": load_critic(base, dtype="float32")}
    models["draft"] = load_actor(drafts, dtype="float32")
    checkpoints = Checkpoints(run / "checkpoints")
    staging = checkpoints.begin(4)
    names = []
    for role, model in models.items():
        shards = [Shards() for _ in range(3)]
        for index, (name, weight) in enumerate(model.named_parameters()):
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
            flat = weight.data.flatten()
            cuts = [0, len(flat) // 5, len(flat) // 2, len(flat)]
            for shard, low, high in zip(shards, cuts, cuts[1:], strict=False):
                shard.add(f"weight/{name}", flat[low:high], low)
        for rank, shard in enumerate(shards):
            names.append(f"{role}-{rank}-of-3.safetensors")
            shard.write(staging / names[-1])
            write_receipt(staging / names[-1])
    checkpoints.commit(4, {}, names, None)
    (run / "config.toml").write_text(f'[model]\npretrain = "{base}"\n\n[engine]\nvllm_draft_model = "{drafts}"\n')
    words = ["checkpoints", str(run), "--export", "4", "--output_path"]
    assert main([*words, str(tmp_path / "actor")]) == 0
    for role in ("critic", "draft"):
        assert main([*words, str(tmp_path / role), "--role", role]) == 0
    loaded = {
        "actor": load_actor(tmp_path / "actor", dtype="float32"),
        "draft": load_actor(tmp_path / "draft", dtype="float32"),
        "critic": load_critic(tmp_path / "critic", dtype="float32"),
    }
    for role, model in models.items():
        for name, weight in loaded[role].named_parameters():
            assert torch.equal(weight, dict(model.named_parameters())[name]), (role, name)


def save_run(run: Path, role: str, model: torch.nn.Module, options: str, state: Mapping[str, object]) -> list[str]:
    """Write a run with a checkpoint of a model's trained weights; return the words that export them to `run`/out."""
    shards = Shards()
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            shards.add(f"weight/{name}", weight.data.flatten(), 0)
    checkpoints = Checkpoints(run / "checkpoints")
    path = checkpoints.begin(1) / f"{role}-0-of-1.safetensors"
    shards.write(path)
    write_receipt(path)
    checkpoints.commit(1, state, [path.name], None)
    (run / "config.toml").write_text(f"[model]\n{options}\n")
    return ["checkpoints", str(run), "--export", "1", "--role", role, "--output_path", str(run / "out")]


def test_export_merges_adapters_that_the_critic_alone_has(tmp_path):
    base = tiny_model_dir(tmp_path / "base")
    model = load_critic(base, dtype="float32")
    add_lora(model, LoraSpec(rank=2, alpha=6.0, dropout=0.0, target_modules=("q_proj",)))
    weights = dict(model.named_parameters())
    for index, weight in enumerate(weights.values()):
        if weight.requires_grad:
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
    options = f'pretrain = "{base}"\ncritic_lora_rank = 2\nlora_alpha = 6.0\ntarget_modules = "q_proj"'
    assert main(save_run(tmp_path, "critic", model, options, {})) == 0
    exported = dict(load_critic(tmp_path / "out", dtype="float32").named_parameters())
    merged = set()
    for name, weight in weights.items():
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            down, up = (weights[f"{layer}.lora_{part}.default.weight"] for part in "AB")
            merged.add(f"{layer}.weight")
            torch.testing.assert_close(exported[f"{layer}.weight"], weight + 6.0 / 2 * up @ down)
        elif "lora_" not in name:
            assert torch.equal(exported[name.replace(".base_layer", "")], weight), name
    assert len(merged) == 2  # layers of the model


def test_export_of_a_reward_model_that_was_not_evaluated_has_no_moments_and_says_so(tmp_path, capsys):
    base = tiny_reward_model_dir(tmp_path / "base", mean=9.0, std=9.0)
    saved = {"evaluated": {}, "saved_fields": {"note": 1}, "chat_template": "{{ messages }}"}
    model = load_critic(base, dtype="float32")
    assert main(save_run(tmp_path, "reward", model, f'pretrain = "{base}"', {"run": saved})) == 0
    assert "notice: the run evaluated nothing, so no mean and deviation" in capsys.readouterr().err
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["note"] == 1 and not {"mean", "std"} & config.keys()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages }}"


def of_two_labels(folder: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_model_dir(folder), num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


# Base models by name: what writes them.
BASES = {
    "whole": tiny_model_dir,
    "classifier": tiny_reward_model_dir,
    "narrow": partial(tiny_model_dir, hidden_size=32),
    "two labels": of_two_labels,
    "no weights": lambda folder: (tiny_model_dir(folder) / "model.safetensors").unlink(),
    "no tokenizer": lambda folder: (tiny_model_dir(folder) / "tokenizer.json").unlink(),
    "absent": lambda folder: None,
}


@pytest.mark.parametrize(
    ("role", "base", "status", "says"),
    [
        ("actor", "whole", 0, "would write the actor of"),
        ("reward", "classifier", 0, "would write the reward of"),
        ("actor", "absent", 2, "there is no model folder"),
        ("critic", "no weights", 2, "no weights has no weights"),
        ("actor", "no tokenizer", 2, "tokenizer"),
        ("actor", "narrow", 1, "weight, and the model "),
        ("reward", "two labels", 2, "the head score.weight of the model"),
    ],
)
def test_dry_run_of_an_export_checks_the_base_model_as_the_export_does(tmp_path, capsys, role, base, status, says):
    model = (load_actor if role == "actor" else load_critic)(tiny_model_dir(tmp_path / "trained"), dtype="float32")
    BASES[base](tmp_path / base)
    words = save_run(tmp_path, role, model, f'pretrain = "{tmp_path / base}"', {})
    capsys.readouterr()
    assert main([*words, "--dry_run"]) == status
    dry = capsys.readouterr()
    assert says in dry.out + dry.err
    assert not (tmp_path / "out").exists()
    assert main(words) == status
    assert status == 0 or capsys.readouterr().err.partition("error: ")[1:] == dry.err.partition("error: ")[1:]


def test_dry_run_of_an_export_tries_adapters_and_does_not_ask_the_hub(tmp_path, capsys):
    base = tiny_model_dir(tmp_path / "base")
    options = f'pretrain = "{base}"\nlora_rank = 2\ntarget_modules = "absent_proj"'
    words = save_run(tmp_path, "actor", load_actor(base, dtype="float32"), options, {})
    assert main([*words, "--dry_run"]) == 2
    assert "Target modules {'absent_proj'} not found" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text('[model]\npretrain = "owner/absent"\n')
    assert main([*words, "--dry_run"]) == 0
    assert "notice: not checked: --pretrain owner/absent: not on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", r"--run is missing: a run must be named\n\nhint: write `rlhf checkpoints RUN_DIR`"),
        ("nowhere", r"there is no folder .*/nowhere\n\nhint: name the folder of a run"),
        (".", r"there are no checkpoints in .*/checkpoints\n\nhint: runs save them with --save_steps N"),
        ("whole --export 3 --output_path o", r"no checkpoint of this step, but of 2, 4, 6\n\nhint: use --export 6"),
        ("whole --export 6", r"--output_path is missing: --export writes a folder\n\nhint: add --output_path DIR"),
        ("whole --export 6 --output_path whole", r"--output_path .*/whole is not an empty folder\n\nhint"),
        ("whole --export 6 --output_path o --role critic", r"has no state of critic, but of actor\n\nhint: use --role"),
        ("whole --export 6 --prune 1 --output_path o", r"--export and --prune are two tasks\n\nhint: export first"),
        ("broken", r"broken/config\.toml cannot be read: Expected .*\n\nhint: name the folder of a run"),
        ("latin", r"latin/config\.toml cannot be read: 'utf-8' codec .*\n\nhint: name the folder of a run"),
    ],
)
def test_bad_input_is_refused_with_a_hint(home, capsys, words, says):
    for name, config in {"broken": b"[model", "latin": b'[model]\npretrain = "\xe9"\n'}.items():
        (home / name).mkdir(exist_ok=True)
        (home / name / "config.toml").write_bytes(config)
    assert main(["checkpoints", *words.split()]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_export_of_a_torn_checkpoint_is_refused(home, capsys):
    path = home / "lora/checkpoints/step-3/reward-0-of-1.safetensors"
    before = path.read_bytes()
    path.write_bytes(before[:-1])
    assert main(["checkpoints", "lora", "--export", "3", "--output_path", "torn"]) == 1
    assert re.search(r"step-3 is not whole: reward-0.* has \d+ bytes, not \d+\n\nhint: export", capsys.readouterr().err)
    path.write_bytes(before)
    assert not (home / "torn").exists()
