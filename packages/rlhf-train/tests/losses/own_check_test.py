"""What the check of a user's own loss and advantages finds: planted faults, and none in code that is right."""

import pytest
import torch

from rlhf_data.errors import ConfigError
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.losses.own_check import check_own_code

HEAD = """
import math, torch
from torch import nn
scale = nn.Parameter(torch.ones(()))
calls = []

def clean(x, loss_mask): return x.masked_fill(~loss_mask, 0.0)
"""
LOSS = "def policy_loss(logprobs, old_logprobs, advantages, loss_mask):\n    "
CLEAN = "d = clean(logprobs - old_logprobs, loss_mask); r = d.exp()"
ADVANTAGES = "def advantages(rewards, group_ids, loss_mask, rollout_logprobs):\n    "


def found(tmp_path, text):
    """Return the messages and hints of what is found in a file with this text."""
    path = tmp_path / "mine.py"
    path.write_text(HEAD + text)
    function = "policy_loss" if "def policy_loss" in text else "advantages"
    return [str(error) for error in check_own_code(OwnCode.read(function, path))]


@pytest.mark.parametrize(
    ("body", "problem", "hint"),
    [
        ("return logprobs.nope", "failed: AttributeError", "mend it there"),
        (f"{CLEAN}; return (-r * advantages).sum()", "returned a tensor [], and [B, T] is [8, 9]", "without a sum"),
        (f"{CLEAN}; return -r.double() * advantages", "returned torch.float64", ".float()"),
        (f"{CLEAN}; return [r]", "returned list, not a tensor", "return a tensor [B, T]"),
        (f"{CLEAN}; return -(r / advantages)", "gives NaN or infinity", "add 1e-6"),
        (f"{CLEAN}; return -r.detach() * advantages", "has no gradient to `logprobs`", "without detach()"),
        (f"{CLEAN}; return (-r * advantages).tolist() and -advantages", "has no gradient to `logprobs`", "detach()"),
        (f"{CLEAN}; return (r - 1).pow(2).sqrt() * advantages", "has a gradient that is NaN", "branch that is not"),
        (f"{CLEAN}; return -r * advantages * scale", "has a gradient to other tensors", "use constants"),
        (f"{CLEAN}; return -r * advantages + r.mean(1, keepdim=True)", "depends on the padding, T", "by counts of"),
        (
            "s = (logprobs - old_logprobs).sum(1, keepdim=True).exp(); return -s * advantages",
            "depends on values where `loss_mask` is False",
            "leave these places out",
        ),
        (
            "s = ((logprobs - old_logprobs) * loss_mask).sum(1, keepdim=True).exp(); return -s * advantages",
            "lets NaN where `loss_mask` is False reach trained tokens",
            "masked_fill",
        ),
        (
            f"{CLEAN}; a = clean(advantages, loss_mask); return -r * (a - a.sum() / loss_mask.sum())",
            "depends on how the batch is split",
            "from its own row",
        ),
        (
            # The value is that of each row alone; the gradient is not.
            f"{CLEAN}; m = d.sum() / loss_mask.sum(); return -r * advantages + m - m.detach()",
            "depends on how the batch is split",
            "from its own row",
        ),
        (f"{CLEAN}; advantages *= 2; return -r * advantages", "changes `advantages` in place", "instead of x += 1"),
        ("logprobs.sub_(old_logprobs); return -logprobs * advantages", "changes `logprobs` in place", "make a new"),
        (f"{CLEAN}; return -r * advantages * torch.rand(())", "gives another result", "no random numbers"),
        (f"{CLEAN}; calls.append(1); return -r * advantages * len(calls)", "gives another result", "keep nothing"),
    ],
)
def test_planted_faults_of_a_policy_loss_are_found_each_with_a_hint(tmp_path, body, problem, hint):
    messages = found(tmp_path, LOSS + body)
    assert any(problem in text and hint in text.partition("\n\nhint: ")[2] for text in messages), messages
    assert all("\n\nhint: " in text and str(tmp_path / "mine.py") in text for text in messages)


@pytest.mark.parametrize(
    ("body", "problem", "hint"),
    [
        ("return rewards[:3]", "returned a tensor [3]", "return [B, T] or [B]"),
        ("return rewards, {'a': rewards}", "returned metrics", "return the tensor alone"),
        ("return (rewards - rewards.mean()) / rewards[group_ids == 1].std()", "gives NaN or infinity", "deviation 0"),
        ("x = rewards / loss_mask.sum(1); return x - x.mean()", "gives NaN or infinity", "0 trained tokens"),
        ("return rewards * scale", "returns a tensor with a gradient", "no parameters"),
        ("rewards -= rewards.mean(); return rewards", "changes `rewards` in place", "make a new tensor"),
        ("return rewards - rewards[0]", "depends on the order of the rollouts", "by `group_ids`"),
        ("return rewards * group_ids", "depends on the numbers of the groups", "share a prompt"),
        ("return rewards / loss_mask.shape[1]", "depends on the padding, T", "counts of `loss_mask`"),
        ("return rewards - rollout_logprobs.sum(1)", "depends on values where `loss_mask`", "leave these places out"),
        ("return rewards + (rollout_logprobs * loss_mask).sum(1)", "lets NaN where", "masked_fill"),
        ("return rewards + torch.rand(())", "gives another result", "random"),
    ],
)
def test_planted_faults_of_advantages_are_found_each_with_a_hint(tmp_path, body, problem, hint):
    messages = found(tmp_path, ADVANTAGES + body)
    assert any(problem in text and hint in text.partition("\n\nhint: ")[2] for text in messages), messages


@pytest.mark.parametrize(
    "text",
    [
        LOSS + f"{CLEAN}; return -torch.minimum(r * advantages, r.clamp(0.8, 1.2) * advantages)",
        # GSPO: the ratio of a whole response
        LOSS + f"{CLEAN}; s = (d.sum(1) / loss_mask.sum(1)).exp(); return -s[:, None] * clean(advantages, loss_mask)",
        "def policy_loss(logprobs, advantages, **_): return -logprobs * advantages",
        # whitened over the batch, with an advantage for each token
        ADVANTAGES + "w = (rewards - rewards.mean()) / rewards.std(); return w[:, None] * loss_mask",
        "def advantages(rewards, truncated): return rewards * ~truncated",
        "def advantages(token_rewards, loss_mask):\n"
        "    return clean(token_rewards, loss_mask).flip(1).cumsum(1).flip(1)",
    ],
)
def test_right_code_has_no_findings(tmp_path, text):
    assert found(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("def loss(): pass", "has no function `policy_loss`", "write def policy_loss(logprobs, old_logprobs"),
        ("def policy_loss(:", "is not Python", "shows the place"),
        (None, "mine.py", ""),
    ],
)
def test_file_that_cannot_be_used_is_an_error(tmp_path, text, problem, hint):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        OwnCode.read("policy_loss", path)
    assert hint in str(caught.value)


def test_file_with_a_mark_before_utf8_is_read_and_one_in_another_encoding_is_an_error(tmp_path):
    path = tmp_path / "mine.py"
    text = "def policy_loss(logprobs, advantages): return -logprobs * advantages  # gr\xfcn\n"
    path.write_bytes(text.encode("utf-8-sig"))
    assert check_own_code(OwnCode.read("policy_loss", path)) == []
    path.write_bytes(f"# coding: latin-1\n{text}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"mine\.py is not UTF-8") as caught:
        OwnCode.read("policy_loss", path)
    assert "save it in UTF-8" in str(caught.value)


def test_file_that_ends_the_process_is_a_finding(tmp_path):
    [text] = found(tmp_path, "raise SystemExit(3)\ndef policy_loss(logprobs): return -logprobs\n")
    assert "failed: SystemExit: 3" in text


def test_change_of_log_probs_in_place_is_one_finding(tmp_path):
    [text] = found(tmp_path, LOSS + "logprobs.sub_(old_logprobs); return -logprobs * advantages")
    assert "changes `logprobs` in place" in text


def test_lack_of_memory_is_no_fault_of_the_function():
    source = "import torch\ndef policy_loss(logprobs): raise torch.OutOfMemoryError('2 GiB')"
    logprobs = torch.zeros(1, 1)
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        OwnCode("policy_loss", "/nowhere/loss.py", source).call({"logprobs": logprobs, "loss_mask": logprobs == 0})


def test_parameter_that_is_no_tensor_of_the_contract_is_an_error(tmp_path):
    [text] = found(tmp_path, "def policy_loss(logprobs, rewards): return logprobs")
    assert "takes `rewards`, which it is not given" in text and "rollout_logprobs" in text


def test_metrics_of_a_loss_need_the_shape_of_tokens(tmp_path):
    [text] = found(tmp_path, LOSS + f"{CLEAN}; return -r * advantages, {{'mean': torch.ones(())}}")
    assert "returned a metric `mean` that is no tensor [8, 9]" in text
