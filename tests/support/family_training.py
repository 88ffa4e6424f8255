"""What training makes of a tiny model of each family, against plain transformers: see `CHECKS`."""

import asyncio
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D  # the linear layer of GPT-2

from families import BOUND, MAX_LENGTH, PROMPT_LENGTHS, SEQUENCES, distance, load, logprobs_of, plain_model, word, worst
from rlhf_data.errors import ConfigError
from rlhf_data.pretrained import load_tokenizer
from rlhf_models.attention.packed import check_shares_prompts
from rlhf_models.batch import TokenBatch
from rlhf_models.checkpoint.files import quiet_transformers
from rlhf_models.loading import load_critic, load_reward_model, pin_frequencies
from rlhf_models.lora import (
    LoraSpec,
    _names_meant_as_they_are,
    adapters_by_weight,
    add_lora,
    merge_adapter,
    save_adapter,
)
from rlhf_models.weights import save_hf
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import SamplingParams
from trainer_testing import run_ranks

# Of a weight's gradient, relative to it and to that of all weights: some are zero up to rounding.
_GRADIENT_BOUND, _OF_ALL = 1e-4, 1e-6
_STEP = {"learning_rate": 0.1, "eps": 1.0}  # with such an eps, AdamW's first step is smooth in the gradient
_UPDATED_BOUND = 1e-4  # of log-probs after an update or with adapters, which move them by 0.01 or more


def _factors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(len(sequence) - 1, generator=generator) for sequence in SEQUENCES]


def _loss(logprobs: list[Tensor]) -> Tensor:
    """Return a loss of the log-probs of all sequences that weights each token differently."""
    return sum((own * factors).sum() for own, factors in zip(logprobs, _factors(), strict=True))


def _plain_loss(model: Any) -> Tensor:
    logprobs_with_gradient = logprobs_of.__wrapped__
    return _loss(logprobs_with_gradient(model, SEQUENCES))


def _our_loss(actor: Any, batch: TokenBatch) -> Tensor:
    return _loss([values[1:] for values in batch.split(actor(batch).logprobs)])


def _layouts(folder: Path) -> dict[str, tuple[Any, TokenBatch]]:
    """Return the model and the batch of each layout that the family has."""
    found = {"padded": (load(folder), TokenBatch.padded(SEQUENCES, 0))}
    try:
        found["packed"] = (load(folder, packing=True), TokenBatch.packed(SEQUENCES))
        actor = load(folder, packing=True)
        check_shares_prompts(actor.model.config, actor.model.config._attn_implementation)
        found["shared"] = (actor, TokenBatch.packed(SEQUENCES, prompt_lengths=[*PROMPT_LENGTHS, 1]))
    except ConfigError:  # the table says that it is refused
        pass
    return found


def _gradients(folder: Path) -> str:
    """Compare the gradient of every weight, of batches in each layout that the family has."""
    plain = plain_model(folder)[0]
    _plain_loss(plain).backward()
    truth = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    size = torch.stack([grad.norm() for grad in truth.values()]).norm()
    for layout, (actor, batch) in _layouts(folder).items():
        _our_loss(actor, batch).backward()
        for name, weight in actor.model.named_parameters():
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            want = truth.get(name, torch.zeros_like(weight))
            if (grad - want).norm() > _GRADIENT_BOUND * want.norm() + _OF_ALL * size:
                return f"{layout}: {name} off by {float((grad - want).norm() / want.norm()):.0e}"
    return "equal"


def _adapted_layers(folder: Path) -> set[str]:
    """Return the names of the linear layers of plain transformers that text reaches, without the LM head.

    Routers are none, nor are the layers of Mamba whose weights are read, but which are not called on a GPU or at all.
    """
    plain = plain_model(folder)[0]
    _plain_loss(plain).backward()
    head = plain.get_output_embeddings()
    layers = {name: layer for name, layer in plain.named_modules() if isinstance(layer, nn.Linear | Conv1D)}
    names = {name for name, layer in layers.items() if layer is not head and layer.weight.grad is not None}
    return {name for name in names if not re.search(r"router$|\.(mamba|mixer)\.(dt_proj|out_proj)$", name)}


def _lora(folder: Path) -> str:
    """Adapt all linear layers; compare the merged folder, peft's own model and the weights that are sent."""
    from peft import PeftModel

    actor = load(folder)
    add_lora(actor, LoraSpec(rank=4, alpha=8.0))
    adapted = {name.removeprefix("model.") for name, layer in actor.named_modules() if hasattr(layer, "lora_A")}
    if differing := adapted ^ _adapted_layers(folder):
        return f"other layers: {', '.join(sorted(differing)[:2])}"
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in actor.named_parameters():
            if ".lora_B." in name:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    batch = TokenBatch.padded(SEQUENCES, 0)
    _our_loss(actor, batch).backward()
    trained = {name for name, weight in actor.named_parameters() if weight.grad is not None}
    if len(trained) != 2 * len(adapted) or not all(".lora_" in name for name in trained):
        return f"{len(trained)} weights are trained, with {len(adapted)} layers"
    with torch.no_grad():
        found = [values[1:] for values in batch.split(actor(batch).logprobs)]
    adapter = save_adapter(actor, actor.state_dict(), folder.with_name("adapter"))
    merged = plain_model(merge_adapter(folder, adapter, folder.with_name("merged"), dtype="float32"))[0]
    with _names_meant_as_they_are():
        peft = PeftModel.from_pretrained(plain_model(folder)[0], str(adapter)).eval()
    gaps = [distance(found, logprobs_of(model, SEQUENCES)) for model in (merged, peft)]
    if max(gaps) > _UPDATED_BOUND:
        return f"merged off by {gaps[0]:.0e}, peft by {gaps[1]:.0e}"
    if distance(found, logprobs_of(plain_model(folder)[0], SEQUENCES)) < 100 * _UPDATED_BOUND:
        return "the adapters do nothing"
    sent = [adapter.merged(weight) for weight, adapter in adapters_by_weight(actor).items()]
    there = list(merged.state_dict().values())
    shapes = {weight.shape: [own for own in there if own.shape == weight.shape] for weight in sent}
    lost = sum(not any(torch.allclose(weight, own, atol=1e-6) for own in shapes[weight.shape]) for weight in sent)
    return f"{lost} merged weights are sent otherwise" if lost else "equal"


def _heads(folder: Path) -> str:
    """Save a critic with a random head; compare its scores, loaded as critic and reward model, with transformers'."""
    critic = load_critic(folder, dtype="float32", max_length=MAX_LENGTH).eval()
    with torch.no_grad():
        critic.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    new = save_hf(critic, None, load_tokenizer(folder), folder.with_name("critic"))
    layouts = {"padded": TokenBatch.padded(SEQUENCES, 0), "packed": TokenBatch.packed(SEQUENCES)}
    truth = _plain_scores(folder, new, critic.value_head.weight)
    for layout, batch in layouts.items():
        options = {"dtype": "float32", "max_length": MAX_LENGTH, "packing": batch.is_packed}
        try:
            reward, again = load_reward_model(new, **options), load_critic(new, **options).eval()
        except ConfigError:
            if batch.is_packed:
                continue  # the table says that it is refused
            raise
        with torch.no_grad():
            ends = [values[-1:] for values in batch.split(again(batch, after_token=True))]
            gap = max(distance([own], [truth]) for own in (reward(batch), torch.cat(ends)))
        if gap > BOUND * float(truth.abs().max()):
            return f"{layout} off by {gap:.0e}"
    return "equal"


@torch.no_grad()
def _plain_scores(folder: Path, new: Path, head: Tensor) -> Tensor:
    """Return the score of each sequence alone: of transformers' classifier, or of the head on the last states."""
    base = plain_model(folder)[0]
    ids = [torch.tensor([sequence]) for sequence in SEQUENCES]
    if type(base.config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not list(new.glob("value_head*")):
        attention = {"attn_implementation": base.config._attn_implementation}
        with quiet_transformers():
            model = AutoModelForSequenceClassification.from_pretrained(new, dtype=torch.float32, **attention).eval()
        pin_frequencies(model, MAX_LENGTH)
        return torch.cat([model(input_ids=one).logits[0] for one in ids])
    layers = getattr(base, "model", base.base_model)
    return torch.cat([layers(input_ids=one).last_hidden_state[0, -1:] @ head.T for one in ids])[:, 0]


def _generated(folder: Path) -> str:
    """Save the model after an update; compare what the engine of transformers samples from it, and greedy answers."""
    actor = load(folder)
    _our_loss(actor, TokenBatch.padded(SEQUENCES, 0)).backward()
    with torch.no_grad():
        for weight in actor.parameters():
            if weight.grad is not None:
                weight.sub_(0.01 * weight.grad.clamp(-1, 1))
    new = save_hf(actor, None, load_tokenizer(folder), folder.with_name("new"))
    engine = build_engine("transformers", EngineSpec(model=str(new), dtype="float32", max_model_len=MAX_LENGTH))
    prompt = SEQUENCES[0][:9]
    try:
        params = SamplingParams(max_tokens=16, seed=3)
        [completion] = asyncio.run(engine.generate(np.array(prompt, np.int32), params))
    finally:
        asyncio.run(engine.close())
    plain = plain_model(new)[0]
    sampled = [*prompt, *completion.token_ids]
    own = logprobs_of(plain, [sampled])[0][len(prompt) - 1 :]
    gap = distance([torch.tensor(completion.logprobs)], [own])
    if gap > 2 * BOUND:
        return f"{gap:.0e}"
    greedy = plain.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        best = plain(input_ids=greedy[:, :-1]).logits[0, len(prompt) - 1 :].argmax(-1)
    return "equal" if torch.equal(greedy[0, len(prompt) :], best) else "greedy answers differ"


def _zero_3(folder: Path) -> str:
    """Make an update by ZeRO 3 on two ranks; compare the model that is saved with one updated by torch's AdamW."""
    new = folder.with_name("sharded")
    run_ranks(_update_on_rank, 2, str(folder), str(new))
    plain = plain_model(folder)[0]
    start = logprobs_of(plain, SEQUENCES)
    optimizer = torch.optim.AdamW(plain.parameters(), _STEP["learning_rate"], eps=_STEP["eps"], weight_decay=0.0)
    _plain_loss(plain).backward()
    optimizer.step()
    truth = logprobs_of(plain, SEQUENCES)
    if (moved := distance(truth, start)) < 100 * _UPDATED_BOUND:
        return f"the update moves log-probs by {moved:.0e}"
    gap = distance(logprobs_of(plain_model(new)[0], SEQUENCES), truth)
    return "equal" if gap <= _UPDATED_BOUND * max(1.0, moved) else f"off by {gap:.0e}"


def _update_on_rank(rank: int, num_ranks: int, master: Any, folder: str, new: str) -> None:
    from rlhf_train.engine.deepspeed import DeepSpeedEngine
    from rlhf_train.engine.process_group import init_process_group
    from rlhf_train.run.models import load_model, without_dropout
    from rlhf_train.specs import ModelSpec, OptimizerSpec

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    optimizer = OptimizerSpec(**_STEP, max_norm=0.0, scheduler="constant")
    spec = ModelSpec(path=folder, zero_stage=3, max_length=MAX_LENGTH, optimizer=optimizer)
    model = without_dropout(load_model("actor", spec))
    engine = DeepSpeedEngine(model, optimizer, zero_stage=3, dtype=torch.float32, device="cpu")
    own = slice(rank, None, num_ranks)  # two sequences and one
    batch = TokenBatch.padded(SEQUENCES[own], 0)
    logprobs = [values[1:] for values in batch.split(engine.forward(batch).logprobs)]
    pairs = zip(logprobs, _factors()[own], strict=True)
    engine.backward(sum((values * factors).sum() for values, factors in pairs), is_last=True)
    engine.step()
    state = engine.state_dict(wanted=rank == 0)
    if rank == 0:
        save_hf(engine.module, state, None, new)


CHECKS: Mapping[str, Callable[[Path], str]] = {
    "gradients": _gradients,
    "LoRA": _lora,
    "ZeRO 3": _zero_3,
    "heads": _heads,
    "generated": _generated,
}


def try_training(folder: Path, column: str) -> str:
    """Return what a check finds with the model of a folder: "equal", "refused", or what is wrong."""
    return worst([word(lambda: CHECKS[column](folder))])
