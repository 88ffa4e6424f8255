"""The receiving half of weight sync: buckets of weights, and one file per medium through which they arrive.

A medium is a name in `Medium` and two modules of that name, one per half. The module here has the function
`open_memory(handle, device)`, which returns the sender's buffer as a flat uint8 tensor. The module in
`rlhf_train.weight_sync` has `open_buffer(size_bytes, num_engines)`, which makes that buffer (see its `BucketBuffer`).
"""

from typing import Literal, get_args

Medium = Literal["shared_memory", "ipc", "tcp"]
MEDIA: tuple[Medium, ...] = get_args(Medium)
