"""Every family that is packed by default, in bfloat16 on a GPU: packs, shared prompts, compiled layers, CUDA graphs.

None of them may be farther from the padded model in float32 than the padded model in bfloat16 is. On a CPU, other code
computes the attention of packs, so the page of families says nothing about these.
"""

import functools
import json
import logging

import pytest
import torch
from transformers import CONFIG_MAPPING

from families import FAMILIES, MAX_LENGTH, PROMPT_LENGTHS, SEQUENCES, write_tiny
from rlhf_data.errors import ConfigError
from rlhf_models.attention.packed import PACKED_ATTENTIONS, check_shares_prompts
from rlhf_models.backbone import can_be_replayed, changes_logits, replay_full_packs
from rlhf_models.batch import TokenBatch
from rlhf_models.fast.compiled import compile_layers, compile_unavailable_reason
from rlhf_models.loading import load_actor
from rlhf_train.run.models import without_dropout

# Fields of configs that count the experts of a token, and of all those that there are to choose from.
CHOSEN_EXPERTS = {
    "num_experts_per_tok": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_k": ("moe_num_experts",),
}
NUM_TOKENS = sum(map(len, SEQUENCES))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """A tiny model of a family, and the results of its padded batches in float32 and bfloat16."""
    made = tmp_path_factory.mktemp("model")
    if FAMILIES[request.param][0] not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    write_tiny(request.param, made)
    choose_all_experts(made / "config.json")
    try:
        load(made)
    except ConfigError as error:
        pytest.skip(f"it is not packed: {error}")
    return made


def choose_all_experts(path):
    """Have a router choose all experts: rounding to bfloat16 would change its choice, and with it the results.

    PhiMoE's router is made for two.
    """
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    for chosen, available in CHOSEN_EXPERTS.items():
        number = next((text[name] for name in available if name in text), None)
        if chosen in text and number and text["model_type"] != "phimoe":
            text[chosen] = number
    path.write_text(json.dumps(config))


def load(folder, dtype="bfloat16", *, packing=True):
    actor = load_actor(folder, dtype=dtype, max_length=MAX_LENGTH, packing=packing)
    return without_dropout(actor.cuda().train())


def run(actor, batch, gradient=None):
    """The log-probs of all tokens in order, and the gradient of a weighted sum of them."""
    actor.zero_grad()
    logprobs = torch.cat([values[1:] for values in batch.split(actor(batch).logprobs)])
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(0)).cuda()
    (logprobs * weights).sum().backward()
    return logprobs.detach(), joined([weight.grad for weight in trained(actor)], trained(actor))


def trained(actor):
    return [weight for weight in actor.parameters() if weight.requires_grad]


def joined(gradients, weights):
    """Gradients as one vector in float32; those that a model does not compute are zeros."""
    pairs = zip(gradients, weights, strict=True)
    return torch.cat([(torch.zeros_like(weight) if grad is None else grad).flatten().float() for grad, weight in pairs])


@functools.lru_cache(maxsize=4)
def padded(folder, dtype, num_sequences):
    actor = load(folder, dtype, packing=False)
    return run(actor, TokenBatch.padded(SEQUENCES[:num_sequences], 0, "cuda"))


def check(folder, results, num_sequences):
    # Rounding moves scores over the bound within which a router of PhiMoE takes them.
    factor = 4 if json.loads((folder / "config.json").read_text())["model_type"] == "phimoe" else 2
    truth = padded(folder, "float32", num_sequences)
    for got, other, want in zip(results, padded(folder, "bfloat16", num_sequences), truth, strict=True):
        assert (got - want).norm() < factor * (other - want).norm() + 0.01 * want.norm()


def packs():
    return TokenBatch.packed(SEQUENCES, "cuda")


def test_packs(folder):
    check(folder, run(load(folder), packs()), len(SEQUENCES))


def test_shared_prompts(folder):
    actor = load(folder)
    try:
        check_shares_prompts(actor.model.config, actor.model.config._attn_implementation)
    except ConfigError as error:
        pytest.skip(str(error))
    check(folder, run(actor, TokenBatch.packed(SEQUENCES[:2], "cuda", prompt_lengths=PROMPT_LENGTHS)), 2)


def test_compiled_layers(folder):
    actor = load(folder)
    if reason := compile_unavailable_reason(actor.model, torch.device("cuda", 0)):
        pytest.skip(reason)
    torch._dynamo.reset()
    compile_layers(actor.model)
    check(folder, run(actor, packs()), len(SEQUENCES))


def test_replayed_packs(folder, caplog):
    actor = load(folder)
    if not can_be_replayed(actor.model.config):
        pytest.skip("it has experts")
    if changes_logits(actor.model):
        pytest.skip("its logits are computed by its whole model")
    assert actor.model.config._attn_implementation in PACKED_ATTENTIONS
    sums = {weight: torch.zeros_like(weight, dtype=torch.float32) for weight in trained(actor)}

    def add(weight):  # of the head, which is not replayed
        sums[weight].add_(weight.grad)

    for weight in sums:
        weight.register_post_accumulate_grad_hook(add)
    replay_full_packs(actor.model.base_model, NUM_TOKENS + 20, sums)
    other = TokenBatch.packed([sequence[::-1] for sequence in SEQUENCES], "cuda")
    with caplog.at_level(logging.INFO):
        for batch in [other] * 18 + [packs()]:
            for total in sums.values():
                total.zero_()
            logprobs, _ = run(actor, batch)
    check(folder, (logprobs, joined(list(sums.values()), list(sums))), len(SEQUENCES))
    assert actor.model.base_model.pack_graph._passes or "CUDA graphs" in caplog.text
