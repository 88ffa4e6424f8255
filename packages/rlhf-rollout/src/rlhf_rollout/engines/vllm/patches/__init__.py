"""Optional speed-ups of vLLM, which replace parts of it and change no result, but for the draws of `sampling_head`.

Each is a file here, and a name in `rlhf_rollout.engines.spec.VLLM_PATCHES`. It takes vLLM's classes and functions from
`names` and `runner_names`, and says which attributes it needs. Where a version does not have that, it is left out with
a warning. `EngineSpec.skip_patches` leaves out others.
A patch of the scheduler, the engine core or the model runner has `NEEDS`, attributes of it, and a function `patch`,
which changes it.
"""

import logging
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from rlhf_rollout.engines.vllm.internals import version
from rlhf_rollout.private_names import missing_paths

_SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"

_logger = logging.getLogger(__name__)


def patch_scheduler(scheduler: Any, skipped: Collection[str], *, uses_graphs: bool) -> None:
    """Replace parts of vLLM's scheduler by quicker ones.

    Args:
        scheduler: vLLM's, which has not scheduled anything.
        skipped: names of patches to leave out.
        uses_graphs: whether steps are replayed as CUDA graphs, for which `bulk_admission` is.
    """
    # Outputs pass the later ones first: `list_logprobs` makes the lists that `bulk_decoding` slices. `multi_step`
    # lengthens the steps that `bulk_decoding` makes, and `bulk_admission` counts how many there are.
    names = ["idle_slots", "bulk_decoding", "list_logprobs", "multi_step", *(["bulk_admission"] if uses_graphs else [])]
    for name in names:
        _patch(name, scheduler, "scheduler", skipped)


def patch_core(core: Any, skipped: Collection[str]) -> None:
    """Have vLLM's engine core start samples quicker; `skipped` are names of patches to leave out."""
    _patch("shared_hashes", core, "engine core", skipped)


def patch_runner(runner: Any, skipped: Collection[str], masked_ids: Sequence[Sequence[int]]) -> None:
    """Have vLLM's model runner on a GPU sample quicker, if it is its second one and `rlhf_kernels` is installed.

    Args:
        runner: vLLM's, which has loaded its model.
        skipped: names of patches to leave out.
        masked_ids: ranges, each with its end, of ids that are never sampled.
    """
    if not _is_second(runner) or find_spec("rlhf_kernels") is None:
        return
    _patch("sampling_head", runner, "model runner", skipped, masked_ids)


def patch_graphs(runner: Any, skipped: Collection[str], sizes: Sequence[int], longest_prompt: int) -> None:
    """Have vLLM's model runner on a GPU replay more steps as graphs, if it is its second one.

    Steps with prompts get graphs in pieces, and steps that decode get others that read shared prefixes once.

    Args:
        runner: vLLM's, which has a KV cache and has not captured CUDA graphs.
        skipped: names of patches to leave out.
        sizes: numbers of tokens, ascending, for which there are pieces; for none of them if there are none.
        longest_prompt: tokens of a prompt, at most, as far as is known.
    """
    if not _is_second(runner):
        return
    if find_spec("rlhf_kernels") is not None:
        # The first of the two, because it captures a second time: the other one captures around both.
        _patch("shared_prefixes", runner, "model runner", skipped, longest_prompt)
    if sizes:
        _patch("graph_pieces", runner, "model runner", skipped, sizes)


def may_have_pieces(caches: Collection[Any]) -> bool:
    """Return whether `graph_pieces` may suit a model with these KV caches, as vLLM describes them by layer."""
    try:
        module = import_module(f"{__name__}.graph_pieces")
    except ImportError:  # a version of vLLM that lacks what it needs
        return False
    return all(map(module.keeps_all, caches))


def replays_of(runner: Any, skipped: Collection[str]) -> Any:
    """Return what computes several decode steps of vLLM's model runner on a GPU; None if each needs the host.

    Args:
        runner: vLLM's, which has captured its CUDA graphs.
        skipped: names of patches to leave out.
    """
    module = _load_for("replayed_steps", runner, "model runner", skipped) if _is_second(runner) else None
    return None if module is None else module.replays_of(runner)


def _is_second(runner: Any) -> bool:
    return type(runner).__module__ == _SECOND_RUNNER


def _patch(name: str, owner: Any, called: str, skipped: Collection[str], *more: Any) -> None:
    """Have a patch change its `owner`, given `more`, unless it is skipped or vLLM has not what it needs."""
    module = _load_for(name, owner, called, skipped)
    if module is None:
        return
    try:
        module.patch(owner, *more)
    except ImportError as error:  # of what `internals` imports for it, before it changes anything
        leave_out(name, str(error))


def _load_for(name: str, owner: Any, called: str, skipped: Collection[str]) -> ModuleType | None:
    """Return the module of a patch of `owner`; None if it is skipped, or vLLM has not what it needs."""
    module = load(name, skipped)
    if module is None:
        return None
    if lost := missing_paths(owner, module.NEEDS):
        leave_out(name, f"its {called} has no {', '.join(lost)}")
        return None
    return module


def load(name: str, skipped: Collection[str]) -> ModuleType | None:
    """Return the module of a patch; None if it is `skipped`, or vLLM has not what it imports."""
    if name in skipped:
        return None
    try:
        return import_module(f"{__name__}.{name}")
    except ImportError as error:
        leave_out(name, str(error))
        return None


def leave_out(name: str, reason: str) -> None:
    """Warn that engines do without a patch."""
    _logger.warning("vLLM %s does without the speed-up %s, and generates the same: %s", version(), name, reason)
