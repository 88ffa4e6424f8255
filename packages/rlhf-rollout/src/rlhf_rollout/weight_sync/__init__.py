"""The receiving half of weight sync: buckets of weights, and one file per medium through which they arrive.

A medium is a name in `Medium` and two modules of that name, one per half, each with a function `opener`. Here,
`opener()` returns a function of a handle and a device, which returns the sender's buffer as a flat uint8 tensor. In
`rlhf_train.weight_sync`, `opener(workers_per_engine)` returns a function of a size in bytes and the names of engines,
which makes that buffer (see its `BucketBuffer`).
"""

from typing import Literal, get_args

Medium = Literal["shared_memory", "ipc", "tcp", "nccl"]
MEDIA: tuple[Medium, ...] = get_args(Medium)
