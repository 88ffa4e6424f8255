"""Options of rollouts: how responses are sampled for training."""

from collections.abc import Collection
from functools import cached_property

from rlhf_cli.config.paths import read_own_code
from rlhf_data.options.checks import without_effect
from rlhf_data.options.declare import flag, flag_of
from rlhf_rollout.commands.sections import GroupSamplingSection
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.generation.mixing import MixSpec
from rlhf_train.generation.reuse import ReuseSpec
from rlhf_train.generation.run_spec import DynamicSampling

FILTER_OPTIONS = (
    *("dynamic_filtering", "dynamic_filtering_reward_range", "dynamic_filtering_max_batches"),
    "group_filter_path",
)


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
    group_filter_path: str | None = flag(
        None,
        "FILE.py with `keep_group`, your own function of a prompt's responses and scores: train only on prompts that it"
        " keeps, and with --dynamic_filtering only on those that both keep; draw further prompts to fill the batch",
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

    @cached_property
    def own_code(self) -> dict[str, OwnCode]:
        """See `read_own_code`."""
        return read_own_code(self)

    @property
    def filters(self) -> bool:
        """Whether prompts are left out by what their responses are like."""
        return self.dynamic_filtering or self.group_filter_path is not None

    def check_filtering(self, given: Collection[str], *, has_model: bool) -> list[str]:
        """Check the options of filters; `has_model` says whether a reward model scores."""
        spec = self.filtering(by_source=False)
        if spec is not None:
            spec.check_samples(self.n_samples_per_prompt)
        notices = without_effect(
            given,
            (not self.dynamic_filtering, ["dynamic_filtering_reward_range"], "--dynamic_filtering is off"),
            (not self.filters, ["dynamic_filtering_max_batches"], "--dynamic_filtering is off"),
        )
        if not self.dynamic_filtering:
            return notices
        if not has_model or self.dynamic_filtering_reward_range is not None:
            return []
        return [
            "--dynamic_filtering leaves out prompts whose responses all have the same score, and scores of a reward"
            " model are hardly ever equal: --dynamic_filtering_reward_range LOW HIGH filters by the mean score"
        ]

    def filtering(self, *, by_source: bool) -> DynamicSampling | None:
        """Return which prompts are trained on; None for all. See `DynamicSampling`."""
        if not self.filters:
            return None
        return DynamicSampling(
            scores_differ=self.dynamic_filtering,
            reward_range=self.dynamic_filtering_reward_range,
            max_batches=self.dynamic_filtering_max_batches,
            by_source=by_source,
            own_filter=self.own_code.get("group_filter_path"),
        )
