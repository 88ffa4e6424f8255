"""Image files, which may come from anybody: read as RGB with bounds, or refused."""

import base64
import binascii
import fcntl
import functools
import hashlib
import io
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from rlhf_data.errors import ConfigError, DataError, first_line
from rlhf_data.rows.row import kind_of

MAX_PIXELS = 1 << 26  # 67 megapixels, which take 200 MB when they are decoded
MAX_BYTES = 1 << 28  # of a file or of bytes in a row
# Pillow's other decoders are rarely used, and one starts another program (EPS).
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
_KEPT_DAYS = 30
_KEPT_BYTES = 32 << 30  # of all images together
_SAFE_DAYS = 1  # after which images that take too much room are removed
_FORMS = "a path, a file:// URL, a data:image/...;base64, URL, bytes, or an object with `bytes` or `path`"

ImageRef = str | bytes  # the absolute path of an image's file, or what the file holds


def image_ref(value: Any, origin: str, folder: Path) -> ImageRef:
    """Return where an image is, from what a row holds.

    Args:
        value: a path, a file URL, a data URL in base64, bytes, an object with `bytes` or `path` as the `datasets`
            library stores images, or an image of Pillow.
        origin: of the row, for messages.
        folder: a relative path is looked for in it, and then in the working directory.

    Raises:
        DataError: another value, a URL of another kind, or no such file.
    """
    if isinstance(value, Mapping):
        stored = value.get("bytes")
        value = value.get("path") if stored is None else stored
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if callable(getattr(value, "save", None)):  # of Pillow, into which the `datasets` library decodes
        file = io.BytesIO()
        value.save(file, format="PNG")
        return file.getvalue()
    if not isinstance(value, str) or not value:
        raise DataError(f"{origin}: an image is {kind_of(value)}", hint=f"give {_FORMS}")
    if value.startswith("data:"):
        return _decoded(value, origin)
    scheme, separator, _ = value.partition("://")
    if separator and scheme != "file":
        message = f"{origin}: the image {value[:80]} is not on this machine, and no URL is fetched"
        raise DataError(message, hint="load it down, and give the path of its file")
    path = unquote(urlsplit(value).path) if separator else value
    for place in (folder, Path.cwd()):
        if (place / path).is_file():
            return str((place / path).absolute())
    raise DataError(f"{origin}: there is no image {path}", hint=f"relative paths are those in {folder.absolute()}")


def kept_image(value: Any, origin: str, known: Sequence[str] = ()) -> str:
    """Return the path of an image's file that nobody changes, from what `image_ref` takes.

    A file that is not among those `known` is copied, because an agent may write its next picture into the same file.
    Raises as `image_ref` and `stored_image`, and DataError for a file that cannot be read or has more than `MAX_BYTES`
    bytes.
    """
    ref = image_ref(value, origin, Path.cwd())
    if isinstance(ref, str):
        if ref in known or Path(ref).parent == _cache():
            return ref
        try:
            with Path(ref).open("rb") as file:
                ref = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise DataError(f"{origin}: the image {ref} cannot be read: {error}") from None
    _check(len(ref) <= MAX_BYTES, f"{origin}: an image has more than {MAX_BYTES} bytes")
    return stored_image(ref)


def stored_image(content: bytes) -> str:
    """Return the path of a file with this content, in the user's cache; it is written if there is none.

    Each process that stores images first removes those of earlier ones, see `_remove_unused`.
    Raises ConfigError if the file cannot be written.
    """
    path = _cache() / hashlib.sha256(content).hexdigest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_unused(path.parent)
        try:
            os.utime(path)
        except FileNotFoundError:  # also if another process has just removed it as unused
            _write(path, content)
    except OSError as error:
        hint = "set XDG_CACHE_HOME to a folder with room, or give the paths of files"
        raise ConfigError(f"an image in a row cannot be written to {path}: {error}", hint=hint) from None
    return str(path)


def _write(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
        try:
            draft.write(content)
            draft.flush()
            Path(draft.name).replace(path)  # whole, whoever writes the same one
        except OSError:
            Path(draft.name).unlink()
            raise


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rlhf", "images")


@functools.cache
def _remove_unused(folder: Path) -> IO[str]:
    """Remove files that were not used for `_KEPT_DAYS` days, and the oldest while all have more than `_KEPT_BYTES`.

    The second is left to a process that finds no other at work with the cache, as their images may be among the oldest,
    and never concerns files of the last `_SAFE_DAYS`. Return the file whose lock tells others that this one is at work.
    """
    lock = folder.with_name("images.lock").open("a+")
    alone = False
    with suppress(OSError):  # another process has it, or the file system knows no locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = True
    found = []
    for file in folder.iterdir():
        with suppress(FileNotFoundError):  # another process may do the same
            status = file.stat()
            found.append((time.time() - status.st_mtime, status.st_size, file))
    num_bytes = sum(size for _, size, _ in found)
    for age_s, size, file in sorted(found, reverse=True):
        is_too_much = alone and num_bytes > _KEPT_BYTES and age_s > _SAFE_DAYS * 86400
        if is_too_much or age_s > _KEPT_DAYS * 86400:
            file.unlink(missing_ok=True)
            num_bytes -= size
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def read_image(ref: ImageRef, origin: str) -> Any:
    """Return an image of Pillow in RGB, upright, with transparency on white. Several frames give the first.

    Raises:
        ConfigError: Pillow is not installed.
        DataError: no file of PNG, JPEG, WebP, GIF, BMP or TIFF, a damaged one, one with more than `MAX_PIXELS` pixels
            or `MAX_BYTES` bytes, or one with pixels that have no 8-bit colours.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ConfigError(f"images need Pillow: {error}", hint="pip install pillow") from None
    name = ref if isinstance(ref, str) else f"of {len(ref)} bytes"
    place = f"{origin}: the image {name}"
    try:
        if isinstance(ref, str) and Path(ref).parent == _cache():
            with suppress(OSError):
                os.utime(ref)  # a long run keeps its images
        num_bytes = Path(ref).stat().st_size if isinstance(ref, str) else len(ref)
        _check(num_bytes <= MAX_BYTES, f"{place} has {num_bytes} bytes, more than {MAX_BYTES}")
        with Image.open(ref if isinstance(ref, str) else io.BytesIO(ref), formats=_FORMATS) as image:
            width, height = image.size  # the header's: nothing is decoded yet
            _check(width * height <= MAX_PIXELS, f"{place} has {width} x {height} pixels, more than {MAX_PIXELS}")
            _check(image.mode in _MODES, f"{place} has pixels of the kind {image.mode}, which are no 8-bit colours")
            upright = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                pixels = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", pixels.size, "white"), pixels)
            return upright.convert("RGB")
    except DataError:
        raise
    except Exception as error:  # decoders raise errors of many kinds for damaged files
        hint = "write it again as PNG or JPEG, or leave the row out"
        raise DataError(f"{place} cannot be read: {first_line(error)}", hint=hint) from error


def _check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise DataError(problem, hint="write it smaller, as PNG or JPEG in RGB, or leave the row out")


def _decoded(url: str, origin: str) -> bytes:
    head, separator, text = url.partition(",")
    if not separator or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise DataError(f"{origin}: the image {head[:40]} is no data:image/...;base64, URL", hint=f"give {_FORMS}")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise DataError(f"{origin}: the data URL of an image is not base64: {error}") from None
