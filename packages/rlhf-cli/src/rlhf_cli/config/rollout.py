"""How responses are drawn, for training and for evaluation."""

from rlhf_data.errors import ConfigError
from rlhf_data.options import Section, flag
from rlhf_rollout.commands.sections import GroupSamplingSection


class RolloutSection(GroupSamplingSection):
    """How responses are drawn for training."""

    rollout_batch_size: int = flag(1024, "prompts per step", ge=1)
    micro_rollout_batch_size: int = flag(
        8, "responses per forward pass without gradient, on one training process", ge=1
    )
    dynamic_filtering: bool = flag(
        False, "train only prompts whose responses differ in score, and draw others for the rest"
    )
    dynamic_filtering_reward_range: tuple[float, float] | None = flag(
        None, "LOW HIGH: the mean score of a prompt's responses must lie between, too; None: anywhere"
    )
    dynamic_filtering_max_batches: int = flag(
        10, "prompts that a step draws at most, as a multiple of --rollout_batch_size", ge=1
    )

    def check(self) -> None:
        """Raise ConfigError for sampling that cannot work."""
        super().check()
        if self.temperature == 0:
            message = "--temperature is 0; it must be above 0 for training"
            raise ConfigError(message, hint="greedy responses to a prompt are all the same; evaluation may be greedy")


class EvaluationSection(Section, title="evaluation"):
    """Held-out prompts."""

    eval_steps: int = flag(
        -1, "steps between answers to --eval_data; -1: only before the first and after the last step", ge=-1
    )
    eval_temperature: float = flag(0.6, "sampling temperature of evaluation; 0: greedy", ge=0)
    eval_n_samples_per_prompt: int = flag(1, "responses per held-out prompt", ge=1)
    best_metric_key: str | None = flag(
        None, "save, too, the policy with the highest such number, for example eval/pass@1; None: the last only"
    )
