"""Who scores, and what becomes of the scores."""

from rlhf_cli.config.base import Section, SymmetricRange, flag
from rlhf_rollout.rewards.sources import RewardSource, parse_sources, parse_weights


class RewardSection(Section, title="reward"):
    """Sources, and what becomes of their rewards before an algorithm sees them."""

    remote_rm_url: str | None = flag(
        None,
        "what scores, with commas: Python FILE.py with `reward_func(queries, prompts, labels)`,"
        " module:function, or http(s):// URLs of a reward server, which take turns; accuracy and pass@k follow the"
        " first source: its score above 0 is right",
    )
    reward_pretrain: str | None = flag(
        None, "reward models, with commas: Hugging Face model folders or hub names with a scalar head"
    )
    reward_weights: str | None = flag(
        None,
        "a number for each source, with commas, --remote_rm_url's first, all URLs counted as one; None: 1."
        " One that begins with - needs a =, as in --reward_weights=-1,1",
    )
    reward_timeout_s: float = flag(30.0, "seconds for one call of a reward function or server", gt=0)
    reward_num_workers: int = flag(1, "processes that score side by side, of each function", ge=1)
    reward_batch_size: int = flag(64, "responses a call of a reward server or model", ge=1)
    normalize_reward: bool = flag(False, "shift and scale rewards by the mean and the deviation of all so far")
    reward_clip_range: SymmetricRange | None = flag(
        None,
        "LOW HIGH, or X for -X X: bounds of a reward, after --normalize_reward and before length counts; None: none",
    )
    overlong_buffer_len: float = flag(
        0.0, "tokens before --generate_max_len over which a penalty grows; below 1: a share of it; 0: none", ge=0
    )
    overlong_penalty_factor: float = flag(1.0, "that penalty at --generate_max_len", gt=0)
    stop_properly_penalty_coef: float | None = flag(
        None,
        "share of its reward that a response keeps which --generate_max_len ended; below 0: its reward at"
        " most; None: all",
        le=1,
    )

    def sources(self) -> tuple[RewardSource, ...]:
        """Return who scores, as they were named. Raises ConfigError for weights that are not one number for each."""
        return parse_sources(self.remote_rm_url or "", self.reward_pretrain or "", parse_weights(self.reward_weights))

    def overlong_buffer(self, max_tokens: int) -> int:
        """Return the tokens over which the penalty grows, for responses of at most `max_tokens`."""
        share = max_tokens if self.overlong_buffer_len < 1 else 1
        return round(self.overlong_buffer_len * share)
