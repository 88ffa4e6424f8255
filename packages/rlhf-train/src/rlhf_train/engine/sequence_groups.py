"""Groups of neighbouring ranks that divide the tokens of each pass; see `rlhf_models.attention.sequence_parallel`."""

import torch

from rlhf_data.errors import ConfigError
from rlhf_models.attention.sequence_parallel import SequenceGroup


def join_sequence_group(size: int) -> SequenceGroup | None:
    """Return the group of `size` ranks that this one belongs to, or None for size 1. Collective over all ranks.

    Raises ConfigError unless `size` divides the number of ranks.
    """
    num_ranks = torch.distributed.get_world_size()
    if num_ranks % size:
        message = f"sequence parallelism over {size} processes, and there are {num_ranks}"
        raise ConfigError(
            message, hint=f"use a divisor of {num_ranks} as ``sequence_parallel_size``, or more processes"
        )
    if size == 1:
        return None
    groups = [torch.distributed.new_group(range(first, first + size)) for first in range(0, num_ranks, size)]
    return SequenceGroup(groups[torch.distributed.get_rank() // size])
