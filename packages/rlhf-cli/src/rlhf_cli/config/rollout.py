"""Options of rollouts: how responses are sampled for training."""

from rlhf_data.options.declare import flag, flag_of
from rlhf_rollout.commands.sections import GroupSamplingSection
from rlhf_train.generation.mixing import MixSpec
from rlhf_train.generation.reuse import ReuseSpec


class RolloutSection(GroupSamplingSection):
    """How responses are sampled for training, and which of them are trained on."""

    rollout_batch_size: int = flag(1024, "prompts per step", ge=1)
    micro_rollout_batch_size: int = flag(
        8, "responses per forward pass without gradient, on one training process", ge=1
    )
    dynamic_filtering: bool = flag(
        False, "train only on prompts whose responses differ in score, and draw further prompts to fill the batch"
    )
    dynamic_filtering_reward_range: tuple[float, float] | None = flag(
        None, "LOW HIGH: also require a prompt's mean score to lie between these; None: no bounds"
    )
    dynamic_filtering_max_batches: int = flag(
        10, "largest number of prompts drawn per step, as a multiple of --rollout_batch_size", ge=1
    )
    difficulty_pool: bool = flag(
        False,
        "a curriculum: draw prompts by the share of their responses that were right (--success_threshold), those near"
        " --target_pass_rate and unseen ones the most",
    )
    target_pass_rate: float = flag(0.5, "pass rate of the prompts that are drawn the most", ge=0, le=1)
    pool_uniform_share: float = flag(
        0.2, "share of the draws in which all prompts that are not retired are equally likely", ge=0, le=1
    )
    pool_retire_visits: int = flag(
        2,
        "retire a prompt that all responses solve in so many visits in a row, until as many prompts were drawn as there"
        " are, or all are retired",
        ge=1,
    )
    adaptive_mix: bool = flag(
        False,
        "let the shares of the sources of --prompt_data follow how much there is to learn from each: by its pass rates"
        " (--success_threshold) and the upper confidence bounds of DUMP",
    )
    mix_temperature: float = flag_of(
        MixSpec.mix_temperature, "a high one makes the shares of the sources equal, a low one follows the bounds alone"
    )
    mix_window: int = flag_of(MixSpec.mix_window, "newest prompts of a source that say what can be learned from it")
    reuse_solved: int | None = flag(
        None,
        "keep up to so many right answers to prompts that are hardly ever solved: when a later visit of a prompt finds"
        " none, the kept answer is trained in the place of a wrong one (AR3PO); None: off",
        ge=1,
    )
    reuse_max_age: int = flag_of(ReuseSpec.reuse_max_age, "steps after which a kept answer is given up")
    reuse_pass_rate: float = flag_of(
        ReuseSpec.reuse_pass_rate, "keep answers to prompts of which at most this share of the responses was right"
    )

    replay: str | None = flag(
        None,
        "folder of a run: train on the rollouts and rewards that it recorded, with its options, which further flags"
        " override; no engine and no reward is started, and nothing is evaluated",
        instead_of=("save_path", "ckpt_path", "load_checkpoint", "eval_data", "best_metric_key"),
    )
