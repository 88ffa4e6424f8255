"""Weight sync: new weights reach running engines.

`source` is the trainer's side: it packs weights into buckets, and has all engines read each one. `reader` is the
engine's side. Between them is a medium, which is a name in `Medium` and a file with that name. Its class `Buffer`
holds both halves: the memory that the sender writes, and how an engine opens it (see `buffer`).
"""

from typing import Literal, get_args

Medium = Literal["shared_memory", "ipc", "tcp", "nccl"]
MEDIA: tuple[Medium, ...] = get_args(Medium)
