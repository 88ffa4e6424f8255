"""The sender's half of weight sync: the trainer's weights to live engines, bucket by bucket."""

from rlhf_data.errors import ConfigError, unknown
from rlhf_train.weight_sync.protocol import (
    DEFAULT_BUCKET_BYTES,
    BucketSender,
    EngineClient,
    LocalEngineClient,
    SyncReport,
    WeightSender,
)

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "EngineClient",
    "LocalEngineClient",
    "SyncReport",
    "WeightSender",
    "make_sender",
]


def make_sender(backend: str, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES, checksum: bool = False) -> WeightSender:
    """Return the sender of a backend.

    Args:
        backend: "shared_memory" (same host) or "ipc" (same GPU); the engines must be built for it.
        bucket_bytes: weights travel in buckets of this size; a larger weight gets a bucket of its own size.
        checksum: let each engine verify the bytes that arrive, for debugging.

    Raises:
        ConfigError: an unknown backend, a bucket without room, or ipc without a GPU.
    """
    if bucket_bytes < 1:
        raise ConfigError(f"bucket_bytes is {bucket_bytes}; it must be at least 1")
    if backend == "shared_memory":
        from rlhf_train.weight_sync.shared_memory import SharedMemoryBuffer

        return BucketSender(SharedMemoryBuffer, bucket_bytes=bucket_bytes, checksum=checksum)
    if backend == "ipc":
        from rlhf_train.weight_sync.ipc import CudaIpcBuffer, check_gpu

        check_gpu()
        return BucketSender(CudaIpcBuffer, bucket_bytes=bucket_bytes, checksum=checksum)
    raise ConfigError(unknown("weight sync backend", backend, ("ipc", "shared_memory")))
