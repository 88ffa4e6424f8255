"""Models that read images, against plain transformers."""

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForImageTextToText
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.preference import PreferenceEncoder
from rlhf_data.examples.sft import SftEncoder, SftExample
from rlhf_data.examples.with_images import ImageEncoder
from rlhf_data.images.files import read_image
from rlhf_data.images.reader import load_image_reader, open_image_reader
from rlhf_data.pretrained import load_tokenizer
from rlhf_data.rows.row import Row
from rlhf_models.backbone import run_backbone
from rlhf_models.batch import TokenBatch
from rlhf_models.loading import load_actor, load_config, load_reward_model
from rlhf_models.lora import LoraSpec, add_lora, check_lora, merge_adapter, save_adapter
from rlhf_models.reward import score_sequences
from rlhf_models.weights import check_saves
from tiny_vision import VISION_FAMILIES, tiny_vision_model_dir, tiny_vision_reward_dir

EYES = ("vis", "connector", "projector", "newline")  # parts of names of weights that read images
TYPED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3")  # plain transformers is told which tokens are those of images
PARTS = [{"type": "image"}, {"type": "text", "text": " and "}, {"type": "image"}, {"type": "text", "text": "same?"}]


def second(family):
    """The content of a question about several images, or one where a family reads no more, and their names."""
    return (PARTS[2:], ["b.png"]) if family == "llava_onevision" else (PARTS, ["a.png", "b.png"])


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
    return path, ImageEncoder(encoder=SftEncoder(tokenizer=tokenizer, apply_chat_template=True), reader=reader)


def examples(vision):
    path, encoder = vision
    content, names = second(encoder.reader.family)
    rows = [
        {"input": "what?", "output": "red", "images": "a.png"},
        {"input": [{"role": "user", "content": content}], "output": "no", "images": names},
        {"input": "text alone", "output": "yes"},
    ]
    return [encoder(Row(row, str(path.parent / "rows.jsonl"), index)) for index, row in enumerate(rows)]


def laid_out(vision, packing):
    """The rows as a batch, which has sequences of text alone too."""
    items = examples(vision)
    ids = [item.token_ids for item in items]
    batch = TokenBatch.packed(ids) if packing else TokenBatch.padded(ids, 0)
    refs = [ref for item in items for ref in item.images]
    return items, refs, batch.with_images(vision[1].reader.arrays(refs))


def plain_pass(model, item, reader):
    """What plain transformers makes of a sequence alone, with the positions that it gives it, and its tokens [1, L]."""
    ids = torch.tensor(item.token_ids.astype(np.int64))[None]
    more = {}
    if item.images:
        made = reader.processed([read_image(ref, "r") for ref in item.images])
        more = {
            name: torch.from_numpy(made[name])
            for name in made
            if name not in ("rows", "cols", "num_patches", "num_crops")
        }
        if reader.family in TYPED:
            name = "token_type_ids" if reader.family == "gemma3" else "mm_token_type_ids"
            more[name] = (ids == model.config.image_token_id).int()
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **more), ids


def plain_logprobs(model, item, reader):
    """Log-probs of plain transformers."""
    output, ids = plain_pass(model, item, reader)
    return output.logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]


def load(path, packing=False):
    """The trained model of a folder; its family is refused with packing where tokens of an image see each other."""
    if packing and path.parent.name.startswith("gemma3"):
        for options in ({"packing": True}, {"attn_implementation": "flash_attention_2"}):
            with pytest.raises(
                ConfigError, match=r"need the attention sdpa or eager, unpacked\n\nhint: turn packing off"
            ):
                load_actor(path, dtype="float32", images="trained", **options)
        pytest.skip("refused")
    return load_actor(path, dtype="float32", images="trained", packing=packing).eval()


def turned(ref):
    """The same image upside down."""
    file = io.BytesIO()
    read_image(ref, "r").rotate(180).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_logprobs_and_gradients_are_those_of_plain_transformers(vision, packing):
    path, encoder = vision
    items, refs, batch = laid_out(vision, packing)
    actor = load(path, packing)
    logprobs = actor(batch).logprobs
    plain = AutoModelForImageTextToText.from_pretrained(path)
    total = 0
    for item, own in zip(items, batch.split(logprobs), strict=True):
        expected = plain_logprobs(plain, item, encoder.reader)
        torch.testing.assert_close(own[1:], expected, atol=1e-5, rtol=0)
        total = total + expected.sum()
    total.backward()
    logprobs.sum().backward()
    theirs = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    assert any("vis" in name for name in theirs)
    for name, gradient in theirs.items():
        own = actor.model.get_parameter(name).grad
        # Some weights of random models have gradients of 0 but for rounding.
        assert (own - gradient).norm() < 1e-4 * gradient.norm() + 1e-4, name
    other = actor(batch.with_images(encoder.reader.arrays([*map(turned, refs)]))).logprobs
    for before, after in list(zip(batch.split(logprobs), batch.split(other), strict=True))[:2]:
        assert not torch.allclose(before, after, atol=1e-4)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_images_that_are_shown_several_times_are_read_once_with_the_gradients_of_all_copies(vision, packing):
    path, encoder = vision
    one, two, alone = examples(vision)
    items = [two, one, alone, two, one, one]  # images of other sizes, and in another order than they are kept
    refs = [ref for item in items for ref in item.images]
    ids = [item.token_ids for item in items]
    batch = TokenBatch.packed(ids) if packing else TokenBatch.padded(ids, 0)
    arrays, shown = encoder.reader.shown_arrays(refs)
    distinct = encoder.reader.arrays(list(dict.fromkeys(refs)))
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        name: array.tobytes() for name, array in distinct.items()
    }
    assert encoder.reader.shown_arrays([*dict.fromkeys(refs)])[1] is None
    actor = load(path, packing).double()
    weights = torch.rand(actor.model.config.get_text_config().hidden_size, dtype=torch.float64)
    base = actor.model.base_model
    [tower] = [part for name, part in base.named_children() if name in ("visual", "vision_tower", "vision_model")]
    read = []
    tower.register_forward_pre_hook(
        lambda _, args, options: read.append((options.get("pixel_values") if not args else args[0]).shape[0]),
        with_kwargs=True,
    )
    found = []
    for each in (batch.with_images(encoder.reader.arrays(refs)), batch.with_images(arrays, shown)):
        actor.zero_grad()
        states = run_backbone(base, each).last_hidden_state
        (states * weights).sum().backward()
        gradients = {name: weight.grad for name, weight in actor.named_parameters() if weight.grad is not None}
        found.append((states.detach(), {name: gradient.clone() for name, gradient in gradients.items()}))
    assert "get_image_features" not in vars(base)
    assert len(read) == 2 and read[1] < read[0] / 1.9
    # The towers of Qwen-VL rotate in float32.
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


def test_scores_of_a_reward_model_are_those_of_its_head_on_the_last_state_of_plain_transformers(vision, tmp_path):
    path, encoder = vision
    folder = tiny_vision_reward_dir(tmp_path / "rm", path)
    items = examples(vision)
    samples = [(item.token_ids, item.images) for item in items[:2]] + [items[2].token_ids]
    model = load_reward_model(folder, dtype="float32", images="frozen")
    scores = score_sequences(model, samples, batch_size=8, reader=open_image_reader(folder))
    plain = AutoModel.from_pretrained(folder)
    head = load_file(folder / "value_head.safetensors")["weight"][0]
    for item, score in zip(items, scores, strict=True):
        expected = plain_pass(plain, item, encoder.reader)[0].last_hidden_state[0, -1] @ head
        assert score == pytest.approx(expected.item(), abs=1e-4)
    other = (items[0].token_ids, [*map(turned, items[0].images)])
    [score] = score_sequences(model, [other], batch_size=8, reader=encoder.reader)
    assert abs(score - scores[0]) > 1e-3


def test_tokens_of_images_are_those_of_the_processor_and_not_trained(vision):
    _, encoder = vision
    one, two, alone = examples(vision)
    tokenizer = encoder.tokenizer.inner
    if encoder.reader.family in ("smolvlm", "idefics3"):
        names = ("<fake_token_around_image>", "<image>", "<global-img>")
        told = get_image_prompt_string(2, 2, 16, *names)
        head, tail = "<|im_start|>User:", "what?<end_of_utterance>\nAssistant: red<end_of_utterance>"
    elif encoder.reader.family == "internvl":
        # Two crops beside each other, and the whole image.
        told = "<img>" + "<IMG_CONTEXT>" * 16 * 3 + "</img>"
        head = "<|im_start|>user\n"
        tail = "\nwhat?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>"
    elif encoder.reader.family == "gemma3":
        told = "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"
        head = "<|im_start|>user\n"
        tail = "what?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>"
    elif encoder.reader.family == "llava_onevision":
        # The whole image, and 8 rows of 14 of the 16 in two tiles, each with a token at its end.
        told = "<image>" * (64 + 8 * 15)
        head = "<|im_start|>user\n"
        tail = "\nwhat?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>"
    else:
        # 30 x 50 pixels become 32 x 48, in squares of 8.
        told = "<|image_pad|>" * 24
        head = "<|im_start|>user\n<|vision_start|>"
        tail = "<|vision_end|>what?<|im_end|>\n<|im_start|>assistant\nred<|im_end|>"
    assert one.token_ids.tolist() == tokenizer(head + told + tail)["input_ids"]
    assert tokenizer.decode(one.token_ids[one.loss_mask]).strip().startswith("red")
    assert one.loss_mask.sum() <= 5
    assert [len(item.images) for item in (one, two, alone)] == [1, len(second(encoder.reader.family)[1]), 0]
    # Tokens of images are not trained, even where all others are.
    [everything] = examples((_, replace(encoder, encoder=replace(encoder.encoder, pretrain=True))))[:1]
    image = everything.token_ids == encoder.reader.image_id
    assert not everything.loss_mask[image].any()
    assert everything.loss_mask[~image][1:].any()


@pytest.mark.parametrize("images", ["frozen", "trained"])
def test_weights_that_read_images_are_trained_or_kept(vision, images):
    path, _ = vision
    actor = load_actor(path, dtype="float32", images=images)
    check_saves(actor)
    frozen = {name for name, weight in actor.named_parameters() if not weight.requires_grad}
    eyes = {name for name, _ in actor.named_parameters() if any(part in name for part in EYES)}
    assert eyes
    assert frozen == (eyes if images == "frozen" else set())


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_batch_of_text_alone_runs_what_reads_images_and_has_the_logprobs_of_text(vision, packing):
    path, encoder = vision
    actor = load(path, packing)
    sequences = [[1, 2, 3], [4, 5, 6, 7, 8]]
    batch = TokenBatch.packed(sequences) if packing else TokenBatch.padded(sequences, 0)
    output = actor(batch)
    plain = AutoModelForImageTextToText.from_pretrained(path)
    for own, ids in zip(batch.split(output.logprobs), sequences, strict=True):
        item = SftExample("r", np.array(ids), np.ones(len(ids), bool))
        torch.testing.assert_close(own[1:], plain_logprobs(plain, item, encoder.reader), atol=1e-5, rtol=0)
    # The same weights have gradients as in a batch with images, of 0: ranks add them up together.
    output.logprobs.sum().backward()
    gradients = {name: weight.grad for name, weight in actor.named_parameters()}
    unread = {name for name, gradient in gradients.items() if gradient is None}
    assert all("vision_tower.post_layernorm" in name for name in unread)  # LLaVA reads the states before it
    eyes = {name for name in gradients if any(part in name for part in EYES)} - unread
    gradients = {name: gradient for name, gradient in gradients.items() if name not in unread}
    assert {name for name, gradient in gradients.items() if not gradient.any()} & eyes == eyes


def test_an_image_of_a_shape_that_the_model_refuses_is_an_error_of_its_row(vision):
    path, encoder = vision
    Image.new("RGB", (3000, 1)).save(path.parent / "long.png")
    row = Row({"input": "what?", "output": "red", "images": "long.png"}, str(path.parent / "rows.jsonl"), 0)
    if not encoder.reader.family.startswith("qwen"):  # others scale it
        assert encoder(row).num_tokens > 48
        return
    with pytest.raises(DataError, match=r"rows.jsonl:0: the model takes no images of 3000 x 1 pixels(.|\n)*hint: "):
        encoder(row)


def test_places_without_images_are_refused(vision):
    path, encoder = vision
    with pytest.raises(DataError, match=r"r:1: the chat template wrote 1 places for 0 images"):
        encoder.reader.expand(np.array([encoder.reader.image_id], np.int32), np.array([True]), (), "r:1")
    if encoder.reader.family == "gemma3":  # which also has a class for text alone
        return
    with pytest.raises(ConfigError, match="`rlhf sft` and `rlhf ppo` train it on rows with images"):
        load_actor(path, dtype="float32")


@pytest.mark.parametrize("has_prompt", [True, False], ids=["prompt", "dialogues"])
def test_both_answers_of_a_pair_have_the_images_of_their_prompt(vision, has_prompt):
    path, encoder = vision
    content, names = second(encoder.reader.family)
    question = [{"role": "user", "content": content}]
    answers = {key: [{"role": "assistant", "content": key}] for key in ("chosen", "rejected")}
    row = {"prompt": question, **answers, "images": names}
    if not has_prompt:
        row |= {key: question + answer for key, answer in answers.items()}
    pairs = PreferenceEncoder(
        tokenizer=encoder.reader.tokenizer, apply_chat_template=True, prompt_key="prompt" if has_prompt else None
    )
    pair = replace(encoder, encoder=pairs)(Row(row, str(path.parent / "rows.jsonl"), 0))
    for key in ("chosen", "rejected"):
        alone = encoder(Row({**row, "input": question, "output": key}, str(path.parent / "rows.jsonl"), 0))
        one = getattr(pair, key)
        assert one.token_ids.tolist() == alone.token_ids.tolist()
        assert one.loss_mask.tolist() == alone.loss_mask.tolist()
        assert one.images == alone.images
    assert len(pair.chosen.images) == len(names)


def test_merged_adapters_give_the_logprobs_of_the_trained_model_and_leave_what_reads_images(vision, tmp_path):
    path, encoder = vision
    packing = encoder.reader.family != "gemma3"
    items, _, batch = laid_out(vision, packing)
    actor = load(path, packing)
    before = actor(batch).logprobs
    share = check_lora(load_config(path), LoraSpec(rank=2))
    add_lora(actor, LoraSpec(rank=2))
    trained = [name for name, weight in actor.named_parameters() if weight.requires_grad]
    sizes = [
        sum(weight.numel() for weight in actor.parameters() if weight.requires_grad is kind) for kind in (False, True)
    ]
    assert share == pytest.approx(sizes[1] / (sum(sizes) - sizes[1]))
    assert trained and not [name for name in trained if any(part in name for part in EYES)]
    with torch.no_grad():
        for name in trained:
            torch.nn.init.normal_(actor.get_parameter(name), std=0.1)
    logprobs = actor(batch).logprobs
    assert not torch.allclose(logprobs, before, atol=1e-3)
    save_adapter(actor, actor.state_dict(), tmp_path / "adapter")
    merge_adapter(path, tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    for item, own in zip(items, batch.split(logprobs), strict=True):
        torch.testing.assert_close(own[1:], plain_logprobs(plain, item, encoder.reader), atol=2e-5, rtol=0)


@pytest.mark.parametrize("omitted", [(), ("do_rescale",), ("do_normalize",)], ids=["", "colours", "not normalized"])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_arrays_are_those_of_the_processor_bit_for_bit(tmp_path, family, omitted):
    path = tiny_vision_model_dir(tmp_path / "model", family)
    reader = load_image_reader(path, load_config(path), load_tokenizer(path))
    reader.processor.image_mean, reader.processor.image_std = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
    for name in omitted:
        setattr(reader.processor, name, False)
    noise = np.random.default_rng(1)
    files = []
    for index, size in enumerate([(30, 50), (200, 170), (33, 31), (64, 64)]):
        Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / f"{index}.png")
        files.append(str(tmp_path / f"{index}.png"))
    names = [files[index] for index in (2, 1, 0, 1, 3)]
    reader.read_ahead(names)
    found = reader.arrays(names)
    axis = 1 if reader.has_rows else 0
    each = [reader.processed([read_image(name, "r")]) for name in names]
    assert found.keys() <= each[0].keys() and "pixel_values" in found
    for name, array in found.items():
        if name == "pixel_values" and family == "llava_onevision":
            most = max(one[name].shape[1] for one in each)
            for one in each:
                tiles = np.zeros((1, most, *one[name].shape[2:]), one[name].dtype)
                tiles[:, : one[name].shape[1]] = one[name]
                one[name] = tiles
        expected = np.concatenate([one[name] for one in each], axis)
        assert array.dtype == (bool if name == "pixel_attention_mask" else expected.dtype)
        assert array.shape == expected.shape
        assert array.tobytes() == expected.astype(array.dtype).tobytes()
    damaged = tmp_path / "damaged.png"
    damaged.write_bytes(Path(files[1]).read_bytes()[:99])
    reader.read_ahead([str(damaged)])
    with pytest.raises(DataError, match=r"damaged\.png cannot be read"):
        reader.arrays([files[0], str(damaged), files[1]])


@pytest.mark.parametrize("size", [(30, 50), (64, 64), (20, 191), (191, 20), (190, 180), (7, 3), (33, 31)])
def test_tokens_of_an_image_in_tiles_are_as_many_as_those_of_the_processor(tmp_path, size):
    path = tiny_vision_model_dir(tmp_path, "llava_onevision")
    reader = load_image_reader(path, load_config(path), load_tokenizer(path))
    known = {"image_processor": reader.processor, "num_image_tokens": 64, "vision_aspect_ratio": "anyres_max_9"}
    plain = SimpleNamespace(**known)
    plain._get_unpadded_features = partial(LlavaOnevisionProcessor._get_unpadded_features, plain)
    told = LlavaOnevisionProcessor._get_number_of_features(plain, *size, 32, 32)
    arrays = reader.processed([Image.new("RGB", size[::-1])])
    assert reader.sizes(arrays) == (told, 1)


def test_a_row_of_several_images_is_refused_where_the_processor_reads_them_in_another_way(tmp_path):
    path = tiny_vision_model_dir(tmp_path, "llava_onevision")
    reader = load_image_reader(path, load_config(path), load_tokenizer(path))
    ids = np.full(2, reader.image_id, np.int32)
    with pytest.raises(
        DataError, match=r"r:1: rows for a llava_onevision have one image, and this one has 2\n\nhint: "
    ):
        reader.expand(ids, ids > 0, (b"", b""), "r:1")
