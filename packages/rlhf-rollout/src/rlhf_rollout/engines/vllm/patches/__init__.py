"""Optional speed-ups of vLLM, which replace parts of it and change no result.

Each is a file here, and a name in `rlhf_rollout.engines.spec.VLLM_PATCHES`. It imports and names what it needs of vLLM.
Where a version does not have that, it is left out with a warning. `EngineSpec.skip_patches` leaves out others.
A patch of the scheduler has `NEEDS`, attributes of the scheduler, and a function `patch`, which changes a scheduler.
"""

import logging
from collections.abc import Collection
from importlib import import_module
from types import ModuleType
from typing import Any

from rlhf_rollout.engines.vllm.internals import version
from rlhf_rollout.private_names import missing_paths

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
        module = load(name, skipped)
        if module is None:
            continue
        if lost := missing_paths(scheduler, module.NEEDS):
            _leave_out(name, f"its scheduler has no {', '.join(lost)}")
            continue
        module.patch(scheduler)


def load(name: str, skipped: Collection[str]) -> ModuleType | None:
    """Return the module of a patch; None if it is `skipped`, or vLLM has not what it imports."""
    if name in skipped:
        return None
    try:
        return import_module(f"{__name__}.{name}")
    except ImportError as error:
        _leave_out(name, str(error))
        return None


def _leave_out(name: str, reason: str) -> None:
    _logger.warning("vLLM %s does without the speed-up %s, and generates the same: %s", version(), name, reason)
