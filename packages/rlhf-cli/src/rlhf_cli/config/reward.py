"""Who scores, and what becomes of the scores."""

from collections.abc import Collection

from rlhf_data.checks import check_range, without_effect
from rlhf_data.errors import ConfigError
from rlhf_data.options import SymmetricRange, flag
from rlhf_rollout.commands import sections

_MODEL_OPTIONS = ("reward_num_nodes", "reward_num_gpus_per_node", "colocate_critic_reward")


class RewardSection(sections.RewardSection):
    """Sources, and what becomes of their rewards before an algorithm sees them."""

    running_reward_norm: bool = flag(
        False, "shift and scale rewards by the mean and the deviation of all rewards so far in the run"
    )
    reward_clip_range: SymmetricRange | None = flag(
        None,
        "LOW HIGH, or X for -X X: bounds of a reward, after --running_reward_norm and before length penalties; None: no"
        " bounds",
    )
    overlong_buffer_len: float = flag(
        0.0,
        "tokens before --generate_max_len over which a penalty grows; below 1: a share of that length; 0: no penalty",
        ge=0,
    )
    overlong_penalty_factor: float = flag(1.0, "the penalty of --overlong_buffer_len at --generate_max_len", gt=0)
    stop_properly_penalty_coef: float | None = flag(
        None,
        "share of its reward that a response keeps when --generate_max_len cut it; below 0: the highest reward that"
        " such a response gets; None: it keeps all",
        le=1,
    )

    def overlong_buffer(self, max_tokens: int) -> int:
        """Return the tokens over which the penalty grows, for responses of at most `max_tokens`."""
        share = max_tokens if self.overlong_buffer_len < 1 else 1
        return round(self.overlong_buffer_len * share)

    def check_training(self, given: Collection[str], max_tokens: int) -> list[str]:
        """Check the rewards of a training run; return notices.

        Args:
            given: options that somebody set to something else than the default.
            max_tokens: tokens per response at most.

        Raises:
            ConfigError: for sources, ranges and lengths that cannot work.
        """
        sources = self.sources()
        check_range("reward_clip_range", self.reward_clip_range)
        buffer = self.overlong_buffer(max_tokens)
        if self.overlong_buffer_len > 0 and not 1 <= buffer <= max_tokens:
            message = f"--overlong_buffer_len {self.overlong_buffer_len:g} is {buffer} of the {max_tokens} tokens of"
            hint = f"give 1 to {max_tokens} tokens, or a share below 1 that is a token at least"
            raise ConfigError(f"{message} --generate_max_len", hint=hint)
        keeps_all = self.stop_properly_penalty_coef == 1
        kinds = {source.kind for source in sources}
        notices = self.check(given) + without_effect(
            given,
            ("model" not in kinds, _MODEL_OPTIONS, "there is no --reward_pretrain"),
            (self.overlong_buffer_len == 0, ["overlong_penalty_factor"], "there is no --overlong_buffer_len"),
            (keeps_all, ["stop_properly_penalty_coef"], "at 1 a response keeps all of its reward"),
        )
        if len(sources) > 1 or kinds == {"model"}:
            which = f"the first of {len(sources)} rewards" if len(sources) > 1 else "the reward model"
            notices.append(f"accuracy and pass@k follow {which}, {sources[0].name}: a score above 0 counts as right")
        return notices
