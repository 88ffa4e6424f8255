"""Checks of a user's own functions on random data, before a run; see docs/own_losses.md.

Each check looks for one property that the product's own losses have: it changes what must not matter, and compares.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from rlhf_data.errors import ConfigError
from rlhf_train.algorithms.own_code import OwnCode
from rlhf_train.algorithms.own_groups import GROUP_FUNCTIONS, check_group_function

Inputs = Mapping[str, Tensor]
# Trained tokens of the rollouts, and their groups: a response of one token, one whose tokens were left out, a group of
# one rollout, and one of equal rewards, as every run has them.
_LENGTHS = (5, 1, 7, 3, 7, 2, 4, 0)
_GROUPS = (0, 0, 0, 1, 2, 2, 2, 0)
_EQUAL_GROUP = 2
_TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}  # float32 sums in another order
_CLEAR = "clear it first: x.masked_fill(~loss_mask, 0.0), or torch.where; a product with the mask keeps NaN"


def check_own_code(code: OwnCode, *, seed: int = 0) -> list[ConfigError]:
    """Return what is wrong with a user's function, an error with a hint for each finding.

    After a finding, checks that could only find the same again are left out.
    """
    if code.function in GROUP_FUNCTIONS:
        return check_group_function(code)
    inputs = random_inputs(code.function, seed)
    findings: list[ConfigError] = []
    try:
        once = _run(code, inputs)
        for look in (_basics, _invariances):
            if not findings:
                findings.extend(code.error(*found) for found in look(code, inputs, *once))
    except ConfigError as error:  # a call has failed
        findings.append(error)
    return findings


def random_inputs(function: str, seed: int = 0) -> dict[str, Tensor]:
    """Return random tensors of all names of `INPUTS`; B is 8, T is 9, and two columns are padding."""
    random = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(_LENGTHS) + 2) < torch.tensor(_LENGTHS)[:, None]
    if function == "advantages":
        mask = mask.roll(2, dims=1)  # prompts come first

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    logprobs = -normal(*mask.shape).abs() - 0.01
    inputs = {"loss_mask": mask, "rollout_logprobs": logprobs + 0.01 * normal(*mask.shape)}
    if function == "policy_loss":
        # Ratios from about 0.5 to 2, and an advantage of exactly 0.
        advantages = normal(*mask.shape)
        advantages[0, 0] = 0.0
        old = logprobs + 0.3 * normal(*mask.shape)
        old[0, 1] = logprobs[0, 1]  # a ratio of exactly 1, as in the first update of a step
        inputs |= {"logprobs": logprobs, "old_logprobs": old, "advantages": advantages}
        return {name: tensor if name == "loss_mask" else tensor * mask for name, tensor in inputs.items()}
    groups = torch.tensor(_GROUPS)
    rewards = torch.where(groups == _EQUAL_GROUP, 1.0, normal(len(mask)))
    token_rewards = 0.1 * normal(*mask.shape) * mask
    truncated = torch.arange(len(mask)) % 3 == 1
    inputs["rollout_logprobs"] = inputs["rollout_logprobs"] * mask
    return {**inputs, "rewards": rewards, "group_ids": groups, "token_rewards": token_rewards, "truncated": truncated}


def _run(code: OwnCode, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Return what the function makes of copies of `inputs`, and for a loss the gradient of a weighted sum of its
    trained tokens, [B, T]; None where there is no gradient."""
    tensors = {name: tensor.clone() for name, tensor in inputs.items()}
    if code.function == "advantages":
        return code.call(tensors)[0], None
    leaf = tensors["logprobs"].requires_grad_()
    # A copy of the leaf: PyTorch refuses to change a leaf in place, and lets the log-probs of a model be changed.
    loss, _ = code.call({**tensors, "logprobs": leaf * 1.0})
    if not loss.requires_grad:
        return loss, None
    # Weights that stay with their tokens when these change places.
    mask = inputs["loss_mask"]
    total = ((0.5 + inputs["advantages"][mask].abs()) * loss[mask]).sum()
    return loss.detach(), torch.autograd.grad(total, leaf, allow_unused=True)[0]


def _trained(inputs: Inputs, result: Tensor) -> Tensor:
    """Return the part of a result that is used: of the trained tokens [N], or of the rollouts that have some."""
    return result[inputs["loss_mask"] if result.ndim == 2 else inputs["loss_mask"].any(1)]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(one, other, **_TOLERANCE)


def _basics(code: OwnCode, inputs: Inputs, result: Tensor, gradient: Tensor | None) -> Iterator[tuple[str, str]]:
    """Yield problems of a single call, and their hints."""
    changed = _changed_inputs(code, inputs)
    if changed:
        yield f"changes `{changed[0]}` in place", "make a new tensor: x = x + 1 instead of x += 1, without add_()"
    again = _run(code, inputs)
    if not torch.equal(_trained(inputs, result).nan_to_num(), _trained(inputs, again[0]).nan_to_num()):
        yield "gives another result for the same tensors", "use no random numbers and keep nothing between calls"
    if not _trained(inputs, result).isfinite().all():
        hint = "clamp log-ratios before exp, and add 1e-6 to what is divided by: groups of one or of equal rewards have"
        hint += " the deviation 0, rollouts may have 0 trained tokens, and advantages may be 0"
        yield "gives NaN or infinity for finite tensors", hint
    if code.function == "advantages":
        if result.requires_grad:
            yield "returns a tensor with a gradient", "advantages are constants: use no parameters of your own"
        return
    if gradient is None or not gradient[inputs["loss_mask"]].any():
        yield "has no gradient to `logprobs`", "compute it from `logprobs`, without detach(), item() or no_grad() on it"
    elif not gradient[inputs["loss_mask"]].isfinite().all():
        yield "has a gradient that is NaN or infinite", "where() does not stop NaN in the branch that is not taken"
    if _other_leaves(code, inputs):
        yield "has a gradient to other tensors than `logprobs`", "use constants: nothing would train those tensors"


def _changed_inputs(code: OwnCode, inputs: Inputs) -> list[str]:
    tensors = {name: tensor.clone() for name, tensor in inputs.items()}
    code.call(tensors)
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, inputs[name])]


def _other_leaves(code: OwnCode, inputs: Inputs) -> bool:
    """Return whether the graph of a loss ends in other tensors than `logprobs`."""
    leaf = inputs["logprobs"].clone().requires_grad_()
    loss, _ = code.call({**inputs, "logprobs": leaf * 1.0})  # no leaf itself, as in `_run`
    nodes = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", leaf) is not leaf:
            return True
        nodes += [parent for parent, _ in node.next_functions]
    return False


def _invariances(code: OwnCode, inputs: Inputs, result: Tensor, gradient: Tensor | None) -> Iterator[tuple[str, str]]:
    """Yield what changes a result and must not, and the hints."""
    mask = inputs["loss_mask"]
    wanted = _trained(inputs, result), None if gradient is None else gradient[mask]

    def differs(other: Inputs, back: Callable[[Tensor], Tensor] = lambda result: result) -> bool:
        found, slope = _run(code, other)
        found = _trained(inputs, back(found))
        slope = None if slope is None else back(slope)[mask]
        return not (_same(found, wanted[0]) and _same(slope, wanted[1]))

    if differs(_with_masked(inputs, 3.0)):
        yield "depends on values where `loss_mask` is False", "leave these places out of every sum and mean"
    elif differs(_with_masked(inputs, torch.nan)):
        yield "lets NaN where `loss_mask` is False reach trained tokens", _CLEAR
    width = mask.shape[1] + 5
    padded = {n: torch.nn.functional.pad(t, (0, 5)) if t.ndim == 2 else t for n, t in inputs.items()}
    if differs(padded, lambda result: result if result.ndim == 1 else result[:, : width - 5]):
        hint = "divide by counts of `loss_mask`, not by the shape of a tensor; mean() counts padding"
        yield "depends on the padding, T", hint
    if code.function == "policy_loss":
        halves = [{name: tensor[rows] for name, tensor in inputs.items()} for rows in (slice(3), slice(3, None))]
        losses, slopes = zip(*(_run(code, half) for half in halves), strict=True)
        has_all = all(slope is not None for slope in slopes)
        if not (has_all and _same(torch.cat(losses)[mask], wanted[0]) and _same(torch.cat(slopes)[mask], wanted[1])):
            hint = "compute a rollout's loss from its own row: sums over the batch belong into advantages"
            yield "depends on how the batch is split into micro-batches and ranks", hint
        return
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    if differs({name: tensor[order] for name, tensor in inputs.items()}, lambda result: result[order.argsort()]):
        yield "depends on the order of the rollouts, which ranks change", "find a group by `group_ids`, not by place"
    if differs({**inputs, "group_ids": 10 - inputs["group_ids"]}):
        yield "depends on the numbers of the groups", "use `group_ids` only to tell which rollouts share a prompt"


def _with_masked(inputs: Inputs, value: float) -> dict[str, Tensor]:
    """Return inputs with multiples of `value` in all places that are not trained, another one in each float tensor."""
    changed = dict(inputs)
    for number, (name, tensor) in enumerate(inputs.items(), start=1):
        if tensor.ndim == 2 and tensor.is_floating_point():
            changed[name] = tensor.masked_fill(~inputs["loss_mask"], number * value)
    return changed
