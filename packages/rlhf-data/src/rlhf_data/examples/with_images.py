"""Examples of rows with images: encoded with a mark per image, which gets the tokens that stand for the image."""

from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_data.errors import ConfigError
from rlhf_data.examples.preference import PreferenceExample
from rlhf_data.examples.sft import SftExample
from rlhf_data.images.files import ImageRef
from rlhf_data.images.reader import ImageReader, PartsTokenizer
from rlhf_data.images.rows import take_images
from rlhf_data.rows.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEncoder:
    """Turns a row with images into an example whose sequences have them. The tokens of images are not trained.

    Images are those of the prompt. Answers have none.

    Attributes:
        encoder: of the rows without images; an `SftEncoder`, `UnpairedEncoder` or `PreferenceEncoder`.
        image_key: the key of the images; see `rlhf_data.images.rows.take_images`.
        reader: of the images.

    Raises:
        ConfigError: no chat template, which says where a model expects an image.
        DataError: as `encoder`, or images that cannot be read or have no place.
    """

    encoder: Any
    image_key: str = "images"
    reader: ImageReader = field(repr=False)

    def __post_init__(self) -> None:
        if not self.encoder.apply_chat_template:
            message = "``image_key`` needs the chat template, which writes the tokens around an image"
            raise ConfigError(message, hint="add ``apply_chat_template``")
        tokenizer = PartsTokenizer(self.reader.tokenizer, self.reader)
        object.__setattr__(self, "encoder", replace(self.encoder, tokenizer=tokenizer))

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of `encoder`."""
        return self.encoder.tokenizer

    def __call__(self, row: Row) -> Any:
        """Return the example of a row."""
        if not hasattr(self.encoder, "chosen_key"):
            marked, refs = take_images(row, self.encoder.input_key, self.image_key)
            return self._expanded(self.encoder(marked), refs, row)
        if self.encoder.prompt_key is not None:
            marked, refs = take_images(row, self.encoder.prompt_key, self.image_key)
            return self._pair(self.encoder(marked), refs, refs, row)
        # Each of the two conversations has the images of the prompt.
        marked, chosen = take_images(row, self.encoder.chosen_key, self.image_key)
        marked, rejected = take_images(marked, self.encoder.rejected_key, self.image_key)
        return self._pair(self.encoder(marked), chosen, rejected, row)

    def _pair(
        self, pair: PreferenceExample, chosen: tuple[ImageRef, ...], rejected: tuple[ImageRef, ...], row: Row
    ) -> PreferenceExample:
        answers = {
            "chosen": self._expanded(pair.chosen, chosen, row),
            "rejected": self._expanded(pair.rejected, rejected, row),
        }
        return replace(pair, **answers)

    def _expanded(self, example: SftExample, refs: tuple[ImageRef, ...], row: Row) -> SftExample:
        ids, mask = self.reader.expand(example.token_ids, example.loss_mask, refs, row.origin)
        return replace(example, token_ids=ids, loss_mask=mask, images=refs)
