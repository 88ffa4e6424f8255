"""The images of a row: in a column, or in the messages, whose parts say where they belong; and those of messages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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


def with_image_parts(messages: Sequence[Mapping[str, Any]], images: Sequence[str]) -> list[dict[str, Any]]:
    """Return messages whose contents are texts with marks as messages with parts, in OpenAI's form.

    The part of an image has the file URL of its path in `images`, which has the order of the marks. A message without a
    mark stays as it is.
    """
    urls = ({"type": "image_url", "image_url": {"url": Path(path).as_uri()}} for path in images)
    found = []
    for message in messages:
        text = message["content"]
        if IMAGE_MARK in text:
            parts = [next(urls) if part["type"] == "image" else part for part in text_parts(text)]
            message = {**message, "content": parts}
        found.append({**message})
    return found


def text_parts(text: str) -> list[dict[str, Any]]:
    """Return a text as parts, with one of type `image` at each mark."""
    first, *others = text.split(IMAGE_MARK)
    parts = [{"type": "text", "text": first}] if first or not others else []
    for other in others:
        parts.append({"type": "image"})
        parts += [{"type": "text", "text": other}] if other else []
    return parts


def change_images(messages: Sequence[Mapping[str, Any]], see: Callable[[Any], Any]) -> list[Mapping[str, Any]]:
    """Return messages in which the part of an image names what `see` returns for what it named; None for nothing."""

    def changed(part: Any) -> Any:
        return {"type": "image", "image": see(_named(part))} if _is_image(part) else part

    found = []
    for message in messages:
        parts = message.get("content")
        found.append({**message, "content": [*map(changed, parts)]} if isinstance(parts, list) else message)
    return found


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
    if _is_image(part):
        named.append(_named(part))
        return {"type": "text", "text": IMAGE_MARK}
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        named += [None] * part["text"].count(IMAGE_MARK)
    return part


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _named(part: Mapping[str, Any]) -> Any:
    """Return what the part of an image names; None if nothing."""
    one = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
    return one.get("url") if part["type"] == "image_url" and isinstance(one, Mapping) else one


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
