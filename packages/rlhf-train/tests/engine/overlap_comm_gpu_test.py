"""Communication of ZeRO stage 3 beside computation, on two GPUs: the same weights to the last bit."""

import hashlib
import os
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_train.specs import OptimizerSpec
from trainer_testing import run_ranks

NUM_UPDATES, PASSES = 12, 3
SPEC = OptimizerSpec(learning_rate=1e-3, scheduler="constant", max_norm=1.0, bf16_moments=False)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def make_model() -> nn.Module:
    """Layers of 13 million weights, which take as long to gather as to compute."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 1024}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    model = Qwen2ForCausalLM(Qwen2Config(attn_implementation="eager", **sizes, **heads)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(torch.bfloat16)


def loss_of(forward: Any, number: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * number + rank)
    tokens = torch.randint(32, (2, 128), generator=draw).cuda()  # of 1,024, which the model can learn
    logits = forward(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def train(rank: int, num_ranks: int, master: tuple[str, int]) -> list[dict[str, Any]]:
    """Without and with overlap: the losses, a digest of the trained weights, and losses of changed weights."""
    from rlhf_train.engine.deepspeed import DeepSpeedEngine
    from rlhf_train.engine.process_group import init_process_group

    torch.use_deterministic_algorithms(True, warn_only=True)
    init_process_group(rank=rank, world_size=num_ranks, master=master, device="cuda")
    results = []
    for overlap in (False, True):
        options = {"dtype": torch.bfloat16, "device": "cuda", "overlap_comm": overlap}
        engine = DeepSpeedEngine(make_model(), SPEC, zero_stage=3, **options)
        losses = []
        for number in range(NUM_UPDATES * PASSES):
            loss = loss_of(engine.forward, number, rank)
            is_last = number % PASSES == PASSES - 1
            engine.backward(loss / 256, is_last=is_last)
            if is_last:
                engine.step()
            losses.append(loss.item() if is_last else 0.0)
        weights = b"".join(weight.view(torch.int16).numpy().tobytes() for weight in engine.state_dict().values())
        for factor in (0.5, 2.0):  # as a moving average writes to the shards
            for _, part in engine.local_weights():
                part.mul_(factor)
            losses.append(loss_of(engine.forward, 0, rank).item())
        results.append({"losses": losses, "weights": hashlib.sha256(weights).hexdigest()})
        assert engine._engine.zero_overlap_comm() == overlap
    return results


def test_overlapped_communication_gives_the_same_weights_and_losses() -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    environs = [{"CUDA_VISIBLE_DEVICES": visible[rank], "CUBLAS_WORKSPACE_CONFIG": ":4096:8"} for rank in range(2)]
    for plain, overlapped in run_ranks(train, 2, environs=environs):
        assert plain == overlapped
        assert plain["losses"][NUM_UPDATES * PASSES - 1] < plain["losses"][PASSES - 1]
