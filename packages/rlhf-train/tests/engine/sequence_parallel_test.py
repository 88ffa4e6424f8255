"""Ranks that divide the tokens of a batch: outputs and gradients are those of plain transformers on whole sequences."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig

from rlhf_data.errors import ConfigError
from rlhf_models import actor as actor_module
from rlhf_models.attention.sequence_parallel import can_divide, check_heads
from rlhf_models.backbone import divide_sequences
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor, load_critic
from rlhf_models.reward import RewardModel
from rlhf_models.testing import tiny_model_dir
from rlhf_train.engine.process_group import join_sequence_group
from trainer_testing import run_ranks

VOCAB_SIZE = 512
TEMPERATURE = 0.7
# Sequences longer and shorter than a rank's part, and their weights in the loss. 47 tokens, which no size divides.
LENGTHS = (7, 1, 12, 25, 2)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB_SIZE, length) for length in LENGTHS]


def weights_of(length: int) -> torch.Tensor:
    return torch.linspace(-1, 1, length, dtype=torch.float64)


def new_head() -> torch.Tensor:
    return torch.linspace(-1, 1, HEADS["hidden_size"])[None]


def on_rank(rank: int, num_ranks: int, master: Any, path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run actor, critic and reward model on this rank's part; return their outputs and the gradients of its part."""
    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    actor_module.MAX_LOGITS_BYTES = options.pop("max_logits_bytes", actor_module.MAX_LOGITS_BYTES)
    group = join_sequence_group(num_ranks)
    batch = TokenBatch.packed(sequences())
    loading = {"dtype": "float32", "packing": True, **options}
    critic = load_critic(path, **loading)
    critic.value_head.weight.data.copy_(new_head())
    reward = RewardModel(load_critic(path, **loading).model)
    reward.value_head.weight.data.copy_(new_head())
    models = {"actor": load_actor(path, **loading), "critic": critic, "reward": reward}
    found: dict[str, Any] = {"part": group.part_of(batch).input_ids.shape[1]}
    for name, model in models.items():
        divide_sequences(model, group)
        outputs = model(batch, temperature=TEMPERATURE) if name == "actor" else [model(batch)]
        weights = torch.cat([weights_of(length) for length in LENGTHS]).float()[None]
        if name == "reward":
            weights = torch.linspace(1, 2, len(LENGTHS))
        loss = sum((weights * values * factor).sum() for values, factor in zip(outputs, (1.0, 0.1), strict=False))
        loss.backward()
        found[name] = [values.detach().numpy() for values in outputs]
        found[f"{name} gradients"] = {
            key: weight.grad.double().numpy() for key, weight in model.named_parameters() if weight.grad is not None
        }
    actor = models["actor"]
    places = torch.tensor([0, 3, 8, 30, 46])
    found["logits"] = actor(batch, logits_after=places).detach().numpy()
    nothing = actor(batch, logits_mask=torch.zeros_like(batch.input_ids, dtype=torch.bool)).logprobs
    found["nothing"] = nothing.detach().numpy()
    return found


def expected(path: str) -> dict[str, Any]:
    """The same by plain transformers in float64, one sequence at a time."""
    found: dict[str, Any] = {}
    model = AutoModelForCausalLM.from_pretrained(path).double()
    logprobs, entropies, logits = [], [], []
    for sequence in sequences():
        ids = torch.as_tensor(sequence)[None]
        logits.append(model(input_ids=ids).logits[0])
        table = torch.log_softmax(logits[-1] / TEMPERATURE, dim=-1)[:-1]
        zero = torch.zeros(1, dtype=torch.float64)
        logprobs.append(torch.cat([zero, table.gather(1, ids[0, 1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(table.exp() * table).sum(-1)]))
    loss = sum((weights_of(len(one)) * (one + 0.1 * two)).sum() for one, two in zip(logprobs, entropies, strict=True))
    loss.backward()
    found["actor"] = [torch.cat(values)[None].detach().numpy() for values in (logprobs, entropies)]
    found["actor gradients"] = {f"model.{key}": weight.grad.numpy() for key, weight in model.named_parameters()}
    found["logits"] = torch.cat(logits)[[0, 3, 8, 30, 46]].detach().numpy()
    for name in ("critic", "reward"):
        backbone = AutoModel.from_pretrained(path).double()
        head = new_head().double().requires_grad_()
        hidden = [backbone(input_ids=torch.as_tensor(one)[None]).last_hidden_state[0] for one in sequences()]
        after = [(one @ head.T)[:, 0] for one in hidden]
        if name == "reward":
            values = torch.stack([one[-1] for one in after])
            weights = torch.linspace(1, 2, len(LENGTHS), dtype=torch.float64)
        else:
            values = torch.cat([torch.cat([one.new_zeros(1), one[:-1]]) for one in after])[None]
            weights = torch.cat([weights_of(length) for length in LENGTHS])[None]
        (values * weights).sum().backward()
        found[name] = [values.detach().numpy()]
        gradients = {f"model.{key}": weight.grad.numpy() for key, weight in backbone.named_parameters()}
        found[f"{name} gradients"] = {**gradients, "value_head.weight": head.grad.numpy()}
    return found


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(2, {}), (4, {"gradient_checkpointing": True}), (2, {"max_logits_bytes": 1})],
    ids=["two", "four, keys and values repeated, checkpoints", "two, logits in blocks"],
)
def test_outputs_and_gradients_are_those_of_whole_sequences(tmp_path, num_ranks, options):
    path = str(tiny_model_dir(tmp_path, **HEADS))
    ranks = run_ranks(on_rank, num_ranks, path, options)
    wanted = expected(path)
    assert {rank["part"] for rank in ranks} == {-(-sum(LENGTHS) // num_ranks)}
    for name in ("actor", "critic", "reward"):
        for rank in ranks:
            for values, want in zip(rank[name], wanted[name], strict=True):
                np.testing.assert_allclose(values, want, atol=2e-5)
        assert all(np.array_equal(a, b) for rank in ranks for a, b in zip(rank[name], ranks[0][name], strict=True))
        gradients = wanted[f"{name} gradients"]
        for key, want in gradients.items():
            total = sum(rank[f"{name} gradients"].get(key, 0.0) for rank in ranks)
            np.testing.assert_allclose(total, want, atol=5e-5, err_msg=f"{name} {key}")
        # Each rank has a part of the gradient: with the whole on each, the sum would only be right by chance.
        norm = next(key for key in gradients if key.endswith("model.norm.weight"))
        own = [rank[f"{name} gradients"][norm] for rank in ranks]
        assert not np.allclose(own[0], own[1])
    for rank in ranks:
        np.testing.assert_allclose(rank["logits"], wanted["logits"], atol=2e-5)
        assert not rank["nothing"].any()


def test_heads_are_divided_evenly_or_refused():
    assert all(
        can_divide(*heads) for heads in ((14, 2, 2), (14, 2, 7), (14, 2, 14), (28, 4, 4), (32, 8, 16), (4, 4, 1))
    )
    assert not any(can_divide(*heads) for heads in ((14, 2, 4), (28, 4, 8), (12, 8, 2 * 8), (6, 2, 4), (6, 4, 3)))
    config = LlamaConfig(num_attention_heads=14, num_key_value_heads=2, hidden_size=28)
    check_heads(config, 7)
    with pytest.raises(
        ConfigError, match=r"over 4 ranks .* heads, and the model has 14\s+hint: use 2 or 7 or 14 ranks"
    ):
        check_heads(config, 4)
    with pytest.raises(ConfigError, match=r"the model has 1\s+hint: turn it off"):
        check_heads(LlamaConfig(num_attention_heads=1, num_key_value_heads=1, hidden_size=8), 2)


def refusals(rank: int, num_ranks: int, master: Any, path: str) -> list[str]:
    from rlhf_train.engine.process_group import init_process_group

    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cpu")
    group = join_sequence_group(2)
    calls = [
        lambda: group.part_of(TokenBatch.padded(sequences(), 0)),
        lambda: group.divide(torch.tensor([3, 2]), TokenBatch.packed(sequences())),
        lambda: divide_sequences(load_actor(path, dtype="float32", packing=True, attn_implementation="sdpa"), group),
    ]
    texts = []
    for call in calls:
        with pytest.raises((ConfigError, ValueError)) as caught:
            call()
        texts.append(str(caught.value))
    assert join_sequence_group(1) is None
    return texts


def test_what_cannot_be_divided_is_refused(tmp_path):
    for texts in run_ranks(refusals, 2, str(tiny_model_dir(tmp_path, **HEADS))):
        assert "only packed batches" in texts[0] and "must ascend" in texts[1]
        assert "rlhf_packed, not sdpa" in texts[2] and "hint:" in texts[2]
