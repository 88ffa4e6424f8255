"""The images of a row: in a column, or in the messages, whose parts say where they belong."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_data.errors import DataError
from rlhf_data.images.files import ImageRef, image_ref, stored_image
from rlhf_data.rows.row import Row

IMAGE_MARK = "<image>"  # stands for an image in the text of a message


def take_images(row: Row, input_key: str, image_key: str) -> tuple[Row, tuple[ImageRef, ...]]:
    """Return a row whose input has `IMAGE_MARK` at the place of each image, and the images in that order.

    An image is a part of a message, `{"type": "image"}` or `{"type": "image_url"}`, or the mark in a text. A part may
    name its image (`image`, `url`, `path`, or `image_url` as OpenAI has it); others get those of the column in turn. If
    nothing says where the images of the column belong, they precede the text of the first user message.

    Args:
        row: the row. Without the column, or with null or an empty list there, it has the images of its parts only.
        input_key: the key of the prompt: text or messages.
        image_key: the key of one image or of a list of images; see `image_ref`.

    Raises:
        DataError: an image that cannot be found, or another number of images than of places.
    """
    column = row.values.get(image_key)
    listed = column if isinstance(column, list | tuple) else [] if column is None else [column]
    named: list[Any] = []  # per place, what its part names, or None
    value = row.cell(input_key)
    marked = [*_marked(value, named)] if isinstance(value, list) else value
    if isinstance(marked, str):
        named += [None] * marked.count(IMAGE_MARK)
    if listed and not named:
        named = [None] * len(listed)
        marked = _with_marks_first(marked, IMAGE_MARK * len(listed))
    if named.count(None) != len(listed):
        message = f"{row.origin}: {len(listed)} images in `{image_key}` for {named.count(None)} places in `{input_key}`"
        hint = f'a place is {IMAGE_MARK} in a text, or a part {{"type": "image"}} of a message'
        raise DataError(message, hint=hint)
    rest = iter(listed)
    folder = Path(row.source).parent
    refs = tuple(image_ref(next(rest) if one is None else one, row.origin, folder) for one in named)
    return replace(row, values={**row.values, input_key: marked}), refs


def take_image_files(row: Row, input_key: str, image_key: str) -> tuple[Row, tuple[str, ...]]:
    """Return what `take_images` does, with all images as files, because prompts travel with their paths.

    Raises ConfigError also if there is no place for the file of an image that the row itself holds; see `stored_image`.
    """
    marked, refs = take_images(row, input_key, image_key)
    return marked, tuple(ref if isinstance(ref, str) else stored_image(ref) for ref in refs)


def _marked(messages: list[Any], named: list[Any]) -> Iterator[Any]:
    """Yield messages with marks in place of images; add to `named` what each place names."""
    for message in messages:
        if not isinstance(message, Mapping):
            yield message
            continue
        parts = message.get("content")
        if isinstance(parts, list):
            yield {**message, "content": [_marked_part(part, named) for part in parts]}
            continue
        text = message.get("value") if parts is None else parts
        named += [None] * (text.count(IMAGE_MARK) if isinstance(text, str) else 0)
        yield message


def _marked_part(part: Any, named: list[Any]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        named += [None] * part["text"].count(IMAGE_MARK)
    if kind not in ("image", "image_url"):
        return part
    found = [part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None]
    one = found[0] if found else None
    named.append(one.get("url") if kind == "image_url" and isinstance(one, Mapping) else one)
    return {"type": "text", "text": IMAGE_MARK}


def _with_marks_first(value: Any, marks: str) -> Any:
    """Return a text, or messages in their first user message, that begins with marks."""
    if not isinstance(value, list):
        return f"{marks}{value}" if isinstance(value, str) else value
    for index, message in enumerate(value):
        if isinstance(message, Mapping) and "user" in (message.get("role"), {"human": "user"}.get(message.get("from"))):
            key = "value" if message.get("content") is None else "content"
            text = message.get(key)
            more = [{"type": "text", "text": marks}, *text] if isinstance(text, list) else f"{marks}{text}"
            return [*value[:index], {**message, key: more}, *value[index + 1 :]]
    return value
