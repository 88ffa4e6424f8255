"""Who scores, and what becomes of the scores."""

from collections.abc import Collection

from rlhf_data.checks import check_range, without_effect
from rlhf_data.errors import ConfigError
from rlhf_data.options import Section, SymmetricRange, flag
from rlhf_rollout.rewards.sources import RewardSource, parse_sources, parse_weights

_MODEL_OPTIONS = ("reward_num_nodes", "reward_num_gpus_per_node", "colocate_critic_reward")


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

    def check(self, given: Collection[str], max_tokens: int) -> list[str]:
        """Return notices. Raises ConfigError for sources, ranges and lengths that cannot work. `given` are the options
        that somebody set to something else than the default, `max_tokens` those of a response."""
        sources = self.sources()
        check_range("reward_clip_range", self.reward_clip_range)
        buffer = self.overlong_buffer(max_tokens)
        if self.overlong_buffer_len > 0 and not 1 <= buffer <= max_tokens:
            message = f"--overlong_buffer_len {self.overlong_buffer_len:g} is {buffer} of the {max_tokens} tokens of"
            hint = f"give 1 to {max_tokens} tokens, or a share below 1 that is a token at least"
            raise ConfigError(f"{message} --generate_max_len", hint=hint)
        keeps_all = self.stop_properly_penalty_coef == 1
        kinds = {source.kind for source in sources}
        notices = without_effect(
            given,
            (kinds == {"model"}, ["reward_timeout_s"], "no reward function or server scores"),
            ("function" not in kinds, ["reward_num_workers"], "no reward function scores"),
            (kinds == {"function"}, ["reward_batch_size"], "no reward server or model scores"),
            ("model" not in kinds, _MODEL_OPTIONS, "there is no --reward_pretrain"),
            (self.overlong_buffer_len == 0, ["overlong_penalty_factor"], "there is no --overlong_buffer_len"),
            (keeps_all, ["stop_properly_penalty_coef"], "at 1 a response keeps all of its reward"),
        )
        if len(sources) > 1 or kinds == {"model"}:
            which = f"the first of {len(sources)} rewards" if len(sources) > 1 else "the reward model"
            notices.append(f"accuracy and pass@k follow {which}, {sources[0].name}: a score above 0 counts as right")
        return notices
