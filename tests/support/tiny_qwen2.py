"""A Qwen2 model written out in float64, for tests that hold the product's models against it."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class TinyQwen2:
    """A Qwen2 model of a Hugging Face folder in float64: tied LM head, or a score head."""

    def __init__(self, folder: str) -> None:
        self.config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        loaded = load_file(Path(folder, "model.safetensors"))
        self.weights = {name: weight.double().requires_grad_() for name, weight in loaded.items()}

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the hidden states [B, T, D] of right-padded tokens [B, T]."""
        config, weights = self.config, self.weights
        num_heads, num_pairs = config["num_attention_heads"], config["num_key_value_heads"]
        size = config["hidden_size"] // num_heads
        batch, length = tokens.shape
        theta = config["rope_parameters"]["rope_theta"]
        angles = torch.outer(
            torch.arange(length, dtype=torch.float64),
            theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size),
        )
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        # As transformers has it: reading the padding token teaches its embedding nothing.
        x = torch.nn.functional.embedding(
            tokens, weights["model.embed_tokens.weight"], padding_idx=config["pad_token_id"]
        )
        for layer in range(config["num_hidden_layers"]):
            own = {n.split(f"layers.{layer}.")[1]: w for n, w in weights.items() if f"layers.{layer}." in n}
            y = self._norm(x, own["input_layernorm.weight"])

            def heads(name: str, count: int, y: Tensor = y, own: dict[str, Tensor] = own) -> Tensor:
                flat = y @ own[f"self_attn.{name}.weight"].T + own[f"self_attn.{name}.bias"]
                return flat.view(batch, length, count, size).transpose(1, 2)

            queries = _rotated(heads("q_proj", num_heads), angles)
            keys = _rotated(heads("k_proj", num_pairs), angles).repeat_interleave(num_heads // num_pairs, 1)
            values = heads("v_proj", num_pairs).repeat_interleave(num_heads // num_pairs, 1)
            scores = (queries @ keys.transpose(2, 3) / math.sqrt(size)).masked_fill(~causal, -math.inf)
            mixed = (scores.softmax(-1) @ values).transpose(1, 2).reshape(batch, length, -1)
            x = x + mixed @ own["self_attn.o_proj.weight"].T
            y = self._norm(x, own["post_attention_layernorm.weight"])
            gate = y @ own["mlp.gate_proj.weight"].T
            up = y @ own["mlp.up_proj.weight"].T
            x = x + (gate * gate.sigmoid() * up) @ own["mlp.down_proj.weight"].T
        return self._norm(x, weights["model.norm.weight"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / torch.sqrt((x**2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])

    def logprobs(self, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-prob and entropy [B, T] of each token given those before it; 0.0 for the first."""
        table = self.distributions(tokens, temperature)
        chosen = table[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
        entropy = -(table.exp() * table).sum(-1)[:, :-1]
        first = torch.zeros(len(tokens), 1, dtype=torch.float64)
        return torch.cat([first, chosen], 1), torch.cat([first, entropy], 1)

    def distributions(self, tokens: Tensor, temperature: float) -> Tensor:
        """Return the log-probs [B, T, V] of all tokens after each token."""
        logits = self.hidden(tokens) @ self.weights["model.embed_tokens.weight"].T / temperature
        return logits - logits.logsumexp(-1, keepdim=True)

    def values_after(self, tokens: Tensor) -> Tensor:
        """Return the value [B, T] of the state that each token leads to."""
        return (self.hidden(tokens) @ self.weights["score.weight"].T)[..., 0]

    def values(self, tokens: Tensor) -> Tensor:
        """Return the value [B, T] of the state in which each token is written; 0.0 for the first."""
        after = self.values_after(tokens)
        return torch.cat([torch.zeros(len(tokens), 1, dtype=torch.float64), after[:, :-1]], 1)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Return [B, H, T, 2 K] with feature pairs (k, k + K) turned by `angles` [T, K]."""
    one, two = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)
