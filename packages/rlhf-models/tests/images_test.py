"""Models that read images, against plain transformers."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.sft import ImageSftEncoder
from rlhf_data.images.files import read_image
from rlhf_data.images.reader import PartsTokenizer, load_image_reader
from rlhf_data.pretrained import load_tokenizer
from rlhf_data.rows.row import Row
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor, load_config
from rlhf_models.weights import check_saves
from tiny_vision import VISION_FAMILIES, tiny_vision_model_dir

PARTS = [{"type": "image"}, {"type": "text", "text": " and "}, {"type": "image"}, {"type": "text", "text": "same?"}]
ROWS = [
    {"input": "what?", "output": "red", "images": "a.png"},
    {"input": [{"role": "user", "content": PARTS}], "output": "no", "images": ["a.png", "b.png"]},
    {"input": "text alone", "output": "yes"},
]


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def vision(request, tmp_path_factory):
    """A model's folder, its family, and an encoder of rows beside which images lie."""
    folder = tmp_path_factory.mktemp(request.param)
    noise = np.random.default_rng(0)
    for name, shape in (("a", (30, 50, 3)), ("b", (70, 20, 3))):
        Image.fromarray(noise.integers(0, 255, shape, dtype=np.uint8)).save(folder / f"{name}.png")
    path = tiny_vision_model_dir(folder / "model", request.param)
    tokenizer = load_tokenizer(path)
    reader = load_image_reader(path, load_config(path), tokenizer)
    return path, ImageSftEncoder(tokenizer=PartsTokenizer(tokenizer), apply_chat_template=True, reader=reader)


def examples(vision):
    path, encoder = vision
    return [encoder(Row(row, str(path.parent / "rows.jsonl"), index)) for index, row in enumerate(ROWS)]


def test_logprobs_of_a_padded_batch_are_those_of_plain_transformers(vision):
    path, encoder = vision
    items = examples(vision)
    refs = [ref for item in items for ref in item.images]
    batch = TokenBatch.padded([item.token_ids for item in items], 0).with_images(encoder.reader.arrays(refs))
    actor = load_actor(path, dtype="float32", images="trained").eval()
    logprobs = actor(batch).logprobs
    plain = AutoModelForImageTextToText.from_pretrained(path)
    for row, item in enumerate(items):
        ids = torch.tensor(item.token_ids.astype(np.int64))[None]
        more = {}
        if item.images:
            made = encoder.reader.processed([read_image(ref, "r") for ref in item.images])
            more = {name: torch.from_numpy(made[name]) for name in made if name not in ("rows", "cols")}
            if encoder.reader.family != "smolvlm":
                more["mm_token_type_ids"] = (ids == plain.config.image_token_id).int()
        with torch.no_grad():
            logits = plain(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits
        own = logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(logprobs[row, 1 : ids.shape[1]], own, atol=1e-5, rtol=0)
    turned = []
    for ref in refs:
        file = io.BytesIO()
        read_image(ref, "r").rotate(180).save(file, "PNG")
        turned.append(file.getvalue())
    other = batch.with_images(encoder.reader.arrays(turned))
    assert not torch.allclose(actor(other).logprobs[:2], logprobs[:2], atol=1e-4)


def test_tokens_of_images_are_those_of_the_processor_and_not_trained(vision):
    _, encoder = vision
    one, two, alone = examples(vision)
    tokenizer = encoder.tokenizer.inner
    if encoder.reader.family == "smolvlm":
        names = ("<fake_token_around_image>", "<image>", "<global-img>")
        told = get_image_prompt_string(2, 2, 16, *names)
        head, tail = "<|im_start|>User:", "what?<end_of_utterance>\nAssistant: red<end_of_utterance>"
    else:
        # 30 x 50 pixels become 32 x 48, in squares of 8.
        told = "<|image_pad|>" * 24
        head = "<|im_start|>user\n<|vision_start|>"
        tail = "<|vision_end|>what?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>"
    assert one.token_ids.tolist() == tokenizer(head + told + tail)["input_ids"]
    assert tokenizer.decode(one.token_ids[one.loss_mask]).strip().startswith("red")
    assert one.loss_mask.sum() <= 5
    assert [len(item.images) for item in (one, two, alone)] == [1, 2, 0]
    # Tokens of images are not trained, even where all others are.
    [everything] = examples((_, _with(encoder, pretrain=True)))[:1]
    image = everything.token_ids == encoder.reader.image_id
    assert not everything.loss_mask[image].any()
    assert everything.loss_mask[~image][1:].any()


def _with(encoder, **changes):
    from dataclasses import replace

    return replace(encoder, **changes)


@pytest.mark.parametrize("images", ["frozen", "trained"])
def test_weights_that_read_images_are_trained_or_kept(vision, images):
    path, _ = vision
    actor = load_actor(path, dtype="float32", images=images)
    check_saves(actor)
    frozen = {name for name, weight in actor.named_parameters() if not weight.requires_grad}
    eyes = {name for name, _ in actor.named_parameters() if any(part in name for part in ("vis", "connector"))}
    assert eyes
    assert frozen == (eyes if images == "frozen" else set())
    # Without images in a batch, the same weights have gradients as with some: ranks add them up together.
    actor(TokenBatch.padded([[1, 2, 3]], 0)).logprobs.sum().backward()
    gradients = {name: weight.grad for name, weight in actor.named_parameters() if weight.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    assert {name for name, gradient in gradients.items() if not gradient.any()} & eyes == eyes - frozen


def test_places_without_images_and_packing_are_refused(vision):
    path, encoder = vision
    with pytest.raises(DataError, match=r"r:1: the chat template wrote 1 places for 0 images"):
        encoder.reader.expand(np.array([encoder.reader.image_id], np.int32), np.array([True]), (), "r:1")
    with pytest.raises(DataError, match=r"cannot be packed\n\nhint: "):
        TokenBatch.packed([[1, 2]]).with_images({"pixel_values": np.zeros(1)})
    with pytest.raises(ConfigError, match="`rlhf sft` and `rlhf ppo` train it on rows with images"):
        load_actor(path, dtype="float32")
