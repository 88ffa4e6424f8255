"""The KL as a loss needs an estimator whose gradient is not 0 on average."""

import pytest

from rlhf_cli.config.ppo import PpoConfig

# What the check wants to see beside the section under test.
INPUTS = {"model": {"pretrain": "m"}, "data": {"prompt_data": "p.jsonl"}, "reward": {"remote_rm_url": "r.py"}}


@pytest.mark.parametrize(("estimator", "is_noticed"), [("k1", True), ("k2", False), ("k3", False)])
def test_kl_loss_without_effect_is_a_notice(estimator, is_noticed):
    algorithm = {"use_kl_loss": True, "kl_estimator": estimator}
    notices = PpoConfig.model_validate({**INPUTS, "algorithm": algorithm}).check({"use_kl_loss"})
    assert any("averages to 0" in notice for notice in notices) == is_noticed
