"""The receiving half of weight sync: buckets of weights, and one file per medium through which they arrive.

The module of a medium has the function `open_memory(handle, device)`, which returns the sender's buffer as a flat uint8
tensor. The sending half is `rlhf_train.weight_sync`, with the same file names.
"""

from collections.abc import Mapping

MEDIA: Mapping[str, str] = {
    "shared_memory": "rlhf_rollout.weight_sync.shared_memory",
    "ipc": "rlhf_rollout.weight_sync.ipc",
}
