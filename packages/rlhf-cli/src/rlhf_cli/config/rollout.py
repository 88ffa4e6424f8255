"""How responses are drawn, scored and evaluated."""

from typing import ClassVar

from pydantic import Field

from rlhf_cli.config.base import Section


class RolloutSection(Section):
    """Sampling."""

    TITLE: ClassVar[str] = "rollout"

    rollout_batch_size: int = Field(1024, ge=1, description="prompts a step")
    n_samples_per_prompt: int = Field(1, ge=1, description="responses a prompt")
    generate_max_len: int = Field(1024, ge=1, description="tokens of a response at most")
    temperature: float = Field(1.0, gt=0, description="sampling temperature; log-probs are taken at it, too")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass to sample from")
    top_k: int = Field(-1, ge=-1, description="most likely tokens to sample from; -1: all")
    micro_rollout_batch_size: int = Field(
        8, ge=1, description="responses a forward pass without gradient, on one training process"
    )


class RewardSection(Section):
    """Who scores."""

    TITLE: ClassVar[str] = "reward"

    remote_rm_url: str | None = Field(
        None,
        description="the reward: a Python FILE.py with `reward_func(queries, prompts, labels)`, or module:function",
    )
    reward_timeout_s: float = Field(30.0, gt=0, description="seconds for one call of the reward function")
    reward_num_workers: int = Field(1, ge=1, description="processes that score side by side")


class EvaluationSection(Section):
    """Held-out prompts."""

    TITLE: ClassVar[str] = "evaluation"

    eval_steps: int = Field(
        -1, ge=-1, description="steps between answers to --eval_data; -1: only before the first and after the last step"
    )
    eval_temperature: float = Field(0.6, ge=0, description="sampling temperature of evaluation; 0: greedy")
    eval_n_samples_per_prompt: int = Field(1, ge=1, description="responses a held-out prompt")
