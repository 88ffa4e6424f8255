"""What the tests of the checks before a `ppo` run share."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.preflight.inputs import Inputs, check_inputs
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.options.command_line import CommandLine


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder with the models `policy`, `judge` and `second`; the latter two give scores."""
    from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir

    folder = tmp_path_factory.mktemp("models")
    tiny_model_dir(folder / "policy")
    tiny_reward_model_dir(folder / "judge")
    tiny_reward_model_dir(folder / "second", seed=2, mean=0.5, std=0.0)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The user's folder, with three files of two prompts each, and a reward function."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    for name in ("prompts", "math", "code"):
        rows = [{"input": f"{name} {n}?", "set": f"{name} {n}"} for n in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = "def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0] * len(queries)}\n"
    (tmp_path / "reward.py").write_text(reward)
    return tmp_path


@pytest.fixture
def check(folder, models) -> Callable[..., Inputs]:
    """Checks the inputs of a run of `policy` on `prompts.jsonl` with `reward.py`, and with the flags that it gets."""

    def check(*argv: str) -> Inputs:
        flags = ["--pretrain", str(models / "policy"), "--prompt_data", "prompts.jsonl", "--remote_rm_url", "reward.py"]
        flags += ["--prompt_max_len", "32", "--generate_max_len", "8", "--rollout_batch_size", "2"]
        flags += ["--train_batch_size", "2", *argv]
        return check_inputs(CommandLine(config=PpoConfig, prog="").parse(flags).config, folder / "out")

    return check


@pytest.fixture
def refused(check) -> Callable[..., str]:
    """Like `check`, for flags that are refused; returns the error's text."""

    def refused(*argv: str) -> str:
        with pytest.raises((ConfigError, DataError)) as caught:
            check(*argv)
        return str(caught.value)

    return refused
