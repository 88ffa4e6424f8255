"""What is said to those who come from OpenRLHF about flags that mean something else there."""

import pytest

from rlhf_cli.commands.examples import COMMANDS as EXAMPLES
from rlhf_cli.commands.ppo import COMMAND_LINE

GIVEN = ("--pretrain", "m", "--prompt_data", "p.jsonl", "--remote_rm_url", "r.py", "--n_samples_per_prompt", "4")
START = "other than in OpenRLHF: "


def said(*argv: str, line=COMMAND_LINE, given=GIVEN) -> list[str]:
    """Return what is said of a command line beside --openrlhf, with bfloat16, which says nothing."""
    notices = line.parse([*given, "--bf16", "--openrlhf", *argv]).notices
    return [notice.removeprefix(START) for notice in notices if notice.startswith(START)]


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_baseline"])
def test_nothing_is_said_where_the_meaning_is_the_same(estimator):
    assert said("--advantage_estimator", estimator) == []


@pytest.mark.parametrize(
    ("estimator", "reduction"),
    [
        ("group_norm", "seq_mean_token_mean"),
        ("dr_grpo", "seq_mean_token_sum_norm"),
        ("rloo", "seq_mean_token_sum"),
    ],
)
def test_reduction_of_an_estimator_and_its_effect_on_kl_and_entropy(estimator, reduction):
    first = said("--advantage_estimator", estimator)[0]
    end = f"by {reduction}; OpenRLHF by token_mean: --loss_agg_mode token_mean"
    assert first == f"{estimator} averages token losses {end}"
    for terms in (["--use_kl_loss", "--kl_estimator", "k3"], ["--entropy_loss_coef", "0.1"]):
        first = said("--advantage_estimator", estimator, *terms)[0]
        assert first == f"{estimator} averages token losses, KL and entropy {end}"
    theirs = said("--advantage_estimator", estimator, "--loss_agg_mode", "token_mean", "--entropy_loss_coef", "0.1")
    assert not [sentence for sentence in theirs if "averages" in sentence]


def test_reduction_that_was_chosen_matters_for_kl_and_entropy_alone():
    chosen = ["--loss_agg_mode", "seq_mean_token_mean"]
    assert said(*chosen) == []
    (sentence,) = said(*chosen, "--entropy_loss_coef", "0.1")
    assert sentence == (
        "seq_mean_token_mean applies to token losses, KL and entropy; OpenRLHF uses token_mean for KL and entropy"
    )
    assert said("--policy_loss_type", "gspo", "--entropy_loss_coef", "0.1") == [sentence]


@pytest.mark.parametrize(("samples", "factor"), [("2", "0.707"), ("4", "0.866"), ("16", "0.968")])
def test_deviation_of_a_group(samples, factor):
    # sqrt((n - 1) / n)
    sentences = said("--advantage_estimator", "group_norm", "--n_samples_per_prompt", samples)
    assert f"population deviation of {samples} samples + 1e-6" in sentences[1]
    assert f"{factor} times as large" in sentences[1]
    without = said("--advantage_estimator", "group_norm", "--no_advantage_std_norm")
    assert without[1].endswith("in OpenRLHF it has no effect here: drop it")
    assert "deviation" not in " ".join(
        said("--advantage_estimator", "group_norm", "--n_samples_per_prompt", "1", "--dry_run")
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--advantage_estimator", "reinforce_baseline", "--gamma", "0.9"], "uses 1 for reinforce_baseline"),
        (["--vllm_is_correction_type", "tis"], "OpenRLHF's newest default is to mask: --is_correction_mode mask"),
        (["--vllm_is_correction_type", "tis"], "OpenRLHF's is 0.5 5"),
        (
            ["--vllm_is_correction_type", "icepop", "--is_correction_drop_masked"],
            "does not count masked tokens in the mean; OpenRLHF does",
        ),
        (["--aux_loss_coef", "0.01"], "OpenRLHF over those of each micro-batch"),
        (["--reward_clip_range", "5"], "OpenRLHF clips them afterwards"),
        (["--async_train"], "finishes responses first (--at_update drain)"),
        (["--async_train", "--partial_rollout"], "keeps the old ones (--keep_kv)"),
        (["--dynamic_filtering"], "--dynamic_filtering_reward_range 0 1"),
        (["--dynamic_filtering"], "--dynamic_filtering_max_batches"),
        (["--eval_data", "e.jsonl"], "--eval_n_samples_per_prompt is 1; OpenRLHF's default is 4"),
        (["--eval_data", "e.jsonl"], "the largest of k rewards"),
        (["--eval_data", "e.jsonl"], "OpenRLHF never"),
    ],
)
def test_flag_in_use_is_explained(argv, words):
    assert [sentence for sentence in said(*argv) if words in sentence] != []
    assert not [sentence for sentence in said() if words in sentence]


@pytest.mark.parametrize(
    "argv",
    [
        ["--advantage_estimator", "reinforce", "--gamma", "0.9"],
        ["--vllm_is_correction_type", "icepop", "--vllm_is_truncated_threshold", "0.5", "5"],
        ["--dynamic_filtering", "--dynamic_filtering_reward_range", "0", "1"],
        ["--eval_data", "e.jsonl", "--eval_n_samples_per_prompt", "4", "--eval_steps", "10"],
    ],
)
def test_what_was_set_to_their_meaning_is_said_no_more(argv):
    gone = ("uses 1 for", "0.5 5", "reward_range 0 1", "default is 4", "OpenRLHF never")
    assert not [sentence for sentence in said(*argv) if any(words in sentence for words in gone)]


def test_offline_commands_say_when_they_evaluate():
    given = ("--pretrain", "m", "--dataset", "d.jsonl")
    line = EXAMPLES["sft"].command_line
    assert said(line=line, given=given) == []
    (sentence,) = said("--eval_dataset", "e.jsonl", line=line, given=given)
    assert "OpenRLHF once per epoch" in sentence
    assert said("--eval_dataset", "e.jsonl", "--eval_steps", "5", line=line, given=given) == []


def test_stop_properly_lowers_negative_rewards_here():
    # OpenRLHF multiplies: a reward of -2 with the coefficient 0.5 becomes -1 there and -3 here.
    (sentence,) = said("--stop_properly_penalty_coef", "0.5")
    assert sentence == (
        "--stop_properly_penalty_coef 0.5 lowers a truncated response's reward R by 0.5 |R|; OpenRLHF multiplies R by"
        " 0.5, which raises a negative one"
    )
    (below,) = said("--stop_properly_penalty_coef", "-1")
    assert "to at most -1; OpenRLHF sets it to -1" in below
    assert said("--stop_properly_penalty_coef", "1") == []
