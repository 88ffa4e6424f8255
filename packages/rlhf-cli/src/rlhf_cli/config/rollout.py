"""How responses are drawn, for training and for evaluation."""

from rlhf_data.options import Section, flag


class RolloutSection(Section, title="rollout"):
    """Sampling."""

    rollout_batch_size: int = flag(1024, "prompts a step", ge=1)
    n_samples_per_prompt: int = flag(1, "responses a prompt", ge=1)
    generate_max_len: int = flag(1024, "tokens of a response at most", ge=1)
    temperature: float = flag(1.0, "sampling temperature; log-probs are taken at it, too", gt=0)
    top_p: float = flag(1.0, "nucleus mass to sample from", gt=0, le=1)
    top_k: int = flag(-1, "most likely tokens to sample from; -1: all", ge=-1)
    micro_rollout_batch_size: int = flag(8, "responses a forward pass without gradient, on one training process", ge=1)
    dynamic_filtering: bool = flag(
        False, "train only prompts whose responses differ in score, and draw others for the rest"
    )
    dynamic_filtering_reward_range: tuple[float, float] | None = flag(
        None, "LOW HIGH: the mean score of a prompt's responses must lie between, too; None: anywhere"
    )
    dynamic_filtering_max_batches: int = flag(
        10, "prompts that a step draws at most, as a multiple of --rollout_batch_size", ge=1
    )


class EvaluationSection(Section, title="evaluation"):
    """Held-out prompts."""

    eval_steps: int = flag(
        -1, "steps between answers to --eval_data; -1: only before the first and after the last step", ge=-1
    )
    eval_temperature: float = flag(0.6, "sampling temperature of evaluation; 0: greedy", ge=0)
    eval_n_samples_per_prompt: int = flag(1, "responses a held-out prompt", ge=1)
    best_metric_key: str | None = flag(
        None, "save, too, the policy with the highest such number, for example eval/pass@1; None: the last only"
    )
