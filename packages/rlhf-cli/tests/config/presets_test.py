"""Presets: what each stands for, and what goes over it."""

import pytest

from rlhf_cli.commands.ppo import lowest_layer
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.presets import PRESETS
from rlhf_data.errors import ConfigError
from rlhf_data.options.command_line import CommandLine, Parsed


def ppo(*argv: str) -> Parsed[PpoConfig]:
    return CommandLine(config=PpoConfig, prog="rlhf ppo", recipe=lowest_layer, presets=PRESETS).parse(argv)


# From the papers named in the files: estimator, loss, reduction, clip range, weight and place of the KL, filter.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dapo", ("group_norm", "ppo", "token_mean", (0.2, 0.28), 0.0, False, True)),
        ("grpo", ("group_norm", "ppo", "seq_mean_token_mean", (0.2, 0.2), 0.04, True, False)),
        ("dr_grpo", ("dr_grpo", "ppo", "seq_mean_token_sum_norm", (0.2, 0.2), 0.0, False, False)),
        ("gspo", ("group_norm", "gspo", "seq_mean_token_mean", (3e-4, 4e-4), 0.0, False, False)),
        ("mis_po", ("gae", "reinforce", "token_mean", (0.2, 0.2), 0.01, False, False)),
        ("cispo", ("group_norm", "cispo", "token_mean", (0.999, 0.2), 0.0, False, True)),
    ],
)
def test_preset_is_what_its_paper_says_on_the_builtin_task(name, expected):
    parsed = ppo("--preset", name)
    spec = parsed.config.algorithm.spec()
    assert (
        spec.estimator,
        spec.objective.policy_loss,
        spec.objective.reduction,
        (spec.objective.clip_low, spec.objective.clip_high),
        spec.kl_coef,
        spec.use_kl_loss,
        parsed.config.rollout.dynamic_filtering,
    ) == expected
    told = {
        "cispo": ["--policy_loss_type cispo: --clip_eps_high is 0.2"],
        "mis_po": ["--policy_loss_type reinforce does not use the policy ratio, so nothing corrects for samples of an"],
    }
    starts = [
        notice.split(";")[0][: len(text)] for notice, text in zip(parsed.notices, told.get(name, []), strict=True)
    ]
    assert starts == told.get(name, [])
    rollout = parsed.config.rollout
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt) == (32, 4)  # the recipe's


def test_preset_names_its_source():
    assert set(PRESETS) == {"cispo", "dapo", "dr_grpo", "gspo", "grpo", "mis_po"}
    assert all("arXiv:" in path.read_text(encoding="utf-8").partition("[")[0] for path in PRESETS.values())


def test_preset_dapo_penalises_the_last_fifth_of_a_response():
    assert ppo("--preset", "dapo").config.reward.overlong_buffer(20) == 4


def test_preset_mis_po_leaves_tokens_and_responses_out_and_weighs_none():
    found = ppo("--preset", "mis_po").config.algorithm.spec().correction
    assert (found.level, found.mode, found.low, found.high) == ("token", "filter", 0.5, 2.0)
    assert (found.reject, found.reject_low, found.reject_high) == ("geometric", 0.996, 1.001)


def test_preset_is_below_the_file_and_the_file_below_flags(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[algorithm]\nloss_agg_mode = "seq-mean-token-mean"\nclip_eps_high = 0.5\n')
    argv = ("--preset", "dapo", "--config", str(file), "--init_kl_coef", "0.1")
    section = ppo(*argv).config.algorithm
    assert (section.loss_agg_mode, section.init_kl_coef) == ("seq_mean_token_mean", 0.1)
    assert section.clip_range == (0.2, 0.5)  # the file's HIGH stands instead of both of the preset's
    assert ppo(*argv, "--eps_clip", "0.1").config.algorithm.clip_range == (0.1, 0.1)


def test_preset_under_a_file_that_says_otherwise_is_a_notice(tmp_path):
    file = tmp_path / "run.toml"
    # Of dapo's 7 keys: one is another value, the clip range is told in other words, and one is the same.
    file.write_text("[algorithm]\nclip_eps_high = 0.5\ninit_kl_coef = 0.1\n[rollout]\ndynamic_filtering = true\n")
    (notice,) = ppo("--preset", "dapo", "--config", str(file)).notices
    assert notice == f"--config {file} overrides 2 of the 7 keys of --preset dapo: eps_clip_low_high, init_kl_coef"


@pytest.mark.parametrize("flag", ["--preset", "--config"])
def test_parse_preset_or_file_given_twice_is_refused(flag):
    with pytest.raises(ConfigError, match=f"{flag} is given 2 times: dapo, gspo\n\nhint: give one"):
        ppo(flag, "dapo", flag, "gspo")


def test_preset_options_without_effect_give_no_notice():
    parsed = ppo("--preset", "dapo", "--overlong_buffer_len", "0")
    assert parsed.config.reward.overlong_penalty_factor == 1.0
    assert parsed.notices == ()
    assert parsed.given == frozenset()


def test_preset_unknown_name_fails_with_the_nearest():
    with pytest.raises(ConfigError) as caught:
        ppo("--preset", "dappo")
    message = "--preset: unknown value `dappo`; known: cispo, dapo, dr_grpo, grpo, gspo, mis_po"
    assert str(caught.value) == f"{message}\n\nhint: did you mean `dapo`?"
