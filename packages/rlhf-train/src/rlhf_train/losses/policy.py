"""The policy loss of an update, which online algorithms share.

    loss = R(w_t l_t) + kl_coef R(k_t) - entropy_coef R(H_t)

    r_t = pi(t) / pi_old(t)                   the ratio of a token
    l_t = -min(r_t A_t, clip(r_t) A_t)        PPO, GRPO, REINFORCE++, RLOO, DAPO; with the ratio of the sequence: GSPO
    l_t = -constant(clip(r_t)) A_t log pi(t)  CISPO
    l_t = -A_t log pi(t)                      REINFORCE

A_t is the advantage, of `algorithms.group` or `algorithms.gae`. w_t corrects for the gap between trainer and engine, of
`algorithms.correction`. k_t estimates the KL to the reference, H_t is the entropy, and R sums over the tokens of the
update and divides by one of its counts. `algorithms.table` has a row for each algorithm.

The formulas in code, a function for each l_t and k_t, are in `rlhf_kernels/ops/packed_policy_loss/reference.py`, which
also runs on CPUs. On GPUs `linear_policy_loss` computes the LM head and this loss together.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf_kernels import PolicyStream
from rlhf_models.batch import to_device
from rlhf_train.algorithms.table import AlgorithmSpec
from rlhf_train.batching import Denominators


def policy_stream(
    columns: Mapping[str, Tensor],
    policy_mask: Tensor,
    rows: Sequence[int],
    spec: AlgorithmSpec,
    denominators: Denominators,
    device: torch.device | str,
) -> PolicyStream:
    """Return the constant inputs of the policy loss: the trained tokens of a micro-batch, concatenated.

    Args:
        columns: of a rank's shard, [B, T] float each: "advantages", and if there are any "old_logprobs",
            "ref_logprobs" and "weights".
        policy_mask: [B, T] bool, the trained tokens of the shard.
        rows: of the shard, the micro-batch.
        spec: decides whether reference log-probs are included.
        denominators: of the whole update.
        device: where the result is placed.
    """
    mask = policy_mask[list(rows)]
    lengths = mask.sum(dim=1)
    names = ["advantages", "old_logprobs", "weights", *(["ref_logprobs"] if spec.use_kl_loss else [])]
    return PolicyStream(
        **{name: to_device(columns[name][list(rows)][mask], device) for name in names if name in columns},
        loss_mask=torch.ones(int(lengths.sum()), dtype=torch.bool, device=device),
        cu_seqlens=to_device(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), device),
        num_tokens=denominators.num_tokens,
        num_sequences=denominators.num_sequences,
        max_tokens=denominators.max_tokens,
    )
