"""Models with mixtures of experts: log-probs, packing, checkpoints, value heads and adapters."""

import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_data.errors import ConfigError
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor, load_config, load_critic, load_reward_model, load_tokenizer
from rlhf_models.lora import LoraSpec, add_lora, check_lora, merge_adapter, save_adapter
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_models.weights import hf_named_weights, save_hf

# The names that vLLM and earlier transformers read.
EXPERT_NAMES = {
    "qwen3_moe": r"model\.layers\.[01]\.mlp\.experts\.[0-3]\.(gate|up|down)_proj\.weight",
    "qwen2_moe": r"model\.layers\.[01]\.mlp\.experts\.[0-3]\.(gate|up|down)_proj\.weight",
    "mixtral": r"model\.layers\.[01]\.block_sparse_moe\.experts\.[0-3]\.w[123]\.weight",
}


@pytest.fixture(scope="module", params=list(EXPERT_NAMES))
def moe_dir(request, tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp(request.param), architecture=request.param)


def stirred(model):
    """Give each weight, and each expert of a weight, a change of its own."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return model


def by_hand(layer, hidden, top_k):
    """The output of a layer's experts for one token [D], expert by expert from the weights of the checkpoint."""
    scores = torch.stack([row @ hidden for row in layer["gate"]])
    probs = scores.exp() / scores.exp().sum()
    best = sorted(range(len(probs)), key=lambda index: -float(probs[index]))[:top_k]
    total = sum(probs[index] for index in best)
    output = torch.zeros_like(hidden)
    for index in best:
        gate, up, down = (layer[f"{index}.{name}"] for name in ("gate_proj", "up_proj", "down_proj"))
        inner = gate @ hidden
        output += probs[index] / total * (down @ (inner / (1 + (-inner).exp()) * (up @ hidden)))
    return output


def test_block_of_experts_computes_what_the_named_weights_say(tmp_path):
    actor = stirred(load_actor(tiny_model_dir(tmp_path, architecture="qwen3_moe"), dtype="float32"))
    prefix = "model.layers.1.mlp."
    named = {name.removeprefix(prefix): weight for name, weight in hf_named_weights(actor) if name.startswith(prefix)}
    layer = {
        name.removeprefix("experts.").removesuffix(".weight"): weight.detach().double()
        for name, weight in named.items()
    }
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    found = actor.model.model.layers[1].mlp(hidden[None])[0]
    expected = torch.stack([by_hand(layer, token.double(), 2) for token in hidden])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_padded_in_loss_and_gradients(moe_dir, sequences, checkpointing):
    padded = load_actor(moe_dir, dtype="float32")
    packed = load_actor(moe_dir, dtype="float32", packing=True, gradient_checkpointing=checkpointing)
    losses = []
    for actor, batch in ((padded, TokenBatch.padded(sequences, 0)), (packed, TokenBatch.packed(sequences))):
        losses.append(actor(batch).logprobs.sum())
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], atol=1e-3, rtol=0)
    for (name, one), other in zip(padded.named_parameters(), packed.parameters(), strict=True):
        assert one.grad.abs().max() > 0, name
        torch.testing.assert_close(one.grad, other.grad, atol=2e-4, rtol=0, msg=name)


def test_saved_folder_has_the_names_of_published_checkpoints_and_every_expert(moe_dir, tmp_path):
    actor = stirred(load_actor(moe_dir, dtype="float32"))
    folder = save_hf(actor, actor.state_dict(), load_tokenizer(moe_dir), tmp_path / "out")
    saved = load_file(folder / "model.safetensors")
    pattern = EXPERT_NAMES[load_config(moe_dir).model_type]
    experts = [name for name in saved if re.fullmatch(pattern, name)]
    assert len(experts) == 2 * 4 * 3 and not [name for name in saved if "gate_up" in name]
    assert {tuple(saved[name].shape) for name in experts} == {(32, 64), (64, 32)}
    assert saved.keys() == load_file(moe_dir / "model.safetensors").keys()
    # The weight sync sends the same tensors under the same names.
    sent = {name: weight.detach() for name, weight in hf_named_weights(actor)}
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)
    again = load_actor(folder, dtype="float32")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), actor.parameters(), strict=True))


def test_named_weights_of_a_model_that_was_not_loaded_are_the_checkpoints(moe_dir):
    model = AutoModelForCausalLM.from_config(load_config(moe_dir))
    assert {name for name, _ in hf_named_weights(model)} == load_file(moe_dir / "model.safetensors").keys()


def test_named_weights_read_one_parameter_at_a_time(moe_dir):
    from contextlib import contextmanager

    actor = load_actor(moe_dir, dtype="float32")
    opened, num_read = [], 0

    @contextmanager
    def whole(weight):
        opened.append(weight)
        yield weight + 1
        opened.remove(weight)

    plain = dict(hf_named_weights(actor))
    for name, tensor in hf_named_weights(actor, whole):
        assert len(opened) == 1
        torch.testing.assert_close(tensor, plain[name] + 1, rtol=0, atol=0)
        num_read += 1
    assert num_read == len(plain) > len(list(actor.parameters()))
    assert not opened


def test_critic_keeps_experts_and_head(moe_dir, tmp_path):
    critic = stirred(load_critic(moe_dir, dtype="float32"))
    folder = save_hf(critic, critic.state_dict(), None, tmp_path / "critic")
    again = load_critic(folder, dtype="float32")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), critic.parameters(), strict=True))
    batch = TokenBatch.padded([[5, 6, 7], [8, 9]], 0)
    torch.testing.assert_close(
        load_reward_model(folder, dtype="float32")(batch),
        again(batch, after_token=True)[torch.arange(2), torch.tensor([2, 1])],
    )


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_reward_model_folder_scores_as_plain_transformers_does(tmp_path, architecture):
    from transformers import AutoModelForSequenceClassification

    folder = tiny_reward_model_dir(tmp_path, architecture=architecture)
    scores = load_reward_model(folder, dtype="float32")(TokenBatch.padded([[5, 6, 7]], 0))
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    torch.testing.assert_close(scores, plain(input_ids=torch.tensor([[5, 6, 7]])).logits[:, 0])


def test_adapters_of_linear_layers_merge_into_a_folder_and_leave_experts_as_they_were(moe_dir, tmp_path):
    pytest.importorskip("peft")
    actor = load_actor(moe_dir, dtype="float32")
    add_lora(actor, LoraSpec(rank=2))
    trained = [name for name, weight in actor.named_parameters() if weight.requires_grad]
    assert trained and not [name for name in trained if ".experts." in name]
    with torch.no_grad():
        for weight in actor.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.1)
    batch = TokenBatch.padded([[5, 6, 7, 8], [9, 10]], 0)
    expected = actor(batch).logprobs
    adapter = save_adapter(actor, actor.state_dict(), tmp_path / "adapter")
    folder = merge_adapter(moe_dir, adapter, tmp_path / "merged", dtype="float32")
    torch.testing.assert_close(load_actor(folder, dtype="float32")(batch).logprobs, expected)
    before, after = (load_file(place / "model.safetensors") for place in (moe_dir, folder))
    assert before.keys() == after.keys() == {name for name, _ in hf_named_weights(actor)}
    experts = [name for name in before if ".experts." in name]
    assert experts and all(torch.equal(before[name], after[name]) for name in experts)


@pytest.mark.parametrize("target", ["gate_up_proj", "down_proj", "experts", "w1", "gate_proj"])
def test_adapters_of_experts_are_refused(tmp_path, target):
    pytest.importorskip("peft")
    folder = tiny_model_dir(tmp_path, architecture="qwen3_moe")
    with pytest.raises(ConfigError, match=r"(?s)LoRA: .*hint: ``target_modules`` takes all-linear"):
        check_lora(load_config(folder), LoraSpec(rank=2, target_modules=("q_proj", target)))
