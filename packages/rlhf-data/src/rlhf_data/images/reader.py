"""What a model reads of an image: the tokens that stand for it, and arrays of its pixels.

Transformers' processors of whole models also load what reads videos, which needs torchvision. Only the image processor
of a model is loaded here, and the tokens are written as the processors of these families write them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_data.chat.tokens import Tokenizer
from rlhf_data.errors import ConfigError, DataError, first_line
from rlhf_data.images.ahead import ReadAhead
from rlhf_data.images.files import ImageRef, read_image
from rlhf_data.images.rows import text_parts
from rlhf_data.pretrained import clear_errors, load_tokenizer, located_model

_GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_TILES = ("smolvlm", "idefics3")
_CROPS = ("internvl",)
_ANYRES = ("llava_onevision",)
_BLOCKS = ("gemma3",)  # the tokens of an image are always the same, and see each other
IMAGE_FAMILIES = (*_GRIDS, *_TILES, *_CROPS, *_ANYRES, *_BLOCKS)
_COUNTS = (
    "rows",
    "cols",
    "num_patches",
    "batch_num_images",
    "num_crops",
)  # what processors return beside the model's arguments

_MAX_TILES = 9  # `vision_aspect_ratio` is anyres_max_9 in all published models


class PartsTokenizer:
    """A tokenizer whose chat template gets each message as parts.

    A content may be a list of parts. In one that is a text, each `IMAGE_MARK` is an image if `has_marks`.

    What the template writes for an image becomes `reader.image_text` if the family has such a text.
    """

    def __init__(self, inner: Any, reader: "ImageReader", *, has_marks: bool = True) -> None:
        self.inner = inner
        self.reader = reader
        self.has_marks = has_marks

    def __getattr__(self, name: str) -> Any:
        # Pickle asks before there is an `inner`.
        if name in ("inner", "reader", "has_marks") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return token ids, as the tokenizer does."""
        return self.inner(*args, **options)

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """Return the rendered conversation. The content of each message is text or a list of parts."""
        messages = [{**message, "content": self._parts(message.get("content"))} for message in conversation]
        rendered = self.inner.apply_chat_template(messages, **options)
        return rendered.replace(*self.reader.image_text) if self.reader.image_text else rendered

    def _parts(self, content: Any) -> Any:
        if isinstance(content, list):
            return content
        return text_parts(content or "") if self.has_marks else [{"type": "text", "text": content or ""}]


@dataclass(frozen=True, slots=True, eq=False)
class ImageReader:
    """Reads images for a model. Picklable, for worker processes.

    Attributes:
        tokenizer: of the model.
        processor: its image processor, of transformers.
        family: one of `IMAGE_FAMILIES`.
        image_id: the token that the chat template writes for an image, and whose states come from its pixels.
        tokens_per_tile: number of these tokens per tile, for families that divide images into tiles, or per image.
        image_text: what the template writes for an image, and the text of all of its tokens, which is tokenized with
            the text around it; None for families whose tokens are put in place of the template's.
    """

    tokenizer: Tokenizer
    processor: Any
    family: str
    image_id: int
    tokens_per_tile: int = 0
    image_text: tuple[str, str] | None = None

    def arrays(self, refs: Sequence[ImageRef]) -> dict[str, np.ndarray]:
        """Return what the model reads of images, by the names of its arguments; nothing without images.

        They are read in threads. Their 8-bit colours are kept for later calls, up to `ahead.MAX_KEPT_BYTES`.

        Raises DataError for an image that cannot be read.
        """
        return self._whole(_READ.get([(self, ref) for ref in refs]))

    def shown_arrays(self, refs: Sequence[ImageRef]) -> tuple[dict[str, np.ndarray], tuple[int, ...] | None]:
        """Return `arrays` with those of equal images once, and for what is shown, in order, its index in them.

        The indices count tiles for families that divide images into rows of equal tiles or crops, images for others.
        They are None if no two images are equal, which is told by their files' paths or their bytes.
        """
        distinct = list(dict.fromkeys(refs))
        found = _READ.get([(self, ref) for ref in distinct])
        arrays = self._whole(found)
        if len(distinct) == len(refs):
            return arrays, None
        counts = [self.sizes(each)[1] if self.family in (*_TILES, *_CROPS) else 1 for each in found]
        ends = np.cumsum(counts).tolist()
        own = {ref: range(end - n, end) for ref, end, n in zip(distinct, ends, counts, strict=True)}
        return arrays, tuple(index for ref in refs for index in own[ref])

    def _whole(self, found: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {name: self._joined(name, [each[name] for each in found]) for name in (found[0] if found else ())}

    def _joined(self, name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the arrays of images as one, with zeros where one has fewer tiles than another in its row."""
        axis = 1 if self.has_rows else 0
        lengths = [array.shape[axis] for array in arrays]
        shape = np.max([array.shape for array in arrays], axis=0)
        shape[axis] = sum(lengths)
        table = _values_of_colours(self) if name == "pixel_values" else None
        whole = np.zeros(shape, arrays[0].dtype if table is None else table.dtype)
        _READ.run(partial(_write, table), np.split(whole, np.cumsum(lengths)[:-1], axis), arrays)
        return whole

    def read_ahead(self, refs: Iterable[ImageRef]) -> None:
        """Begin to read images in threads, for later calls of `arrays`, which raise the errors."""
        _READ.start((self, ref) for ref in refs)

    def blank(self) -> tuple[list[int], dict[str, np.ndarray]]:
        """Return the tokens and the arrays of a small image, for passes that must read one."""
        from PIL import Image

        arrays = self.model_inputs([Image.new("RGB", (28, 28))])
        if self.has_rows:  # the first tile; zeros would stand for no tile
            arrays = {name: np.ones_like(array[:, :1]) for name, array in arrays.items()}
        return [self.image_id] * self.sizes(arrays)[0], arrays

    def check_same(self, path: str | Path, config: Any) -> None:
        """Raise ConfigError unless a model with this config has the same tokens and arrays of images."""
        other = load_image_reader(path, config, self.tokenizer)
        if _settings(other) != _settings(self):
            message = f"the model {path} reads images in another way than the trained model"
            raise ConfigError(message, hint="use a model of the same family with the same preprocessor_config.json")

    @property
    def has_rows(self) -> bool:
        """Whether the arrays have a row per sequence. The images of all sequences are in the first."""
        return self.family in _TILES

    def masked_ids(self, others: Sequence[range] = ()) -> tuple[range, ...]:
        """Return ids that must not be sampled: `others`, and the token of an image, in ascending order."""
        own = range(self.image_id, self.image_id + 1)
        return tuple(sorted([*others, own], key=lambda ids: ids.start))

    def sizes(self, arrays: Mapping[str, np.ndarray]) -> tuple[int, int]:
        """Return the numbers of tokens `image_id` and of patches or tiles that `arrays` of one image have."""
        if self.family in _GRIDS:
            num_patches = int(np.prod(arrays["image_grid_thw"]))
            return num_patches // self.processor.merge_size**2, num_patches
        if self.family in _ANYRES:
            return self._anyres_tokens(*arrays["image_sizes"][0]), 1
        if self.family in _BLOCKS:
            return self.tokens_per_tile, 1
        num_tiles = arrays["pixel_values"].shape[int(self.has_rows)]
        return num_tiles * self.tokens_per_tile, num_tiles

    def model_inputs(self, images: Sequence[Any], **options: Any) -> dict[str, np.ndarray]:
        """Return what the model reads of images of Pillow, one or more, with options of the processor."""
        arrays = self.processed(images, **options)
        if "pixel_attention_mask" in arrays:  # of 64-bit numbers, whose memory is as much as that of colours in floats
            arrays["pixel_attention_mask"] = arrays["pixel_attention_mask"].astype(bool)
        return {name: array for name, array in arrays.items() if name not in _COUNTS}

    def processed(self, images: Sequence[Any], **options: Any) -> dict[str, Any]:
        """Return what the processor makes of images of Pillow, one or more, with options of its own."""
        options |= {"return_tensors": "np"}
        if self.family in (*_GRIDS, *_ANYRES, *_BLOCKS):
            return {**self.processor(images=list(images), **options)}
        if self.family in _CROPS:
            return {**self.processor(images=list(images), **options, crop_to_patches=True)}
        # All images as those of one row: rows of different numbers of tiles would be filled up with empty tiles.
        return {**self.processor(images=[list(images)], **options, return_row_col_info=True)}

    def image_sizes(self, refs: Sequence[ImageRef], origin: str) -> list[tuple[int, int]]:
        """Return the width and the height of images. Raises DataError for one that cannot be read."""
        return [read_image(ref, origin).size for ref in refs]

    def check_number(self, number: int, origin: str) -> None:
        """Raise DataError if the model does not read this number of images in one sequence."""
        if self.family in _ANYRES and number > 1:
            # Transformers' processor reads several images of a row as others do whole ones, vLLM's does not.
            message = f"{origin}: rows for a {self.family} have one image, and this one has {number}"
            raise DataError(message, hint="put the images into one, or use a model of another family")

    def expand(
        self,
        token_ids: np.ndarray,
        loss_mask: np.ndarray,
        refs: Sequence[ImageRef],
        origin: str,
        sizes: Sequence[tuple[int, int]] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a sequence with all tokens of its images in place of one token each. They are not trained.

        Args:
            token_ids: [L] int32, with the token `image_id` once per image, or all its tokens with an `image_text`.
            loss_mask: [L] bool, the trained tokens.
            refs: the images, in order.
            origin: of the row, for messages.
            sizes: what `image_sizes` returns for them; None reads them.

        Raises:
            DataError: another number of images than of tokens, or an image that cannot be read.
        """
        places = np.flatnonzero(token_ids == self.image_id)
        num_written = 1 if self.image_text is None else self.tokens_per_tile  # tokens per image
        if len(places) != num_written * len(refs):
            num_places = math.ceil(len(places) / num_written)
            message = f"{origin}: the chat template wrote {num_places} places for {len(refs)} images"
            hint = "texts must not have the token of an image; or the template has no images in such messages"
            raise DataError(message, hint=hint)
        if not refs:
            return token_ids, loss_mask
        self.check_number(len(refs), origin)
        sizes = self.image_sizes(refs, origin) if sizes is None else sizes
        if self.image_text is not None:
            return token_ids, loss_mask & (token_ids != self.image_id)
        try:
            runs = [_tokens_of(self, size) for size in sizes]
        except ValueError as error:  # a shape that the family refuses, such as one side 200 times the other
            told = ", ".join("{} x {}".format(*size) for size in sizes)
            message = f"{origin}: the model takes no images of {told} pixels: {first_line(error)}"
            raise DataError(message, hint="cut or scale the image, or leave the row out") from None
        lengths = np.ones(len(token_ids), int)
        lengths[places] = [len(run) for run in runs]
        mask = loss_mask.copy()
        mask[places] = False
        ids = np.repeat(token_ids, lengths)
        starts = np.cumsum(lengths) - lengths
        for place, run in zip(places, runs, strict=True):
            ids[starts[place] : starts[place] + len(run)] = run
        return ids, np.repeat(mask, lengths)

    def expand_prompt(
        self,
        token_ids: Sequence[int],
        refs: Sequence[ImageRef],
        origin: str,
        sizes: Sequence[tuple[int, int]] | None = None,
    ) -> list[int]:
        """Return a prompt with all tokens of its images; see `expand`."""
        ids = np.asarray(token_ids, np.int32)
        return list(self.expand(ids, np.zeros(len(ids), bool), refs, origin, sizes)[0].tolist())

    def _anyres_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image: those of the whole, and those of its tiles without their borders."""
        from transformers.image_processing_utils import select_best_resolution

        side = math.isqrt(self.tokens_per_tile)
        best = select_best_resolution((int(height), int(width)), self.processor.image_grid_pinpoints)
        rows, columns = (side * pixels // self.processor.size["height"] for pixels in best)
        if width * rows > columns * height:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        scale = math.sqrt(rows * columns / (_MAX_TILES * side**2))
        if scale > 1.1:
            rows = int(rows // scale)
            columns = int(columns // scale)
        return side**2 + rows * (columns + 1)  # a row ends with a token

    def _tokens(self, arrays: Mapping[str, Any]) -> list[int]:
        if self.family in _GRIDS:
            return [self.image_id] * int(np.prod(arrays["image_grid_thw"][0]) // self.processor.merge_size**2)
        if self.family in _ANYRES:
            return [self.image_id] * self._anyres_tokens(*arrays["image_sizes"][0])
        if self.family in _CROPS:
            start, end = self.tokenizer("<img></img>", add_special_tokens=False)["input_ids"]
            return [start, *[self.image_id] * (self.tokens_per_tile * int(arrays["num_patches"][0])), end]
        tile = "<image>" * self.tokens_per_tile
        fake = "<fake_token_around_image>"
        rows, columns = arrays["rows"][0][0], arrays["cols"][0][0]
        text = "".join(
            "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        text += "\n" if rows else ""
        return list(self.tokenizer(f"{text}{fake}<global-img>{tile}{fake}", add_special_tokens=False)["input_ids"])


def _settings(reader: ImageReader) -> tuple[Any, ...]:
    return reader.family, reader.image_id, reader.tokens_per_tile, reader.processor.to_dict()


@lru_cache(maxsize=4096)  # a processor takes some 10 ms, and pixels do not change the number of tokens
def _tokens_of(reader: ImageReader, size: tuple[int, int]) -> np.ndarray:
    """Return the tokens of an image of `size`, width and height. Raises ValueError for one that the family refuses."""
    from PIL import Image

    return np.asarray(reader._tokens(reader.processed([Image.new("RGB", size)])), np.int32)


def _read(key: tuple[ImageReader, ImageRef]) -> dict[str, np.ndarray]:
    """Return the arrays of an image, with its pixels as 8-bit colours, which take a fourth of the memory."""
    reader, ref = key
    arrays = reader.model_inputs([read_image(ref, "a sequence")], do_rescale=False, do_normalize=False)
    colours = arrays["pixel_values"].astype(np.uint8, copy=False)  # the processors of Qwen-VL make floats of them
    return arrays | {"pixel_values": colours}


# The samples of a prompt share its images, and so do the passes of several models.
_READ = ReadAhead(_read)


@lru_cache(maxsize=16)
def _values_of_colours(reader: ImageReader) -> np.ndarray:
    """Return the value that the model reads of each 8-bit colour, [channels, 256]."""
    processor = reader.processor
    values = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(3, axis=0)
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return values.reshape(3, 256)


def _write(table: np.ndarray | None, whole: np.ndarray, array: np.ndarray) -> None:
    """Write an array into its place in the whole; pixels with the values of a table."""
    own = whole[tuple(map(slice, array.shape))]
    if table is None:
        own[...] = array
        return
    # [images, tiles, channels, height, width], or per patch all values of one channel before those of the next.
    shape = (-1, len(table), math.prod(array.shape[-2:]) if array.ndim > 2 else array.shape[-1] // len(table))
    found, colours = own.reshape(shape), array.reshape(shape)
    for channel, values in enumerate(table):
        np.take(values, colours[:, channel], out=found[:, channel], mode="clip")  # which alone writes without a copy


def check_reads_images(path: str | Path, config: Any, *, packing: bool = False) -> None:
    """Raise ConfigError unless models of this transformers config can be trained on images, packed if so asked."""
    if packing and config.model_type in _BLOCKS:
        message = f"the model {path} is a {config.model_type}, in which the tokens of an image see each other"
        hint = "turn packing off, and leave ``attn_implementation`` at auto"
        raise ConfigError(f"{message}: rows with images need the attention sdpa or eager, unpacked", hint=hint)
    if config.model_type not in IMAGE_FAMILIES:
        message = f"the model {path} is a {config.model_type}, and images are read for {', '.join(IMAGE_FAMILIES)}"
        raise ConfigError(message, hint="use a model of one of these families, or rows without ``image_key``")


def load_image_reader(path: str | Path, config: Any, tokenizer: Any) -> ImageReader:
    """Return the reader of a model's folder or hub name, with its config and tokenizer of transformers.

    Raises:
        ConfigError: a family without images, or no image processor in the folder.
    """
    check_reads_images(path, config)
    from transformers import AutoImageProcessor

    name, is_local = located_model(path)
    with clear_errors("image processor", path):
        # Pillow's variant, which needs no torchvision and gives the same pixels on every machine.
        processor = AutoImageProcessor.from_pretrained(name, local_files_only=is_local, backend="pil")
    tokens_per_tile = getattr(config, "image_seq_length", 0)
    if config.model_type in _TILES:
        eye = config.vision_config
        tokens_per_tile = (eye.image_size // eye.patch_size) ** 2 // config.scale_factor**2
    if config.model_type in _ANYRES:
        tokens_per_tile = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    image_text = None
    if config.model_type in _BLOCKS:
        tokens_per_tile = config.mm_tokens_per_image
        ids = (config.boi_token_index, config.image_token_id, config.eoi_token_index)
        start, image, end = tokenizer.convert_ids_to_tokens(ids)
        image_text = (start, f"\n\n{start}{image * tokens_per_tile}{end}\n\n")
        processor.do_pan_and_scan = False
    return ImageReader(tokenizer, processor, config.model_type, config.image_token_id, tokens_per_tile, image_text)


def open_image_reader(path: str | Path) -> ImageReader:
    """Return the reader of a model's folder or hub name. Raises ConfigError as `load_image_reader`."""
    from transformers import AutoConfig

    name, is_local = located_model(path)
    with clear_errors("model", path):
        config = AutoConfig.from_pretrained(name, local_files_only=is_local)
    return load_image_reader(path, config, load_tokenizer(path))
