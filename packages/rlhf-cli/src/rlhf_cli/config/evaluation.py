"""Evaluation on held-out data during a run."""

from rlhf_data.options.declare import Section, flag


class EvaluationSection(Section, title="evaluation"):
    """When to evaluate, and which weights to keep."""

    eval_steps: int = flag(
        -1,
        "evaluate after every Nth step of ppo, or after every Nth update of the other commands; -1: only before the"
        " first and after the last",
        ge=-1,
    )
    best_metric_key: str | None = flag(
        None,
        "also save the model with the best value of this metric, such as eval/pass@1 (ppo, the highest is best) or"
        " eval/loss; None: save the last model only",
    )


class PpoEvaluationSection(EvaluationSection):
    """Adds how responses to held-out prompts are drawn."""

    eval_temperature: float = flag(0.6, "sampling temperature of evaluation; 0: greedy", ge=0)
    eval_n_samples_per_prompt: int = flag(1, "responses per held-out prompt", ge=1)
