"""Where the images of a row belong, by its column and its messages."""

import pytest

from rlhf_data.errors import DataError
from rlhf_data.images.rows import take_images
from rlhf_data.rows.row import Row

A, B = b"a", b"b"
IMAGE = {"type": "image"}


def taken(value: object, images: object = None) -> tuple[object, tuple[object, ...]]:
    row, refs = take_images(Row({"input": value, "images": images}, "f.jsonl", 3), "input", "images")
    return row.values["input"], refs


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "system", "content": "S"}, {"role": "user", "content": content}]


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


@pytest.mark.parametrize(
    ("value", "images", "marked", "refs"),
    [
        ("what?", None, "what?", ()),
        ("what?", [], "what?", ()),
        ("what?", A, "<image>what?", (A,)),
        ("what?", [A, B], "<image><image>what?", (A, B)),
        ("this <image> or <image>?", [A, B], "this <image> or <image>?", (A, B)),
        (user("what?"), [A], user("<image>what?"), (A,)),
        (user([text("what?")]), [A], user([text("<image>"), text("what?")]), (A,)),
        (user([text("x"), IMAGE, text("y")]), [A], user([text("x"), text("<image>"), text("y")]), (A,)),
        (user([{"type": "image", "image": A}, IMAGE]), [B], user([text("<image>")] * 2), (A, B)),
        (user([text("<image>"), IMAGE]), [A, B], user([text("<image>")] * 2), (A, B)),
        (user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,YQ=="}}]), None,
         user([text("<image>")]), (A,)),
        ([{"from": "human", "value": "what?"}], [A], [{"from": "human", "value": "<image>what?"}], (A,)),
    ],
)  # fmt: skip
def test_every_image_gets_its_place(value, images, marked, refs):
    assert taken(value, images) == (marked, refs)


@pytest.mark.parametrize(
    ("value", "images", "counts"),
    [
        ("what?<image>", None, "0 images in `images` for 1 places"),
        ("<image>", [A, B], "2 images in `images` for 1 places"),
        (user([IMAGE, IMAGE]), [A], "1 images in `images` for 2 places"),
        ([{"role": "assistant", "content": "x"}], [A], None),
    ],
)
def test_other_number_of_images_than_places_is_an_error(value, images, counts):
    if counts is None:  # no user to show it to: the reader finds no place for it
        assert taken(value, images)[0] == value
        return
    with pytest.raises(DataError, match=r"f.jsonl:3: (.|\n)*\n\nhint: a place is <image>") as caught:
        taken(value, images)
    assert counts in str(caught.value)
