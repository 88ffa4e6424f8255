"""How responses are drawn, for training and for evaluation."""

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
    dynamic_filtering: bool = Field(
        False, description="train only prompts whose responses differ in score, and draw others for the rest"
    )
    dynamic_filtering_reward_range: tuple[float, float] | None = Field(
        None, description="LOW HIGH: the mean score of a prompt's responses must lie between, too; None: anywhere"
    )
    dynamic_filtering_max_batches: int = Field(
        10, ge=1, description="prompts that a step draws at most, as a multiple of --rollout_batch_size"
    )


class EvaluationSection(Section):
    """Held-out prompts."""

    TITLE: ClassVar[str] = "evaluation"

    eval_steps: int = Field(
        -1, ge=-1, description="steps between answers to --eval_data; -1: only before the first and after the last step"
    )
    eval_temperature: float = Field(0.6, ge=0, description="sampling temperature of evaluation; 0: greedy")
    eval_n_samples_per_prompt: int = Field(1, ge=1, description="responses a held-out prompt")
    best_metric_key: str | None = Field(
        None,
        description="save, too, the policy with the highest such number, for example eval/pass@1; None: the last only",
    )
