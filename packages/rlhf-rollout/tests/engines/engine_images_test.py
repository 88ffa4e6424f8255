"""Engines read the images of prompts: their log-probs are those of plain transformers."""

import asyncio
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from rlhf_data.errors import ConfigError, EngineError
from rlhf_data.images.reader import open_image_reader
from rlhf_data.prompts import load_prompts
from rlhf_data.rows.sources import open_sources
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.process import start_engine
from rlhf_rollout.protocols import Draft, SamplingParams
from tiny_vision import tiny_vision_model_dir

ROWS = """\
{"input": "<image>what is it?", "images": "a.png"}
{"input": "<image>what is it?", "images": "b.png"}
{"input": "same as <image> or <image>?", "images": ["b.png", "a.png"]}
{"input": "text alone"}
"""
SAMPLING = SamplingParams(max_tokens=5, num_samples=2, seed=3)
NEEDS_TORCHVISION = pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's Qwen-VL needs torchvision")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0)
    for name, shape in (("a", (30, 50, 3)), ("b", (70, 20, 3))):
        Image.fromarray(noise.integers(0, 255, shape, dtype=np.uint8)).save(path / f"{name}.png")
    (path / "rows.jsonl").write_text(ROWS)
    (path / "single.jsonl").write_text("".join(row for row in ROWS.splitlines(True) if "same" not in row))
    return path


def made(folder, family):
    """Return a model's folder, the reader of its images and the prompts."""
    path = folder / family
    if not path.exists():
        tiny_vision_model_dir(path, family)
    reader = open_image_reader(path)
    rows = open_sources(str(folder / ("single.jsonl" if family == "llava_onevision" else "rows.jsonl")))
    options = {"apply_chat_template": True, "image_key": "images", "reader": reader}
    return path, reader, load_prompts(rows, reader.tokenizer, **options)


def expected(path, reader, prompt, token_ids):
    """Return plain transformers' log-probs of tokens behind a prompt."""
    model = AutoModelForImageTextToText.from_pretrained(path)
    ids = torch.tensor(np.concatenate([prompt.token_ids, token_ids]).astype(np.int64))[None]
    more = {}
    if prompt.images:
        arrays = reader.arrays(prompt.images)
        more = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if reader.family.startswith("qwen") or reader.family == "gemma3":
            name = "token_type_ids" if reader.family == "gemma3" else "mm_token_type_ids"
            more[name] = (ids == reader.image_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits
    return logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[-len(token_ids) :, 0].numpy()


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("transformers", "qwen2_5_vl"),
        ("transformers", "smolvlm"),
        ("transformers", "gemma3"),
        ("transformers", "llava_onevision"),
        ("vllm", "smolvlm"),
        ("vllm", "idefics3"),
        pytest.param("vllm", "internvl", marks=NEEDS_TORCHVISION),
        pytest.param("vllm", "qwen2_vl", marks=NEEDS_TORCHVISION),
        pytest.param("vllm", "qwen2_5_vl", marks=NEEDS_TORCHVISION),
        pytest.param("vllm", "qwen3_vl", marks=NEEDS_TORCHVISION),
    ],
)
def test_logprobs_of_an_engine_are_those_of_plain_transformers(folder, kind, family):
    path, reader, prompts = made(folder, family)
    spec = EngineSpec(model=str(path), max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=1024, images=True)

    async def answers():
        # Images that go to an engine in another process are tested with vLLM's.
        engine = build_engine(kind, spec) if kind == "transformers" else await start_engine(kind, spec)
        try:
            # All at once, then the first again: vLLM has its prefix, and that of another image beside it.
            asked = [engine.generate(one.token_ids, SAMPLING, images=one.images) for one in prompts]
            found = await asyncio.gather(*asked)
            # A sample that another engine has begun.
            first = found[0][0]
            begun = [Draft(first.token_ids[:1], first.logprobs[:1], [(0, 0)]), Draft()]
            again = await engine.generate(prompts[0].token_ids, SAMPLING, images=prompts[0].images, drafts=begun)
            return [*found, again]
        finally:
            await engine.close()

    found = asyncio.run(answers())
    for prompt, completions in zip([*prompts, prompts[0]], found, strict=True):
        for completion in completions:
            own = expected(path, reader, prompt, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, own, atol=2e-5, rtol=0)
    # The images make a difference that the bound above would show.
    other = expected(path, reader, prompts[1], found[0][0].token_ids)
    assert np.abs(other - found[0][0].logprobs).max() > 1e-3


def test_engines_that_read_no_images_refuse_them(folder):
    prompts = made(folder, "smolvlm")[2]
    with pytest.raises(ConfigError, match=r"engine fake takes no images\n\nhint: "):
        build_engine("fake", EngineSpec(model="fake", images=True))
    fake = build_engine("fake", EngineSpec(model="fake"))
    with pytest.raises(EngineError, match=r"the request has 1 images, and the engine reads none\n\nhint: "):
        asyncio.run(fake.generate(prompts[0].token_ids, SAMPLING, images=("a.png",)))
