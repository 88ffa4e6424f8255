"""The optimizer of a model: AdamW, or Muon for the matrices of its layers and AdamW for the rest.

Neither torch.optim.Muon nor DeepSpeed's Muon fits here. The first needs whole matrices, of which a rank may keep a
part. The second clips updates instead of gradients, reports the norm of updates, and keeps momentum in another form at
each ZeRO stage.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_data.errors import ConfigError
from rlhf_train.engine.bf16_moments import Bf16MomentsAdamW
from rlhf_train.engine.host_adamw import HostAdamW
from rlhf_train.engine.shards import MOMENTUM, WeightSlice
from rlhf_train.specs import OptimizerSpec

_NUM_ITERATIONS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ADAMW_RMS = 0.2  # root mean square of an update of AdamW at learning rate 1


def make_optimizer(model: nn.Module, spec: OptimizerSpec, *, fused: bool) -> torch.optim.AdamW:
    """Return the optimizer of a model's trained weights. `fused` says whether AdamW runs as one kernel.

    Raises ConfigError when there is nothing for Muon.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    fused = fused and not spec.bf16_moments  # our kernel counts updates on the host
    options = {"lr": spec.learning_rate, "betas": spec.betas, "eps": spec.eps, "fused": fused}
    if spec.muon_momentum is None:
        kind = Bf16MomentsAdamW if spec.bf16_moments else torch.optim.AdamW
        kind = HostAdamW if spec.offload else kind
        return kind(_adamw_groups(trained, spec), **options)
    hidden = {name: weight for name, weight in trained.items() if is_hidden_matrix(name, weight)}
    if not hidden:
        message = "Muon trains the matrices of a model's layers, and this model trains none"
        raise ConfigError(message, hint="use ``muon_momentum=None``")
    groups = [{"params": [*hidden.values()], "weight_decay": spec.weight_decay, "momentum": spec.muon_momentum}]
    groups += _adamw_groups({name: weight for name, weight in trained.items() if name not in hidden}, spec)
    return Muon(groups, {name: weight.shape for name, weight in hidden.items()}, **options)


def _adamw_groups(named: Mapping[str, nn.Parameter], spec: OptimizerSpec) -> list[dict[str, Any]]:
    # Weight decay applies to matrices only: it would pull the scales of norms, which are near 1, towards 0.
    matrices = [weight for name, weight in named.items() if weight.ndim >= 2 and not _is_bias(name)]
    vectors = [weight for name, weight in named.items() if weight.ndim < 2 or _is_bias(name)]
    groups: list[dict[str, Any]] = []
    for weights, decay in ((matrices, spec.weight_decay), (vectors, 0.0)):
        divided = {getattr(weight, "group_name", None) for weight in weights}
        for name in sorted(divided, key=str):
            own = [weight for weight in weights if getattr(weight, "group_name", None) == name]
            # Of experts that ranks divide, DeepSpeed wants groups of their own, marked like this.
            marks = {} if name is None else {"moe": True, "name": name}
            groups.append({"params": own, "weight_decay": decay, **marks})
    return groups


def is_hidden_matrix(name: str, weight: Tensor) -> bool:
    """Return whether Muon trains a weight: a matrix in one of the stacked layers, which have numbers as names.

    Embeddings and heads are outside of the layers. The experts of a layer are one weight [E, n, m] of E matrices.
    """
    parts = name.split(".")
    if not any(part.isdecimal() for part in parts):
        return False
    # Other weights of three dimensions are convolutions, for example.
    is_stack = weight.ndim == 3 and "experts" in parts
    return (weight.ndim == 2 or is_stack) and not _is_bias(name)


def _is_bias(name: str) -> bool:
    """Return whether a weight is a bias. The biases of experts are one weight [E, n]."""
    return name.endswith("bias")


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of `matrix` [..., n, m] float32 and all singular values near 1.

    With X = M / |M|, five times X <- a X + (b X X^T + c (X X^T)^2) X, a quintic Newton-Schulz iteration that ends with
    singular values of 0.7 to 1.2. A matrix of zeros stays one. On a GPU the products are in bfloat16.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if is_tall else matrix
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    if wide.is_cuda:
        wide = wide.bfloat16()
    for _ in range(_NUM_ITERATIONS):
        gram = wide @ wide.mT
        wide = _product(wide, _product(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.mT if is_tall else wide).to(matrix.dtype).contiguous()


def _product(added: Tensor, left: Tensor, right: Tensor, **factors: float) -> Tensor:
    """Return beta added + alpha left right, of matrices or of a stack of them."""
    return (torch.addmm if added.ndim == 2 else torch.baddbmm)(added, left, right, **factors)


class Muon(torch.optim.AdamW):
    """Muon for groups with the key "momentum", AdamW for the others.

    Per update, B <- mu B + (1 - mu) G and W <- (1 - lr decay) W - 0.2 sqrt(max(n, m)) lr O, where O is
    `orthogonalized((1 - mu) G + mu B)`. The factor gives an update the size of one of AdamW, so that both take the same
    learning rate. A weight [E, n, m] is E matrices; the gate and up projections of an expert, which transformers keeps
    in one, are one of them.

    Sources: `orthogonalized`; for the factor, Liu et al. 2025, arXiv:2502.16982, section 2.2.
    """

    def __init__(self, groups: list[dict[str, Any]], shapes: Mapping[str, torch.Size], **options: Any) -> None:
        """Take the options of AdamW, and the shapes of the weights for Muon by name."""
        super().__init__(groups, **options)
        self._shapes = shapes
        self._matrices: dict[Tensor, list[tuple[WeightSlice, torch.Size]]] = {}
        self._num_ranks = 1

    def find(self, slices: Sequence[WeightSlice], num_ranks: int) -> None:
        """Say where the weights are, before the first update.

        Args:
            slices: of all weights in the same order on all ranks; of size 0 where other ranks keep them.
            num_ranks: ranks that share the weights; 1 if each keeps all of them.
        """
        self._num_ranks = num_ranks
        for owned in slices:
            if owned.name in self._shapes:
                self._matrices.setdefault(owned.flat, []).append((owned, self._shapes[owned.name]))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the weights. Collective where ranks share them."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if "momentum" not in group]
        try:
            if self.param_groups:  # DeepSpeed steps group by group
                super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            for flat in group["params"] if "momentum" in group else ():
                if flat.grad is not None:
                    self._step_matrices(flat, group)

    def _step_matrices(self, flat: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[flat]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(flat)
        momentum = state[MOMENTUM].lerp_(flat.grad, 1 - group["momentum"])
        blend = flat.grad.lerp(momentum, group["momentum"])
        flat.mul_(1 - group["lr"] * group["weight_decay"])
        matrices = self._matrices[flat]
        # Each rank orthogonalizes one matrix, or the experts of one layer, of a round.
        for first in range(0, len(matrices), self._num_ranks):
            of_round = matrices[first : first + self._num_ranks]
            for (owned, shape), update in zip(of_round, self._updates(blend, of_round), strict=True):
                part = update.flatten()[owned.start : owned.start + owned.size]
                owned.cut(flat).add_(part, alpha=-group["lr"] * _ADAMW_RMS * max(shape[-2:]) ** 0.5)

    def _updates(self, blend: Tensor, matrices: Sequence[tuple[WeightSlice, torch.Size]]) -> list[Tensor]:
        """Return the orthogonalized whole of each matrix, of which ranks have parts in `blend`."""
        wholes = []
        for owned, shape in matrices:
            whole = blend.new_zeros(shape.numel())
            whole[owned.start : owned.start + owned.size] = owned.cut(blend)
            wholes.append(whole.view(shape))
        if self._num_ranks == 1:
            return [orthogonalized(whole) for whole in wholes]
        for owner, whole in enumerate(wholes):
            torch.distributed.reduce(whole, owner)
        rank = torch.distributed.get_rank()
        if rank < len(wholes):
            wholes[rank] = orthogonalized(wholes[rank])
        for owner, whole in enumerate(wholes):
            torch.distributed.broadcast(whole, owner)
        return wholes
