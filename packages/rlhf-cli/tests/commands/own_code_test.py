"""--trust_remote_code: models with Python code of their own run in every command with it, and in none without."""

import json
import os
import re
import tempfile

import pytest

# transformers reads this when it is imported: where it copies the code of models to.
os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp())

import rlhf_data.own_code
import rlhf_models.loading
from own_code_testing import own_code_model_dir
from rlhf_cli.console.results import loading_line
from rlhf_cli.main import COMMANDS, command_line, main
from rlhf_data.main import main as data_main
from rlhf_data.options.declare import options
from rlhf_data.own_code import TrustedModel
from rlhf_models.loading import load_critic, load_tokenizer
from rlhf_models.testing import tiny_model_dir
from rlhf_models.weights import save_hf

CODE = {"configuration_mine.py", "modeling_mine.py", "tokenization_mine.py"}
ROWS = "--dataset rows.jsonl --input_key q --output_key a"
STEPS = "--dataset rows.jsonl --input_key q --label_key l --placeholder_token x"
PAIRS = "--dataset rows.jsonl --prompt_key q --chosen_key a --rejected_key q"
LENGTH = "--remote_rm_url length:max=9 --save_path {out}"
PROMPTS = "--prompt_data rows.jsonl --input_key q"
# By command, words that name the model `mine`; {out} is a new folder or file.
NAMING = {
    "ppo": f"ppo --pretrain mine {PROMPTS} {LENGTH}",
    "ppo, reward": f"ppo {PROMPTS} --pretrain plain --reward_pretrain mine --save_path {{out}}",
    "ppo, critic": f"ppo {PROMPTS} --pretrain plain --critic_pretrain mine {LENGTH}",
    "ppo, teacher": f"ppo {PROMPTS} --pretrain plain --teacher_model mine --save_path {{out}}",
    "sft": f"sft --pretrain mine {ROWS} --save_path {{out}}",
    "rm": f"rm --pretrain mine {PAIRS} --save_path {{out}}",
    "dpo, reference": f"dpo --pretrain plain --ref_pretrain mine {PAIRS} --save_path {{out}}",
    "kto": "kto --pretrain mine --dataset rows.jsonl --input_key q --output_key a --label_key l --save_path {out}",
    "kd, teacher": f"kd --pretrain plain --teacher_model mine {ROWS} --save_path {{out}}",
    "prm": f"prm --pretrain mine {STEPS} --save_path {{out}}",
    "generate": f"generate --pretrain mine --engine transformers {PROMPTS} --output_path {{out}}.jsonl",
    "generate, tokenizer": f"generate --engine fake --tokenizer mine {PROMPTS} --output_path {{out}}.jsonl",
    "score": f"score --reward_pretrain plain,mine {ROWS} --output_path {{out}}.jsonl",
    "serve": "serve --pretrain mine --engine transformers",
    "serve_rm": "serve_rm --reward_pretrain mine",
    "bench": f"bench --pretrain mine --engine transformers {PROMPTS}",
    "chat": "chat --pretrain mine --engine transformers",
    "lora_combiner": "lora_combiner --model_path mine --lora_path plain --output_path {out}",
    "inspect": "inspect --tokenizer mine --dataset rows.jsonl --input_key q --output_key a",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with rows and the models `mine`, whose code creates the file `was-run`, and `plain`."""
    rows = [{"q": f"Say {word}.", "a": word, "l": True} for word in ("one", "two", "three", "four")] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own_code_model_dir(tmp_path / "mine", tmp_path / "was-run")
    tiny_model_dir(tmp_path / "plain")
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words):
    return data_main(words) if words[0] == "inspect" else main(words)


@pytest.mark.parametrize("words", NAMING.values(), ids=NAMING)
def test_dry_run_refuses_code_without_the_flag_and_runs_none(folder, capsys, monkeypatch, words):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # what transformers would ask for at a terminal
    words = words.format(out=folder / "out").split()
    assert run([*words, "--dry_run"]) == 2
    error = capsys.readouterr().err
    assert "needs Python code of its own, which comes with its files and was not run" in error
    assert "if you trust it, use --trust_remote_code" in error
    assert not (folder / "was-run").exists()


@pytest.mark.parametrize("name", ["ppo", "ppo, critic", "ppo, teacher", "rm", "dpo, reference", "kto", "kd, teacher"])
def test_dry_run_with_the_flag_checks_the_model_by_its_code(folder, capsys, name):
    words = NAMING[name].format(out=folder / "out").split()
    assert main([*words, "--dry_run", "--trust_remote_code"]) == 0, capsys.readouterr().err
    assert (folder / "was-run").exists()


def test_every_command_that_names_a_model_has_the_flag():
    names = {"pretrain", "critic_pretrain", "reward_pretrain", "ref_pretrain", "teacher_model", "tokenizer"}
    names |= {"model_path", "lora_path", "vllm_draft_model"}
    for command in COMMANDS:
        known = {option.name: option for option in options(command_line(command).config)}
        named = {name for name, option in known.items() if option.names_model}
        assert named == names & known.keys()
        assert not named or not known["trust_remote_code"].info.default
        assert "trust_remote_code" in known or not named


def test_flag_marks_the_names_of_all_models_and_nothing_else():
    others = "--reward_pretrain a/b,c/d --teacher_model e/f --critic_pretrain g/h"
    words = f"{NAMING['ppo']} {others}".format(out="out").split()[1:]
    line = command_line("ppo")
    plain = line.parse([*words, "--dry_run"]).config
    config = line.parse([*words, "--dry_run", "--trust_remote_code"]).config
    marked = {
        option.name
        for option in options(type(config))
        if isinstance(getattr(getattr(config, option.section), option.name), TrustedModel)
    }
    assert marked == {"pretrain", "reward_pretrain", "teacher_model", "critic_pretrain"}
    assert config.model.model_copy(update={"trust_remote_code": False}) == plain.model


def test_sft_trains_a_model_with_its_code_and_every_command_goes_on_with_it(folder, capsys):
    training = f"{NAMING['sft']} --max_len 64 --train_batch_size 4 --max_epochs 1 --zero_stage 0 --learning_rate 1e-3"
    training += " --save_steps 1 --trust_remote_code"
    assert main(training.format(out="run").split()) == 0
    [line] = re.findall(r"to load it: +(.*)", capsys.readouterr().out)
    assert (folder / "was-run").exists()
    saved = folder / "run/model"
    assert {path.name for path in saved.glob("*.py")} == CODE
    export = f"checkpoints run --export 2 --output_path {folder / 'exported'}"
    assert main([*export.split(), "--dry_run"]) == main(export.split()) == 2
    assert "use --trust_remote_code" in capsys.readouterr().err
    assert main([*export.split(), "--trust_remote_code"]) == 0
    assert {path.name for path in (folder / "exported").glob("*.py")} == CODE
    weights = [(path / "model.safetensors").read_bytes() for path in (saved, folder / "exported")]
    assert weights[0] == weights[1]
    generate = f"generate --pretrain exported --engine transformers {PROMPTS} --output_path answers.jsonl"
    generate += " --generate_max_len 4 --temperature 0 --max_samples 2"
    assert main(generate.split()) == 2
    assert main([*generate.split(), "--trust_remote_code"]) == 0
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 2
    from transformers import AutoModelForCausalLM

    model = eval(line, {"AutoModelForCausalLM": AutoModelForCausalLM})
    assert type(model).__name__ == "MineForCausalLM"
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=False)


def test_score_reads_a_reward_model_with_code_of_its_own(folder):
    mine = TrustedModel(folder / "mine")
    save_hf(load_critic(mine, dtype="float32"), None, load_tokenizer(mine), folder / "reward")
    words = NAMING["score"].replace("plain,mine", "reward").format(out="scores").split()
    assert main(words) == 2
    assert main([*words, "--trust_remote_code"]) == 0
    assert len((folder / "scores.jsonl").read_text().splitlines()) == 8
    line = loading_line(folder / "reward", "AutoModelForSequenceClassification.from_pretrained")
    model = eval(line, {"rlhf_models": rlhf_models, "rlhf_data": rlhf_data})
    assert type(model.model).__name__ == "MineModel"
