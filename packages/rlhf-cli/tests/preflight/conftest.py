"""What the tests of the checks before a `ppo` run share."""

from collections.abc import Callable

import pytest

from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.preflight.inputs import Inputs, check_inputs
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.options.command_line import CommandLine


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
