"""The experts that vLLM says tokens went through, compared with the routers of plain transformers."""

import asyncio

import numpy as np
import pytest

from engine_testing import stopped_amid
from rlhf_data.errors import EngineError
from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import SamplingParams
from rollout_testing import shared_memory_bucket

TOP_K = 2
BLOCK_SIZE = 128  # tokens, on a CPU: the cache holds whole blocks
PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (1, 7, 40)]
LONG = (np.arange(300, dtype=np.int32) * 7) % 500


@pytest.fixture(scope="module")
def tells():
    """Skip a test where vLLM does not tell the experts of tokens, which `vllm_internals_test.py` has the error of."""
    pytest.importorskip("vllm")
    from rlhf_rollout.engines.vllm.internals import tells_routes

    if not tells_routes(on_gpu=False):
        pytest.skip("this vLLM does not tell the experts of tokens on a CPU")


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe", "mixtral"])
def pair(request, tmp_path_factory, tells):
    """A model's folder, and an engine."""
    options = {"max_position_embeddings": 1024, "eos_token_id": None}
    path = tiny_model_dir(tmp_path_factory.mktemp(request.param), architecture=request.param, **options)
    for name in ("generation_config.json", "tokenizer_config.json"):  # no token ends a sequence
        (path / name).write_text("{}")
    engine = build_engine("vllm", EngineSpec(model=str(path), max_model_len=600, max_num_seqs=8, return_routes=True))
    yield path, engine
    asyncio.run(engine.close())


def load(path, seed=None):
    """Return the actor, with a seed perturbed far enough that its routes differ clearly."""
    import torch

    from rlhf_models.loading import load_actor

    actor = load_actor(path, dtype="float32").eval().requires_grad_(False)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for weight in actor.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return actor


def routes_by_transformers(actor, tokens):
    """The experts of each token, [T, layers, top_k], in ascending order."""
    import torch

    ids = torch.tensor(tokens, dtype=torch.long)[None]
    layers = actor.model(input_ids=ids, output_router_logits=True).router_logits
    return np.stack([np.sort(layer.numpy().argsort(-1)[:, -TOP_K:], -1) for layer in layers], axis=1)


def check(actor, prompt, completion):
    """Compare all rows; the last token, which has not gone through the model, has none."""
    tokens = np.concatenate([prompt, completion.token_ids])
    assert completion.routes.dtype == np.uint8 and completion.routes.shape == (len(tokens) - 1, 2, TOP_K)
    np.testing.assert_array_equal(np.sort(completion.routes, -1), routes_by_transformers(actor, tokens[:-1]))


def test_routes_of_prompts_and_answers_are_those_of_transformers(pair):
    path, engine = pair

    async def generate():
        params = SamplingParams(num_samples=2, max_tokens=24, seed=3)
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS))

    actor = load(path)
    groups = asyncio.run(generate())
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert len(group) == 2
        for completion in group:
            check(actor, prompt, completion)
    one = asyncio.run(engine.generate(PROMPTS[1], SamplingParams(max_tokens=1, seed=1)))[0]
    check(actor, PROMPTS[1], one)


def test_routes_of_cached_prompt_tokens_are_those_of_the_request_that_computed_them(pair):
    path, engine = pair
    actor = load(path)
    tokens = LONG
    cached = []
    for turn in range(3):
        [completion] = asyncio.run(engine.generate(tokens, SamplingParams(max_tokens=60, seed=turn)))
        check(actor, tokens, completion)
        cached.append(completion.num_cached_tokens)
        tokens = np.concatenate([tokens, completion.token_ids, [5, 6]]).astype(np.int32)
    assert cached[0] == 0 and cached[1] >= BLOCK_SIZE and cached[2] > cached[1]


def test_routes_are_told_after_an_update_and_before_it_by_the_weights_that_drew_the_token(pair):
    path, engine = pair
    old, new = load(path), load(path, seed=1)

    async def generate_through_an_update():
        params = SamplingParams(num_samples=2, max_tokens=100, seed=5)
        async with stopped_amid(engine, [engine.generate(LONG, params)], num_sequences=2) as [task]:
            pausing = asyncio.create_task(engine.pause("keep"))
        await pausing
        await update(engine, 1, new)
        await engine.resume()
        group = await task
        later = []
        for version, actor in enumerate((old, new, old), start=2):  # updates may take another way than the first one
            later += await engine.generate(PROMPTS[2], SamplingParams(max_tokens=20, seed=6))
            await update(engine, version, actor)
        return group, later

    group, later = asyncio.run(generate_through_an_update())
    for actor, completion in zip((new, old, new), later, strict=True):
        check(actor, PROMPTS[2], completion)
    for completion in group:
        before, after = completion.spans
        assert (before.policy_version, after.policy_version) == (0, 1)
        tokens = np.concatenate([LONG, completion.token_ids])[:-1]
        # The last token of the first span goes through the model when the next one is drawn.
        turn = len(LONG) + len(before.token_ids) - 1
        found = np.sort(completion.routes, -1)
        assert len(found) == len(tokens)
        by_old, by_new = (routes_by_transformers(actor, tokens) for actor in (old, new))
        np.testing.assert_array_equal(found[:turn], by_old[:turn])
        np.testing.assert_array_equal(found[turn:], by_new[turn:])
        assert (by_old != by_new).any((1, 2)).mean() > 0.1


async def update(engine, version, actor):
    from rlhf_models.weights import hf_named_weights

    await engine.begin_weight_update(version)
    with shared_memory_bucket({name: weight.numpy() for name, weight in hf_named_weights(actor)}) as bucket:
        await engine.receive_weights(bucket)
    await engine.finish_weight_update()


def test_model_without_experts_has_none_to_tell(tmp_path, tells):
    spec = EngineSpec(model=str(tiny_model_dir(tmp_path)), max_model_len=64, max_num_seqs=2, return_routes=True)
    with pytest.raises(EngineError, match=r"(?s)does not start .*Routed-experts"):
        build_engine("vllm", spec)
