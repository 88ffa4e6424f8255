"""Trackers from the command line; a key that is typed there is seen nowhere afterwards."""

import os
import subprocess
import sys

import pytest

from rlhf_cli.commands.examples import COMMANDS
from rlhf_cli.config.offline import SftConfig
from rlhf_cli.config.output import OutputSection
from rlhf_cli.config.paths import with_full_paths
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.console.secrets import restart_without_key
from rlhf_data.errors import ConfigError
from rlhf_data.options.command_line import CommandLine, to_toml
from rlhf_train.run.trackers.spec import TrackerSpec

KEY = "0123456789abcdef0123456789abcdef01234567"
GIVEN = ("--pretrain", "m", "--dataset", "d.jsonl")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "")  # so that what a test sets is taken back


def sft(*argv):
    return CommandLine(config=SftConfig, prog="rlhf sft").parse((*GIVEN, *argv))


@pytest.mark.parametrize(
    ("words", "is_on", "key"),
    [
        ([], False, ""),
        (["--use_wandb"], True, ""),
        (["--use_wandb", "true"], True, ""),
        (["--use_wandb", "false"], False, ""),
        (["--use_wandb", "None"], False, ""),
        (["--use_wandb", KEY], True, KEY),
        ([f"--use_wandb={KEY}"], True, KEY),
    ],
)
def test_use_wandb_is_on_or_off_and_a_key_goes_to_the_environment_only(words, is_on, key):
    parsed = sft(*words)
    assert parsed.config.output.use_wandb is is_on
    assert os.environ["WANDB_API_KEY"] == key
    assert KEY not in repr(parsed)
    assert KEY not in to_toml(parsed.config)
    assert KEY not in repr(parsed.config.output.trackers("sft", "run"))


def test_a_key_in_a_file_is_not_written_to_the_next_one(tmp_path):
    (tmp_path / "c.toml").write_text(f'[output]\nuse_wandb = "{KEY}"\n')
    parsed = sft("--config", str(tmp_path / "c.toml"))
    assert os.environ["WANDB_API_KEY"] == KEY
    (tmp_path / "again.toml").write_text(to_toml(parsed.config))
    assert KEY not in (tmp_path / "again.toml").read_text()
    assert sft("--config", str(tmp_path / "again.toml")).config.output.use_wandb is True


def test_trackers_are_as_asked(monkeypatch, tmp_path):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    argv = "--use_wandb --wandb_org o --wandb_group g --wandb_project p --wandb_run_name n --logging_steps 4"
    config = sft(*argv.split(), "--use_tensorboard", "events", "--use_mlflow", "runs").config
    assert with_full_paths(config).output.trackers("sft", "folder") == TrackerSpec(
        project="rlhf-sft",
        run_name="n",
        logging_steps=4,
        use_tensorboard=str(tmp_path / "events"),
        use_wandb=True,
        wandb_org="o",
        wandb_group="g",
        wandb_project="p",
        use_mlflow=str(tmp_path / "runs"),
    )
    plain = sft("--use_mlflow", "sqlite:///x.db").config
    spec = with_full_paths(plain).output.trackers("sft", "folder")
    assert spec == TrackerSpec(project="rlhf-sft", run_name="folder", use_mlflow="sqlite:///x.db")


@pytest.mark.parametrize("config", [PpoConfig, *(command.config for command in COMMANDS.values())])
def test_every_training_command_has_the_trackers(config):
    assert issubclass(config.model_fields["output"].annotation, OutputSection)


def test_options_of_a_tracker_that_is_off_are_said_to_have_no_effect():
    assert "--wandb_org has no effect: --use_wandb is off" in sft("--wandb_org", "o").notices
    assert not sft("--wandb_org", "o", "--use_wandb").notices


def test_a_password_in_the_address_is_refused():
    with pytest.raises(ConfigError, match="has a password") as caught:
        sft("--use_mlflow", "https://me:secret@host")
    assert "MLFLOW_TRACKING_PASSWORD" in str(caught.value)
    assert "secret" not in str(caught.value)


SCRIPT = """
import sys
from pathlib import Path
from rlhf_cli.console.secrets import restart_without_key
from rlhf_cli.config.output import OutputSection
print("start", flush=True)
OutputSection(use_wandb=sys.argv[2])
restart_without_key()
import os
print(Path("/proc/self/cmdline").read_text().replace(chr(0), " "))
print(os.environ["WANDB_API_KEY"])
"""


@pytest.mark.parametrize(("word", "starts"), [(KEY, 2), ("true", 1)])
def test_a_process_with_the_key_on_its_command_line_starts_again_without(word, starts, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"WANDB_API_KEY": "from-the-environment", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-u", str(script), "--use_wandb", word, "--also"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    *started, shown, key = done.stdout.splitlines()
    assert started == ["start"] * starts
    assert shown.split()[-5:] == ["-u", str(script), "--use_wandb", "true", "--also"]
    assert key == (KEY if word == KEY else "from-the-environment")


def test_secrets_of_urls_are_not_in_the_words_that_trackers_store(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(sys, "argv", ["rlhf", "--remote_rm_url", "http://h/x?key=s3cret", "--seed", "1"])
    restart_without_key()
    assert sys.argv == ["rlhf", "--remote_rm_url", "http://h/x?***", "--seed", "1"]
