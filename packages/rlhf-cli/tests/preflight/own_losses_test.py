"""Functions of the user's own, from the flag to the job: what is read, refused and recorded."""

import hashlib
from pathlib import Path

import pytest

from rlhf_cli.commands.ppo import COMMAND_LINE
from rlhf_cli.main import main
from rlhf_cli.preflight.inputs import check_own_losses
from rlhf_data.errors import ConfigError
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.generation.run_spec import DynamicSampling

LOSS = "import torch\n\n\ndef policy_loss(logprobs, advantages):\n    return -logprobs * advantages\n"
ADVANTAGES = "def advantages(rewards):\n    return rewards - rewards.mean()\n"
KEEP = "def keep_group(group):\n    return group.scores.std() > 0\n"
METRICS = "def step_metrics(groups, left_out):\n    return {'n': len(groups)}\n"
OF_GROUPS = "--group_filter_path keep.py --metrics_path metrics.py"
BOTH = "--policy_loss_path loss.py --advantage_path advantages.py"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("loss.py").write_text(LOSS)
    Path("advantages.py").write_text(ADVANTAGES)
    Path("keep.py").write_text(KEEP)
    Path("metrics.py").write_text(METRICS)


def test_filter_acts_alone_or_beside_the_built_in_one_and_metrics_leave_no_trace_in_what_is_learned(tmp_path):
    parsed = COMMAND_LINE.parse([*OF_GROUPS.split(), "--dynamic_filtering_max_batches", "3"])
    keep = OwnCode("keep_group", str(tmp_path / "keep.py"), KEEP)
    assert parsed.config.filtering == DynamicSampling(scores_differ=False, own_filter=keep, max_batches=3)
    assert parsed.config.own_code == [keep, OwnCode("step_metrics", str(tmp_path / "metrics.py"), METRICS)]
    assert not any("dynamic_filtering" in notice for notice in parsed.notices)
    both = COMMAND_LINE.parse([*OF_GROUPS.split(), "--dynamic_filtering"]).config.filtering
    assert both == DynamicSampling(own_filter=keep)
    single = f"{OF_GROUPS} --n_samples_per_prompt 1 --train_batch_size 32 --advantage_estimator reinforce"
    assert COMMAND_LINE.parse(single.split()).config.filtering.own_filter == keep
    Path("r").mkdir()
    Path("r/config.toml").touch()
    filters = f"{OF_GROUPS} --dynamic_filtering --n_samples_per_prompt 4"
    parsed_replay = COMMAND_LINE.parse([*filters.split(), "--replay", "r", "--dry_run"])
    for name in ("group_filter_path", "dynamic_filtering"):
        [notice] = [text for text in parsed_replay.notices if f"--{name} " in text]
        assert notice.startswith(f"--{name} has no effect: --replay trains on recorded rollouts")
    # A run goes on with other metrics, and not with another filter.
    for code in parsed.config.own_code:
        code.record(tmp_path)
    Path("metrics.py").write_text(METRICS + "# another\n")
    check_own_losses(COMMAND_LINE.parse(OF_GROUPS.split()).config.own_code, tmp_path)
    Path("keep.py").write_text(KEEP + "# another\n")
    with pytest.raises(ConfigError, match=r"keep.py .* is not the file that the run"):
        check_own_losses(COMMAND_LINE.parse(OF_GROUPS.split()).config.own_code, tmp_path)


def test_files_take_the_place_of_estimator_critic_and_policy_loss(tmp_path):
    spec = COMMAND_LINE.parse(BOTH.split()).config.objective
    assert spec.own_policy_loss == OwnCode("policy_loss", str(tmp_path / "loss.py"), LOSS)
    assert spec.own_advantages == OwnCode("advantages", str(tmp_path / "advantages.py"), ADVANTAGES)
    assert not spec.row.uses_critic and not spec.row.whiten and spec.row.baseline == "none"
    assert spec.objective.reduction == "token_mean"
    flags = [*BOTH.split(), "--loss_agg_mode", "seq_mean_token_sum", "--entropy_loss_coef", "0.1"]
    spec = COMMAND_LINE.parse(flags).config.objective
    assert (spec.objective.reduction, spec.objective.entropy_coef) == ("seq_mean_token_sum", 0.1)


@pytest.mark.parametrize(
    "flag",
    [
        *(
            "policy_loss_type gspo",
            "eps_clip 0.1",
            "eps_clip_low_high 0.1 0.3",
            "clip_eps_low 0.1",
            "clip_eps_high 0.3",
        ),
        *("dual_clip 3", "sapo_tau 2 3", "log_ratio_coef 0.1", "mask_off_policy 0.1", "clip_cov 0.1 1 5"),
        "kl_cov 0.1 1",
    ],
)
def test_options_of_built_in_losses_contradict_a_loss_of_your_own(flag):
    with pytest.raises(ConfigError, match="--policy_loss_path takes the place of what --") as caught:
        COMMAND_LINE.parse(["--policy_loss_path", "loss.py", *f"--{flag}".split()])
    assert "hint: drop one of them" in str(caught.value) and f"--{flag.split()[0]}" in str(caught.value)


@pytest.mark.parametrize(
    "flag",
    [
        *("advantage_estimator rloo", "gamma 0.9", "turn_gamma 0.5", "lambd 0.9", "bootstrap_truncated"),
        *("no_advantage_std_norm", "reward_normalize each --remote_rm_url math,format"),
    ],
)
def test_options_of_estimators_contradict_advantages_of_your_own(flag):
    with pytest.raises(ConfigError, match=f"--advantage_path takes the place of what --{flag.split()[0]}") as caught:
        COMMAND_LINE.parse(["--advantage_path", "advantages.py", *f"--{flag}".split()])
    assert "hint: drop one of them" in str(caught.value)


def test_critic_options_have_no_effect_beside_advantages_of_your_own():
    notices = COMMAND_LINE.parse([*BOTH.split(), "--value_clip", "0.1"]).notices
    assert "--value_clip has no effect: your advantage function (own) has no critic" in notices


def test_faulty_file_ends_a_dry_run_with_a_hint(capsys):
    Path("loss.py").write_text("def policy_loss(logprobs, advantages):\n    return (-logprobs * advantages).sum(1)\n")
    assert main(["ppo", "--dry_run", "--policy_loss_path", "loss.py"]) == 2
    said = capsys.readouterr().err
    assert "returned a tensor [8], and [B, T] is [8, 9]" in said and "hint: return [B, T]" in said
    absent = ["--pretrain", str(Path("nowhere").absolute())]  # what is left of the dry run checks the file, too
    assert main(["ppo", "--dry_run", "--policy_loss_path", "loss.py", *absent]) == 2
    assert "returned a tensor [8], and [B, T] is [8, 9]" in capsys.readouterr().err
    assert main(["ppo", "--dry_run", "--policy_loss_path", "nowhere.py"]) == 2
    assert "nowhere.py does not exist" in capsys.readouterr().err


def test_check_says_what_is_wrong_with_each_function_of_a_file(capsys):
    Path("two.py").write_text(f"{LOSS}\n\ndef advantages(rewards):\n    return rewards - rewards[0]\n")
    assert main(["check", "two.py"]) == 1
    out = capsys.readouterr().out
    assert "fault: advantages of " in out and "hint: find a group by `group_ids`" in out
    lines = out.splitlines()
    assert (lines[0], lines[-1]) == ("policy_loss: ok", "advantages: 1 fault(s)")
    assert main(["check", "advantages.py"]) == 0
    assert capsys.readouterr().out == "advantages: ok\n"


def test_run_has_a_copy_and_its_hash_and_goes_on_with_no_other_content(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for code in COMMAND_LINE.parse(BOTH.split()).config.objective.own_code:
        code.record(run)
    sums = [line.split() for line in (run / "own_code/SHA256SUMS").read_text().splitlines()]
    assert sums == [
        [hashlib.sha256(text.encode()).hexdigest(), f"{name}.py"]
        for name, text in (("advantages", ADVANTAGES), ("policy_loss", LOSS))
    ]
    assert (run / "own_code/policy_loss.py").read_text() == LOSS

    def check():
        check_own_losses(COMMAND_LINE.parse(BOTH.split()).config.own_code, run)

    check()
    Path("loss.py").write_text(LOSS + "# another\n")
    with pytest.raises(ConfigError, match="is not the file that the run") as caught:
        check()
    assert f"hint: copy {run / 'own_code/policy_loss.py'} to {tmp_path / 'loss.py'}, or" in str(caught.value)
