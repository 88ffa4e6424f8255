"""Who scores, and what becomes of the scores."""

from typing import ClassVar

from pydantic import Field

from rlhf_cli.config.base import Section, SymmetricRange
from rlhf_rollout.rewards.sources import RewardSource, parse_sources, parse_weights


class RewardSection(Section):
    """Sources, and what becomes of their rewards before an algorithm sees them."""

    TITLE: ClassVar[str] = "reward"

    remote_rm_url: str | None = Field(
        None,
        description="what scores, with commas: Python FILE.py with `reward_func(queries, prompts, labels)`,"
        " module:function, or http(s):// URLs of a reward server, which take turns; accuracy and pass@k follow the"
        " first source: its score above 0 is right",
    )
    reward_pretrain: str | None = Field(
        None, description="reward models, with commas: Hugging Face model folders or hub names with a scalar head"
    )
    reward_weights: str | None = Field(
        None,
        description="a number for each source, with commas, --remote_rm_url's first, all URLs counted as one; None: 1."
        " One that begins with - needs a =, as in --reward_weights=-1,1",
    )
    reward_timeout_s: float = Field(30.0, gt=0, description="seconds for one call of a reward function or server")
    reward_num_workers: int = Field(1, ge=1, description="processes that score side by side, of each function")
    reward_batch_size: int = Field(64, ge=1, description="responses a call of a reward server or model")
    normalize_reward: bool = Field(
        False, description="shift and scale rewards by the mean and the deviation of all so far"
    )
    reward_clip_range: SymmetricRange | None = Field(
        None,
        description="LOW HIGH, or X for -X X: bounds of a reward, after --normalize_reward and before length counts;"
        " None: none",
    )
    overlong_buffer_len: float = Field(
        0.0,
        ge=0,
        description="tokens before --generate_max_len over which a penalty grows; below 1: a share of it; 0: none",
    )
    overlong_penalty_factor: float = Field(1.0, gt=0, description="that penalty at --generate_max_len")
    stop_properly_penalty_coef: float | None = Field(
        None,
        le=1,
        description="share of its reward that a response keeps which --generate_max_len ended; below 0: its reward at"
        " most; None: all",
    )

    def sources(self) -> tuple[RewardSource, ...]:
        """Return who scores, as they were named. Raises ConfigError for weights that are not one number for each."""
        return parse_sources(self.remote_rm_url or "", self.reward_pretrain or "", parse_weights(self.reward_weights))

    def overlong_buffer(self, max_tokens: int) -> int:
        """Return the tokens over which the penalty grows, for responses of at most `max_tokens`."""
        share = max_tokens if self.overlong_buffer_len < 1 else 1
        return round(self.overlong_buffer_len * share)
