"""Options of rewards: who scores, and how scores become the rewards that an algorithm uses."""

from collections.abc import Collection

from rlhf_cli.config.rollout import RolloutSection
from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import without_effect
from rlhf_data.options.declare import SymmetricRange, flag, matching, one_of
from rlhf_rollout.commands import reward_section
from rlhf_train.generation.run_spec import RewardSpec

Normalization = one_of(("together", "each", "none"))
Sharding = one_of(("auto", "on", "off"))

_MODEL_OPTIONS = (
    *("step_separator", "reward_by_turn", "reward_num_nodes", "reward_num_gpus_per_node"),
    *("reward_sharding", "colocate_critic_reward"),
)


class RewardSection(reward_section.RewardSection):
    """Adds how rewards are normalized, clipped and shaped before an algorithm uses them."""

    step_separator: str = flag(
        r"\n",
        "text that ends a step of a response, for models of --reward_pretrain that `rlhf prm` trained; \\n is a"
        " newline; an empty text makes a response one step",
    )
    reward_by_turn: bool = flag(
        False, "models of --reward_pretrain score after each turn of an agent, not only after the last one"
    )
    reward_sharding: Sharding = flag(
        "auto",
        "whether the processes of a reward model divide its weights, and score together. on; off: each has all weights,"
        " and scores by itself; auto: with --zero_stage 3, for models of more than 20 GiB. Models that judge steps are"
        " never divided",
    )
    running_reward_norm: bool = flag(
        False, "normalize rewards by the mean and standard deviation of all rewards of the run so far"
    )
    reward_clip_range: SymmetricRange | None = flag(
        None,
        "LOW HIGH, or X for -X X: clip rewards to this range, after --running_reward_norm and before length penalties;"
        " None: no clipping",
    )
    reward_normalize: Normalization = flag(
        "together",
        "what is compared within a group. together: the weighted sum of the rewards, as the estimator says; each: every"
        " reward by itself, divided by its deviation, before they are weighed (GDPO); none: the estimator gets the sum",
    )
    overlong_buffer_len: float = flag(
        0.0,
        "a length penalty grows over this many tokens before --generate_max_len; below 1: a share of that length; 0: no"
        " penalty",
        ge=0,
    )
    overlong_penalty_factor: float = flag(1.0, "the length penalty at --generate_max_len, the largest one", gt=0)
    stop_properly_penalty_coef: float | None = flag(
        None,
        "share of the reward that a response keeps if --generate_max_len cut it; below 0: the largest reward of such a"
        " response; None: it keeps all of its reward",
        le=1,
    )

    @property
    def step_end(self) -> str:
        """The text that ends a step, with newlines in place of `\\n`."""
        return self.step_separator.replace(r"\n", "\n")

    def overlong_buffer(self, max_tokens: int) -> int:
        """Return the number of tokens over which the length penalty grows, for responses of at most `max_tokens`."""
        share = max_tokens if self.overlong_buffer_len < 1 else 1
        return round(self.overlong_buffer_len * share)

    def spec(self, rollout: RolloutSection) -> RewardSpec:
        """Return the rewards of `rollout`. Raises ConfigError for ranges and changes that contradict each other."""
        own = {
            "sources": self.sources(),
            "calls": self.calls(rollout.rollout_batch_size, rollout.n_samples_per_prompt),
            "step_separator": self.step_end,
            "overlong_buffer": self.overlong_buffer(rollout.generate_max_len),
        }
        return RewardSpec(**matching(RewardSpec, self) | own)

    def check_training(self, given: Collection[str], rollout: RolloutSection) -> list[str]:
        """Check the rewards of a training run; return notices.

        Args:
            given: names of the options that the user set to a value other than the default.
            rollout: what is scored.

        Raises:
            ConfigError: for sources, ranges and lengths that cannot work.
        """
        max_tokens = rollout.generate_max_len
        spec = self.spec(rollout)
        spec.check_samples(rollout.n_samples_per_prompt)
        if self.overlong_buffer_len > 0 and not 1 <= spec.overlong_buffer <= max_tokens:
            message = (
                f"--overlong_buffer_len {self.overlong_buffer_len:g} is {spec.overlong_buffer} of the {max_tokens}"
            )
            hint = f"give 1 to {max_tokens} tokens, or a share below 1 that comes to at least one token"
            raise ConfigError(f"{message} tokens of --generate_max_len", hint=hint)
        keeps_all = self.stop_properly_penalty_coef == 1
        kinds = {source.kind for source in spec.sources}
        notices = self.check(given, rollout.n_samples_per_prompt) + without_effect(
            given,
            ("model" not in kinds, _MODEL_OPTIONS, "there is no --reward_pretrain"),
            (self.overlong_buffer_len == 0, ["overlong_penalty_factor"], "there is no --overlong_buffer_len"),
            (keeps_all, ["stop_properly_penalty_coef"], "at 1 a response keeps all of its reward"),
        )
        notices += self.what_is_right("accuracy and pass@k")
        if "pairwise" in kinds:
            notices.append(
                "the mean reward of a pairwise judge is always 0.5: it compares responses of the same policy"
            )
        return notices
