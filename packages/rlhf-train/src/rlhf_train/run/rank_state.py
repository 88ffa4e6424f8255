"""The part of a checkpoint that one rank writes and reads: its shard of each model, and its random numbers."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import torch

from rlhf_train.engine.deepspeed import DeepSpeedEngine
from rlhf_train.engine.shards import ShardReader, Shards
from rlhf_train.run.checkpoint import write_receipt
from rlhf_train.run.ema import WeightAverage

_AVERAGE, _CPU_NUMBERS, _GPU_NUMBERS = "average", "random/cpu", "random/cuda"
_AVERAGED = "actor"  # the model whose moving average is saved with it


def file_name(role: str, rank: int, num_ranks: int) -> str:
    """Return the name of the file with a rank's part of the model of `role`."""
    return f"{role}-{rank}-of-{num_ranks}.safetensors"


class StateWriter:
    """Writes a rank's state on a thread while training goes on, and reads it.

    Args:
        rank, num_ranks: number of this process in its rank set, and of processes there.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(
        self, engines: Mapping[str, DeepSpeedEngine], folder: Path, average: WeightAverage | None = None
    ) -> list[str]:
        """Copy the state of `engines`, by role, and of the average to host memory; write them to `folder` on a thread.

        Returns the names of the files. Waits for those of the call before, so that host memory holds at most one copy.
        Waits for those of this call if a state is not copied, because training would change it.
        """
        self.finish()
        found = {}
        for role, engine in engines.items():
            shards = Shards()
            engine.save_shards(shards)
            if average is not None and role == _AVERAGED and engine.keeps_weights:
                ranges = engine.local_ranges()
                for name, part in average.values().items():
                    start, size = ranges[name]
                    shards.add(f"{_AVERAGE}/{name}", part.view(-1)[:size], start)
            shards.add(_CPU_NUMBERS, torch.get_rng_state())
            if torch.cuda.is_available():
                shards.add(_GPU_NUMBERS, torch.cuda.get_rng_state())
            found[file_name(role, self._rank, self._num_ranks)] = shards
        self._pending = self._executor.submit(_write, found, folder)
        if not all(shards.copies for shards in found.values()):
            self.finish()
        return list(found)

    def finish(self) -> None:
        """Wait until the files of the last `save` are written or have failed."""
        if self._pending is not None:
            wait([self._pending])

    def load(self, engines: Mapping[str, DeepSpeedEngine], folder: Path, average: WeightAverage | None = None) -> None:
        """Set the state of `engines` and of the average. Collective.

        The state of the random number generators is set only with as many ranks as wrote it. Raises CheckpointError
        when a file is missing, unreadable, or belongs to another model.
        """
        for role, engine in engines.items():
            reader = ShardReader(sorted(folder.glob(f"{role}-*-of-*.safetensors")))
            engine.load_shards(reader)
            if average is not None and role == _AVERAGED:
                ranges = engine.local_ranges()
                for name, part in average.values().items():
                    start, size = ranges[name]
                    part.view(-1)[:size].copy_(reader.read(f"{_AVERAGE}/{name}", start, size))
            own = folder / file_name(role, self._rank, self._num_ranks)
            if own.exists():
                _set_random_numbers(ShardReader([own]))


def _set_random_numbers(reader: ShardReader) -> None:
    torch.set_rng_state(reader.whole(_CPU_NUMBERS))
    if torch.cuda.is_available() and _GPU_NUMBERS in reader:
        torch.cuda.set_rng_state(reader.whole(_GPU_NUMBERS))


def _write(found: Mapping[str, Shards], folder: Path) -> None:
    """Write the files at the same time: the processor hashes one while the disk takes another."""
    with ThreadPoolExecutor(max_workers=len(found)) as pool:
        wait([pool.submit(_write_file, folder / name, shards) for name, shards in found.items()])


def _write_file(path: Path, shards: Shards) -> None:
    try:
        shards.write(path)
        write_receipt(path)
    except Exception as error:  # SafetensorError for a full disk; the process that waits for the file reports it
        path.unlink(missing_ok=True)  # makes room for the receipt on a full disk
        with suppress(OSError):  # no file can be made at all: the one that waits says how much is free
            write_receipt(path, error)
