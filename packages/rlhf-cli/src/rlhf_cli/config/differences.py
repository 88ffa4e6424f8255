"""Where a flag means something else than in OpenRLHF: sentences for those who come from there."""

from collections.abc import Collection

from rlhf_cli.config.offline import OfflineConfig
from rlhf_cli.config.ppo import PpoConfig

_DISCOUNTED = ("gae", "reinforce")  # estimators for which OpenRLHF heeds --gamma


def online_differences(config: PpoConfig, given: Collection[str]) -> list[str]:
    """Return a sentence per flag in use that means something else in OpenRLHF, with the flag that gives its meaning.

    `given` are the options that somebody set to something else than the default.
    """
    algorithm = config.algorithm
    found = _reduction(config)
    if algorithm.row.baseline == "group_mean_std":
        found += _group_deviation(config)
    if "gamma" in given and algorithm.row.name not in _DISCOUNTED:
        found.append(f"--gamma {algorithm.gamma:g} discounts rewards; OpenRLHF uses 1 for {algorithm.row.name}")
    if algorithm.is_correction_level != "off":
        found += _correction(config)
    if config.reward.reward_clip_range is not None:
        found.append(
            "--reward_clip_range bounds rewards before their baseline is taken off; OpenRLHF bounds what is left"
            " afterwards, for which there is no flag here"
        )
    if config.rollout.dynamic_filtering:
        found += _filtering(config)
    if config.data.eval_data is not None:
        found += _evaluation(config, given)
    if not config.model.bf16:
        found.append("without --bf16 everything is computed in float32; OpenRLHF's newest default is bfloat16: --bf16")
    return [f"other than in OpenRLHF: {sentence}" for sentence in found]


def offline_differences(config: OfflineConfig, given: Collection[str]) -> list[str]:
    """Return the same for a command that trains on fixed examples."""
    found = []
    if config.data.eval_dataset is not None and config.evaluation.eval_steps == -1:
        found.append(
            "--eval_steps -1 evaluates before the first and after the last update; OpenRLHF once per epoch:"
            " --eval_steps with the updates of an epoch"
        )
    if not config.model.bf16:
        found.append("without --bf16 everything is computed in float32; OpenRLHF's newest default is bfloat16: --bf16")
    return [f"other than in OpenRLHF: {sentence}" for sentence in found]


def _reduction(config: PpoConfig) -> list[str]:
    """Compare how token losses become one number: OpenRLHF has token_mean, and for KL and entropy never another."""
    algorithm = config.algorithm
    reduction = algorithm.spec().objective.reduction
    if reduction == "token_mean":
        return []
    has_more_terms = algorithm.use_kl_loss or algorithm.entropy_loss_coef > 0
    terms = "losses, KL and entropy" if has_more_terms else "losses"
    chosen = algorithm.loss_agg_mode is not None or algorithm.policy_loss_type == "gspo"
    if chosen:
        if not has_more_terms:
            return []
        return [f"{reduction} is for token {terms}; OpenRLHF takes token_mean for KL and entropy"]
    name = algorithm.row.name
    return [f"{name} reduces token {terms} by {reduction}; OpenRLHF by token_mean: --loss_agg_mode token_mean"]


def _group_deviation(config: PpoConfig) -> list[str]:
    if config.algorithm.no_advantage_std_norm:
        return ["--no_advantage_std_norm leaves a group's deviation out; in OpenRLHF it does nothing here: drop it"]
    size = config.rollout.n_samples_per_prompt
    factor = ((size - 1) / size) ** 0.5
    return [
        f"{config.algorithm.row.name} divides by the population deviation of {size} samples + 1e-6; OpenRLHF by the"
        f" sample deviation (n - 1) + 1e-9, so that its advantages are {factor:.3f} times as large; no flag"
    ]


def _correction(config: PpoConfig) -> list[str]:
    algorithm = config.algorithm
    found = []
    if algorithm.is_correction_mode == "mask":
        found.append("what --is_correction_mode mask leaves out is not counted in the mean; in OpenRLHF it is; no flag")
    else:
        found.append("weights are truncated; OpenRLHF's newest default is to mask: --is_correction_mode mask")
    if algorithm.is_correction_threshold is None:
        found.append("--is_correction_threshold has a default per mode; OpenRLHF's is 0.5 5")
    return found


def _filtering(config: PpoConfig) -> list[str]:
    rollout = config.rollout
    found = [
        f"--dynamic_filtering draws at most {rollout.dynamic_filtering_max_batches} batches per step; OpenRLHF has no"
        " limit: --dynamic_filtering_max_batches"
    ]
    if rollout.dynamic_filtering_reward_range is None:
        found.append(
            "--dynamic_filtering trains prompts whose samples differ in score; OpenRLHF those with a mean score"
            " between 0 and 1: --dynamic_filtering_reward_range 0 1"
        )
    return found


def _evaluation(config: PpoConfig, given: Collection[str]) -> list[str]:
    found = ["eval/pass@k counts right answers; in OpenRLHF it is the mean of the largest of k rewards"]
    if "eval_n_samples_per_prompt" not in given:
        found.append("--eval_n_samples_per_prompt is 1; OpenRLHF's default is 4")
    if config.evaluation.eval_steps == -1:
        found.append("--eval_steps -1 evaluates before the first and after the last step; OpenRLHF never")
    return found
