"""The binary form of rollouts: chunks of columns, in a file whose name ends with `COLUMNS`.

The file begins with `_MAGIC` and its version, and has one chunk per batch. A chunk has a CRC-32 of all that follows it,
the sizes of its parts, and the parts. Numbers are little-endian. The parts are

    text       the records as JSON lines, whose `token_ids` and `logprobs` are null                     zlib
    counts     [records, 2] int32: tokens, and tokens of the policy                                     zlib
    token_ids  [4, tokens] uint8: first the lowest bytes of all int32 ids, last the highest             zlib
    exponents  [2, tokens of the policy] uint8: the upper bytes of the log-probs, see `_planes`         zlib
    mantissas  [2, tokens of the policy] uint8: their lower bytes, which are too random to be compressed
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from rlhf_data.errors import DataError
from rlhf_data.records import Rollout

COLUMNS = ".columns"
_MAGIC = b"\x89rlhf-rollouts\r\n"  # is no text, and a program that changes line ends damages it
_VERSION = 1
HEADER = _MAGIC + struct.pack("<I", _VERSION)
_CHUNK = struct.Struct("<I5Q")  # CRC-32, sizes of the parts
_NO_TOKENS = np.zeros(0, np.int32), np.zeros(0, np.float32)


def chunk(text: bytes, rollouts: Sequence[Rollout], level: int) -> list[bytes]:
    """Return the records `text` of rollouts as a chunk, in pieces. `level` is zlib's; 0 only copies, for speed.

    Compression and numpy's copies let other threads of the process run.
    """
    spans = [span for rollout in rollouts for span in rollout.spans]
    own = [span.logprobs for span in spans if span.logprobs is not None]
    counts = np.array([(rollout.num_tokens, rollout.num_response_tokens) for rollout in rollouts], "<i4")
    logprobs = np.concatenate([np.zeros(0, np.float32), *own]).view(np.uint32)
    upper, lower = np.split(_planes(logprobs << 1 | logprobs >> 31)[::-1], 2)
    # No byte of a log-prob depends on those before it, so that only their frequencies save room.
    packed = zlib.compressobj(level, strategy=zlib.Z_HUFFMAN_ONLY)
    parts = [
        zlib.compress(text, level),
        zlib.compress(counts, level),
        zlib.compress(_planes(np.concatenate([span.token_ids for span in spans])), level),
        packed.compress(np.ascontiguousarray(upper)) + packed.flush(),
        lower.tobytes(),
    ]
    return [_head(parts), *parts]


def _planes(values: np.ndarray) -> np.ndarray:
    """Return the bytes [4, n] of numbers [n] of four bytes, the lowest bytes first.

    Like bytes lie together, which compresses better. The sign of a log-prob is moved behind its mantissa, so that one
    plane holds the exponents and nothing else.
    """
    return np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, 4).T)


def _values(planes: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


def _head(parts: Sequence[bytes]) -> bytes:
    """Return the head of a chunk."""
    sizes = [len(part) for part in parts]
    crc = zlib.crc32(_CHUNK.pack(0, *sizes))
    for part in parts:
        crc = zlib.crc32(part, crc)
    return _CHUNK.pack(crc, *sizes)


class Line(NamedTuple):
    """The record of a rollout in a file.

    Attributes:
        number: of the record, from 1.
        text: JSON that ends with a newline; without it, or empty, if the file is cut off or damaged here.
        end: bytes of the file up to the end of the line or its chunk.
        tokens: the ids [L] int32 and the log-probs of the policy's tokens [n] float32; None if `text` has them.
    """

    number: int
    text: bytes
    end: int
    tokens: tuple[np.ndarray, np.ndarray] | None = None


def has_columns(stream: BinaryIO) -> bool:
    """Return whether a file has columns, whatever its name is. It stays at its beginning."""
    begins = stream.read(len(_MAGIC)) == _MAGIC
    stream.seek(0)
    return begins


def column_lines(path: Path, stream: BinaryIO, *, has_tokens: bool, start: int = 0) -> Iterator[Line]:
    """Yield the records of an open file of columns, unparsed, after the chunk that ends at the byte `start`, or all.

    A damaged chunk is the last, without text.

    Without `has_tokens`, tokens are not read, and `Line.tokens` are empty. Raises DataError when a newer version has
    written the file.
    """
    head = stream.read(len(HEADER))
    if head.startswith(_MAGIC) and len(head) == len(HEADER) and head != HEADER:
        [version] = struct.unpack("<I", head[len(_MAGIC) :])
        message = f"{path} has version {version} of the columns; this program reads version {_VERSION}"
        raise DataError(message, hint="read it with the version of the program that wrote it")
    if head and head != HEADER:
        yield Line(1, b"", 0)
        return
    number = 1
    start = stream.seek(max(start, len(head)))
    size_bytes = os.fstat(stream.fileno()).st_size
    while head := stream.read(_CHUNK.size):
        try:
            _, *sizes = _CHUNK.unpack(head)
            if start + len(head) + sum(sizes) > size_bytes:  # a damaged size may be larger than the memory
                raise ValueError("the file ends before")
            parts = [stream.read(size) for size in sizes]
            if _head(parts) != head:
                raise ValueError("the checksum is another")
            texts = zlib.decompress(parts[0]).splitlines(keepends=True)
            tokens = _split(parts[1:]) if has_tokens else [_NO_TOKENS] * len(texts)
        except (struct.error, ValueError, zlib.error):
            yield Line(number, b"", start)
            return
        start = stream.tell()
        for text, each in zip(texts, tokens, strict=True):
            yield Line(number, text, start, each)
            number += 1


def _split(parts: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return `Line.tokens` of the records of a chunk."""
    counts, ids, upper = (np.frombuffer(zlib.decompress(part), np.uint8) for part in parts[:3])
    ends = counts.view("<i4").reshape(-1, 2).cumsum(axis=0)[:-1]
    lower = np.frombuffer(parts[3], np.uint8)
    turned = _values(np.concatenate([upper, lower]).reshape(4, -1)[::-1], "<u4")
    logprobs = (turned >> 1 | turned << 31).view(np.float32)
    token_ids = _values(ids.reshape(4, -1), "<i4")
    return list(zip(np.split(token_ids, ends[:, 0]), np.split(logprobs, ends[:, 1]), strict=True))
