"""Supervised fine-tuning: the completions of demonstrations, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf_data.sft import SftExample
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor, load_tokenizer, resolve_dtype
from rlhf_models.weights import save_hf
from rlhf_train.batching import Denominators
from rlhf_train.engine.deepspeed import DeepSpeedEngine, init_process_group
from rlhf_train.engine.protocol import TrainEngine
from rlhf_train.losses.aggregate import aggregate
from rlhf_train.metrics import Mean, Metric
from rlhf_train.offline.loop import OfflineSchedule, evaluate, train_offline
from rlhf_train.specs import ModelSpec


def supervised_loss(logprobs: Tensor, loss_mask: Tensor, denominators: Denominators) -> Tensor:
    """Return this micro-batch's share of the negative log-likelihood a trained token.

        loss = - sum_i sum_t [mask_it] log p(token_it | tokens before it) / num_tokens

    Args:
        logprobs: [B, T] float, nats; carries the gradient.
        loss_mask: [B, T] bool, True where the token is trained.
        denominators: global counts; the loss is per token of the whole batch, however it was split.

    Returns:
        Scalar, nats a token.
    """
    return aggregate(-logprobs, loss_mask, "token_mean", denominators)


@dataclass(frozen=True, slots=True)
class SupervisedObjective:
    """`Objective` of supervised fine-tuning.

    Attributes:
        packing: examples of a micro-batch are packed into one sequence instead of padded.
    """

    packing: bool = False

    def num_tokens(self, example: SftExample) -> int:
        """See `Objective`."""
        return example.num_tokens

    def num_trained_tokens(self, example: SftExample) -> int:
        """See `Objective`."""
        return int(example.loss_mask.sum())

    def loss(
        self, engine: TrainEngine, examples: Sequence[SftExample], denominators: Denominators
    ) -> tuple[Tensor, dict[str, Metric]]:
        """See `Objective`. Metrics: `sft/loss` and `sft/entropy`, nats a trained token."""
        tokens = [example.token_ids for example in examples]
        if self.packing:
            batch = TokenBatch.packed(tokens, device=engine.device)
        else:
            batch = TokenBatch.padded(tokens, pad_id=0, device=engine.device)
        mask = batch.lay_out([example.loss_mask for example in examples], torch.bool, False)
        output = engine.forward(batch, logits_mask=mask)
        logprobs, entropy = output.logprobs, output.entropy
        loss = supervised_loss(logprobs, mask, denominators)
        with torch.no_grad():
            count = float(mask.sum())
            metrics: dict[str, Metric] = {
                "sft/loss": Mean(-float(logprobs[mask].sum()), count),
                "sft/entropy": Mean(float(entropy[mask].sum()), count),
            }
        return loss, metrics


class SupervisedObserver(Protocol):
    """Shows a supervised run to people and keeps its metrics; called on rank 0 only."""

    def step(self, step: int, num_steps: int, metrics: dict[str, float]) -> None:
        """An optimizer step ended."""
        ...

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """The evaluation examples were run."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedJob:
    """One supervised run.

    Attributes:
        model: what is trained; it has an optimizer.
        examples, eval_examples: token ids with masks; the latter may be empty.
        schedule: batch sizes, epochs, seed.
        model_path: folder that the trained model is written to, in the Hugging Face layout.
        rank, num_ranks, master: of the data-parallel processes, each of which runs the same job.
        device: "cuda" or "cpu".
    """

    model: ModelSpec
    examples: Sequence[SftExample]
    eval_examples: Sequence[SftExample] = field(default=())
    schedule: OfflineSchedule
    model_path: Path
    rank: int = 0
    num_ranks: int = 1
    master: tuple[str, int] = ("127.0.0.1", 29500)
    device: str = "cpu"


def run_supervised(job: SupervisedJob, observer: SupervisedObserver) -> None:
    """Train, evaluate before and after, and write the model. Collective over `job.num_ranks` processes."""
    if job.model.optimizer is None:
        raise ValueError("a supervised run needs an optimizer")
    torch.manual_seed(job.schedule.seed)
    init_process_group(
        rank=job.rank, world_size=job.num_ranks, master_addr=job.master[0], master_port=job.master[1], device=job.device
    )
    model = load_actor(
        job.model.path,
        dtype=job.model.dtype,
        attn_implementation=job.model.attn_implementation,
        gradient_checkpointing=job.model.gradient_checkpointing,
        packing=job.model.packing,
    )
    engine = DeepSpeedEngine(
        model,
        job.model.optimizer,
        zero_stage=job.model.zero_stage,
        dtype=resolve_dtype(job.model.dtype),
        device=job.device,
    )
    objective = SupervisedObjective(job.model.packing)

    def measure(step: int) -> None:
        if job.eval_examples:
            metrics = evaluate(engine, objective, job.eval_examples, job.schedule.micro_train_batch_size)
            if job.rank == 0:
                observer.evaluation(
                    step, {f"eval/{name.removeprefix('sft/')}": value for name, value in metrics.items()}
                )

    def on_step(step: int, num_steps: int, metrics: Any) -> None:
        if job.rank == 0:
            observer.step(step, num_steps, dict(metrics))

    measure(0)
    train_offline(engine, objective, job.examples, job.schedule, on_step=on_step)
    measure(job.schedule.num_steps(len(job.examples)))
    state = engine.state_dict()
    if job.rank == 0:
        save_hf(engine.module, state, load_tokenizer(job.model.path), job.model_path)
