"""The receiving half of weight sync: buckets of weights, and one file per medium through which they arrive.

A medium is a module with the function `open_memory(handle, device)`, which returns the sender's buffer as a flat uint8
tensor. The sending half, with the same file names, is `rlhf_train.weight_sync`.
"""

from collections.abc import Mapping

MEDIA: Mapping[str, str] = {
    "shared_memory": "rlhf_rollout.weight_sync.shared_memory",
    "ipc": "rlhf_rollout.weight_sync.ipc",
}
