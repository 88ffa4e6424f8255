"""Images as rows name them, and image files that anybody may have written."""

import base64
import fcntl
import io
import os
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.images import files
from rlhf_data.images.files import image_ref, read_image, stored_image

RED = Image.new("RGB", (3, 2), (255, 0, 0))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises many pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", ["path", "name", "url", "object", "bytes", "object of bytes", "data", "pillow"])
def test_every_form_of_an_image_gives_its_pixels(tmp_path, form):
    file = tmp_path / "a b.png"
    file.write_bytes(encoded(RED))
    stored = file.read_bytes()
    value = {
        "path": str(file),
        "name": "a b.png",
        "url": file.as_uri(),
        "object": {"bytes": None, "path": str(file)},
        "bytes": stored,
        "object of bytes": {"bytes": stored, "path": "gone.png"},
        "data": "data:image/png;base64," + base64.b64encode(stored).decode(),
        "pillow": RED,
    }[form]
    image = read_image(image_ref(value, "r:1", tmp_path), "r:1")
    assert (image.mode, image.size) == ("RGB", (3, 2))
    assert (np.asarray(image) == [255, 0, 0]).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("https://example.com/a.png", "no URL is fetched\n\nhint: "),
        ("gone.png", "there is no image gone.png\n\nhint: relative paths"),
        (".", "there is no image"),
        ("data:image/png;base64,?", "is not base64"),
        ("data:text/plain;base64,YQ==", "is no data:image"),
        (7, "an image is a number"),
        ("", "an image is text"),
        ({"bytes": None, "path": None}, "an image is null"),
    ],
)
def test_what_names_no_image_is_an_error_of_its_row(tmp_path, value, message):
    with pytest.raises(DataError, match=r"r:1") as caught:
        image_ref(value, "r:1", tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (b"no image", "cannot be read: UnidentifiedImageError"),
        (b"", "cannot be read"),
        (encoded(Image.new("RGB", (64, 64)), "BMP")[:2000], "cannot be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be read: UnidentifiedImageError"),
        (bomb(8193, 8192), "has 8193 x 8192 pixels, more than 67108864"),
        (bomb(50000, 50000), "cannot be read: DecompressionBombError"),
        (encoded(Image.new("I;16", (2, 2))), "pixels of the kind I;16"),
    ],
    ids=["text", "empty", "cut", "eps", "large", "bomb", "mode"],
)
def test_files_that_cannot_be_used_are_errors_with_a_hint(stored, message):
    with pytest.raises(DataError, match=r"^r:1: the image of \d+ bytes(.|\n)*\n\nhint: ") as caught:
        read_image(stored, "r:1")
    assert message in str(caught.value)


def test_file_with_too_many_bytes_is_not_opened(tmp_path):
    file = tmp_path / "large.png"
    with file.open("wb") as opened:
        opened.truncate((1 << 28) + 1)
    with pytest.raises(DataError, match="has 268435457 bytes, more than 268435456"):
        read_image(str(file), "r:1")


def test_transparent_pixels_are_white_and_turned_photos_upright():
    glass = Image.new("RGBA", (1, 1), (255, 0, 0, 0))
    assert read_image(encoded(glass), "r").getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (1, 1))
    palette.putpalette([0, 0, 255])
    assert read_image(encoded(palette, transparency=0), "r").getpixel((0, 0)) == (255, 255, 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert read_image(encoded(RED, "JPEG", exif=exif), "r").size == (2, 3)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "CMYK"])
def test_images_without_colours_of_their_own_become_rgb(mode):
    image = Image.new("RGB", (2, 2), "white").convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert read_image(encoded(image, kind), "r").getpixel((0, 0)) == (255, 255, 255)


def test_moving_picture_gives_its_first_frame(tmp_path):
    file = Path(tmp_path, "a.gif")
    RED.save(file, save_all=True, append_images=[Image.new("RGB", (3, 2), (0, 0, 255))])
    assert read_image(str(file), "r").getpixel((0, 0)) == (255, 0, 0)


def test_stored_images_are_removed_when_none_has_used_them_for_30_days(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images = {name: encoded(Image.new("RGB", (1, 1), name)) for name in ("red", "green", "blue", "white")}
    paths = {name: Path(stored_image(content)) for name, content in images.items()}
    assert {path.parent for path in paths.values()} == {tmp_path / "rlhf" / "images"}
    assert {name: path.read_bytes() for name, path in paths.items()} == images
    for path in paths.values():
        os.utime(path, (0, time.time() - 31 * 86400))
    os.utime(paths["white"], (0, time.time() - 29 * 86400))
    read_image(str(paths["red"]), "r")
    files._remove_unused.cache_clear()  # as in a new process
    stored_image(images["green"])  # which writes it again
    assert {name for name, path in paths.items() if path.exists()} == {"red", "green", "white"}
    assert paths["green"].stat().st_mtime > time.time() - 60


def test_oldest_images_are_removed_while_all_take_too_much_room_unless_another_run_is_at_work(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def left_by_next_process(most_bytes):
        """Return which of the images are left once another process has stored one, of one byte."""
        monkeypatch.setattr(files, "_KEPT_BYTES", most_bytes)
        files._remove_unused(tmp_path / "rlhf" / "images").close()
        files._remove_unused.cache_clear()
        stored_image(b"3")
        return [days for days, path in paths.items() if path.exists()]

    paths = {days: Path(stored_image(str(days).encode() * 10)) for days in (3, 5, 0.9, 2)}  # 10, 10, 30 and 10 bytes
    for days, path in paths.items():
        os.utime(path, (0, time.time() - days * 86400))
    with (tmp_path / "rlhf" / "images.lock").open() as other_run:
        fcntl.flock(other_run, fcntl.LOCK_SH)
        assert left_by_next_process(0) == [3, 5, 0.9, 2]
    assert left_by_next_process(61) == [3, 5, 0.9, 2]
    assert left_by_next_process(51) == [3, 0.9, 2]
    assert left_by_next_process(0) == [0.9]


def test_image_that_another_process_removes_meanwhile_is_written_again_and_a_full_disk_keeps_no_draft(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = Path(stored_image(b"pixels"))
    touch = os.utime

    def late(name):
        Path(name).unlink()
        touch(name)

    monkeypatch.setattr(os, "utime", late)
    assert Path(stored_image(b"pixels")).read_bytes() == b"pixels"
    monkeypatch.setattr(Path, "replace", lambda draft, place: touch(draft / "no room"))
    with pytest.raises(ConfigError, match="cannot be written"):
        stored_image(b"pixels")
    assert list(path.parent.iterdir()) == []
