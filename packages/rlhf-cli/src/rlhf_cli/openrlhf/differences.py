"""Notices about flags that have another meaning in OpenRLHF, for users who come from there."""

from collections.abc import Collection

from rlhf_cli.config.offline import OfflineConfig
from rlhf_cli.config.ppo import PpoConfig

_DISCOUNTED = ("gae", "reinforce")  # the estimators for which OpenRLHF uses --gamma


def online_differences(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Return one notice per flag in use that has another meaning in OpenRLHF, with the flag that gives that meaning.

    Args:
        config: the configuration of `ppo`.
        given: names of the options that the user set to a value other than the default.
    """
    algorithm = config.algorithm
    found = _reduction(config)
    if algorithm.row.baseline == "group_mean_std":
        found += _group_deviation(config)
    if "gamma" in given and algorithm.row.name not in _DISCOUNTED:
        found.append(f"--gamma {algorithm.gamma:g} discounts rewards; OpenRLHF uses 1 for {algorithm.row.name}")
    if config.objective.correction.level != "off":
        found += _correction(config)
    if config.reward.reward_clip_range is not None:
        found.append(
            "--reward_clip_range clips rewards before the baseline is subtracted; OpenRLHF clips them afterwards, for"
            " which there is no flag here"
        )
    coef = config.reward.stop_properly_penalty_coef
    if coef is not None and coef != 1:
        found.append(_stop_properly(coef))
    if config.rollout.dynamic_filtering:
        found += _filtering(config)
    if config.asynchrony.async_train and config.asynchrony.at_update == "keep" and not config.asynchrony.keep_kv:
        found.append(
            "--at_update keep continues responses after new weights and computes their keys and values again; OpenRLHF"
            " finishes responses first (--at_update drain), and with --partial_rollout keeps the old ones (--keep_kv)"
        )
    if config.data.eval_data is not None:
        found += _evaluation(config, given)
    return _sentences(found, config)


def offline_differences(config: OfflineConfig, given: Collection[str]) -> list[str]:
    """Return the same notices for a command that trains on fixed examples."""
    found = []
    if config.data.eval_dataset is not None and config.evaluation.eval_steps == -1:
        found.append(
            "--eval_steps -1 evaluates before the first and after the last update; OpenRLHF once per epoch: set"
            " --eval_steps to the number of updates of an epoch"
        )
    return _sentences(found, config)


def _sentences(found: list[str], config: OfflineConfig | PpoConfig) -> list[str]:
    if config.model.aux_loss_coef:
        found.append(
            "--aux_loss_coef balances experts over all tokens of an update; OpenRLHF over those of each micro-batch,"
            " for which there is no flag here"
        )
    if not config.model.bf16:
        found.append("without --bf16 everything is computed in float32; OpenRLHF's newest default is bfloat16: --bf16")
    return [f"other than in OpenRLHF: {sentence}" for sentence in found]


def _reduction(config: PpoConfig) -> list[str]:
    """Compare how the losses of tokens are averaged. OpenRLHF's default is token_mean; for KL and entropy it has no
    other."""
    algorithm = config.algorithm
    spec = algorithm.spec()
    reduction = spec.objective.reduction
    if reduction == "token_mean":
        return []
    has_more_terms = algorithm.use_kl_loss or algorithm.entropy_loss_coef > 0
    terms = "losses, KL and entropy" if has_more_terms else "losses"
    if algorithm.loss_agg_mode is not None or spec.loss.reduction is not None:
        text = f"{reduction} applies to token {terms}; OpenRLHF uses token_mean for KL and entropy"
        return [text] if has_more_terms else []
    name = algorithm.row.name
    return [f"{name} averages token {terms} by {reduction}; OpenRLHF by token_mean: --loss_agg_mode token_mean"]


def _group_deviation(config: PpoConfig) -> list[str]:
    """Compare how the deviation of a group's rewards is computed."""
    if config.algorithm.no_advantage_std_norm:
        text = "--no_advantage_std_norm turns off division by the group's deviation; in OpenRLHF it has no effect here"
        return [f"{text}: drop it"]
    size = config.rollout.n_samples_per_prompt
    if size < 2:
        return []  # a group of one has no deviation, and the run is refused
    factor = ((size - 1) / size) ** 0.5
    return [
        f"{config.algorithm.row.name} divides by the population deviation of {size} samples + 1e-6; OpenRLHF by the"
        f" sample deviation (n - 1) + 1e-9, so its advantages are {factor:.3f} times as large, for which there is no"
        " flag here"
    ]


def _correction(config: PpoConfig) -> list[str]:
    """Compare the off-policy correction."""
    algorithm = config.algorithm
    found = []
    if algorithm.is_correction_drop_masked:
        found.append("--is_correction_drop_masked does not count masked tokens in the mean; OpenRLHF does: drop it")
    if algorithm.is_correction_mode != "mask":
        found.append("weights are truncated; OpenRLHF's newest default is to mask: --is_correction_mode mask")
    if algorithm.is_correction_threshold is None:
        found.append("--is_correction_threshold has a default per mode; OpenRLHF's is 0.5 5")
    return found


def _stop_properly(coef: float) -> str:
    """Compare what a response loses that the length limit ended."""
    if coef < 0:
        return (
            f"--stop_properly_penalty_coef {coef:g} lowers a truncated response's reward to at most {coef:g}; OpenRLHF"
            f" sets it to {coef:g}, also where the reward was lower"
        )
    return (
        f"--stop_properly_penalty_coef {coef:g} lowers a truncated response's reward R by {1 - coef:g} |R|; OpenRLHF"
        f" multiplies R by {coef:g}, which raises a negative one"
    )


def _filtering(config: PpoConfig) -> list[str]:
    """Compare dynamic filtering."""
    rollout = config.rollout
    found = [
        f"--dynamic_filtering draws at most {rollout.dynamic_filtering_max_batches} batches per step; OpenRLHF has no"
        " limit: --dynamic_filtering_max_batches"
    ]
    if rollout.dynamic_filtering_reward_range is None:
        found.append(
            "--dynamic_filtering trains on prompts whose samples differ in score; OpenRLHF on prompts with a mean score"
            " between 0 and 1: --dynamic_filtering_reward_range 0 1"
        )
    return found


def _evaluation(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Compare evaluation."""
    found = ["eval/pass@k counts right answers; in OpenRLHF it is the mean of the largest of k rewards"]
    if "eval_n_samples_per_prompt" not in given:
        found.append("--eval_n_samples_per_prompt is 1; OpenRLHF's default is 4")
    if config.evaluation.eval_steps == -1:
        found.append("--eval_steps -1 evaluates before the first and after the last step; OpenRLHF never")
    return found
