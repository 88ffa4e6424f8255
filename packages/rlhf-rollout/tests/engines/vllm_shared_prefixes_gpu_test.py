"""Grouped attention on a GPU: FlashAttention 3 over two parts of the keys, and an engine whose steps replay it.

One engine is in this process, which takes either set of its graphs.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_models.testing import tiny_model_dir
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.vllm.core import prepare_environment
from rlhf_rollout.protocols import Completion, SamplingParams

BLOCK = 16
VOCAB_SIZE = 1000
HEADS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}
COMMON = np.random.default_rng(0).integers(3, 960, 210, dtype=np.int32)
# bfloat16 keeps 8 bits of an activation; the logits of this model stay below 8 in size.
LOGPROB_TOLERANCE = 0.1


@dataclass
class Case:
    """Attention of one decode step by both ways.

    Attributes:
        shared: the patch, whose tables are those of the step.
        plain, grouped: compute a layer, [R, H, D].
        queries: [R, H, D].
        keys, values: [blocks, BLOCK, G, D].
        table, lengths: the blocks of each sequence, [R, B], and its tokens, [R].
    """

    shared: Any
    plain: Callable[[], torch.Tensor]
    grouped: Callable[[], torch.Tensor]
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def case_of(
    prompts: Sequence[int],
    counts: Sequence[int],
    heads: tuple[int, int, int],
    *,
    most_rows: int,
    most_answer: int = 512,
) -> Case:
    """Return a step of answers, of `counts` to prompts of so many tokens; `heads` are those of queries, of keys, D."""
    prepare_environment()
    from rlhf_rollout.engines.vllm.patches import shared_prefixes
    from rlhf_rollout.engines.vllm.patches.shared_prefixes import flash_attn

    num_heads, num_kv_heads, num_dims = heads
    rng = np.random.default_rng(0)
    most = np.repeat(prompts, counts) // BLOCK
    num_rows, width = len(most), -(-(max(prompts) + most_answer) // BLOCK)
    lengths = np.repeat(prompts, counts) + rng.integers(1, most_answer, num_rows)
    table = np.zeros((most_rows, width), np.int32)
    table[:num_rows] = 1 + rng.permutation(num_rows * width).reshape(num_rows, width)
    firsts = np.repeat(np.cumsum([0, *counts[:-1]]), counts)
    for row, (first, number) in enumerate(zip(firsts.tolist(), most.tolist(), strict=True)):
        table[row, :number] = table[first, :number]
    on_gpu = {"device": "cuda", "dtype": torch.int32}
    given_table = torch.tensor(table, **on_gpu)
    given_lengths = torch.zeros(most_rows, **on_gpu)
    given_lengths[:num_rows] = torch.tensor(lengths)
    bounds = torch.full((most_rows + 1,), num_rows, **on_gpu)
    bounds[:num_rows] = torch.arange(num_rows)
    spec = SimpleNamespace(num_kv_heads=num_kv_heads, head_size=num_dims, dtype=torch.bfloat16)
    tables = SimpleNamespace(
        num_blocks=SimpleNamespace(np=None),
        kernel_block_sizes=[BLOCK],
        block_tables=[SimpleNamespace(gpu=given_table)],
        append_block_ids=None,
    )
    runner = SimpleNamespace(
        block_tables=tables,
        max_num_reqs=most_rows,
        device="cuda",
        prepare_attn=None,
        cudagraph_manager=SimpleNamespace(capture=None),
    )
    builder = SimpleNamespace(num_heads_q=num_heads, num_heads_kv=num_kv_heads, kv_cache_spec=spec)
    shared = shared_prefixes.SharedPrefixes(runner, builder)
    found = shared_prefixes.groups_of(table[:num_rows], most, least=1, largest=shared._largest)
    assert len(found.starts) <= shared_prefixes.num_entries(most_rows)
    shared._write(found)
    torch.manual_seed(0)
    # vLLM's cache is [blocks, G, BLOCK, 2 D], or so it is seen by its kernels.
    cache = torch.randn(1 + table.max(), BLOCK, num_kv_heads, 2 * num_dims, device="cuda", dtype=torch.bfloat16)
    keys, values = cache.split(num_dims, dim=-1)
    queries = torch.randn(most_rows, num_heads, num_dims, device="cuda", dtype=torch.bfloat16)
    options = {"max_seqlen_q": 1, "max_seqlen_k": width * BLOCK, "causal": True, "num_splits": 32}
    metadata = flash_attn.get_scheduler_metadata(
        batch_size=most_rows, num_heads_q=num_heads, num_heads_kv=num_kv_heads, headdim=num_dims,
        cache_seqlens=given_lengths, qkv_dtype=torch.bfloat16, cu_seqlens_q=bounds, page_size=BLOCK, **options,
    )  # fmt: skip
    given = options | {
        "q": queries, "k": keys, "v": values, "cu_seqlens_q": bounds, "seqused_k": given_lengths,
        "softmax_scale": num_dims**-0.5, "window_size": [-1, -1], "block_table": given_table, "fa_version": 3,
        "softcap": 0, "scheduler_metadata": metadata,
    }  # fmt: skip

    def plain() -> torch.Tensor:
        return flash_attn.flash_attn_varlen_func(**given, out=torch.empty_like(queries))

    def grouped() -> torch.Tensor:
        return shared.attend(**given, out=torch.empty_like(queries))

    rows = slice(num_rows)
    return Case(shared, plain, grouped, queries[rows], keys, values, given_table[rows], given_lengths[rows])


def expected(case: Case) -> torch.Tensor:
    """The attention over all keys, in float64."""
    found = []
    for query, blocks, length in zip(case.queries, case.table, case.lengths.tolist(), strict=True):
        repeats = len(query) // case.keys.shape[2]
        own = (part[blocks.long()].flatten(0, 1)[:length].double() for part in (case.keys, case.values))
        keys, values = (part.repeat_interleave(repeats, 1) for part in own)
        scores = torch.einsum("hd,khd->hk", query.double(), keys) * len(query[0]) ** -0.5
        found.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
    return torch.stack(found)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 needs a GPU of compute capability 9")


@pytest.mark.parametrize("heads", [(14, 2, 64), (9, 3, 64), (28, 4, 128), (4, 4, 128)])
@pytest.mark.parametrize(
    ("prompts", "counts", "most_rows"),
    [((1024, 300), (8, 8), 16), ((700, 33, 512, 512, 48), (20, 1, 3, 70, 2), 128), ((2000,), (2,), 64)],
)
@torch.inference_mode()
def test_grouped_attention_is_that_over_all_keys(heads, prompts, counts, most_rows) -> None:
    case = case_of(prompts, counts, heads, most_rows=most_rows)
    exact, number = expected(case), len(case.queries)
    plain_error = (case.plain()[:number].double() - exact).abs().max()
    graph = torch.cuda.CUDAGraph()
    case.grouped()
    torch.cuda.synchronize()
    case.shared._plan = None
    with torch.cuda.graph(graph):
        output = case.grouped()
        second = case.grouped()  # another layer, by the same plan
    for _ in range(2):
        output.zero_()
        second.zero_()
        graph.replay()
        for found in (output, second):
            error = (found[:number].double() - exact).abs().max()
            assert error < 2 * plain_error + 2**-9, (error, plain_error)


@pytest.fixture(scope="module")
def shared() -> Any:
    prepare_environment()
    from rlhf_rollout.engines.vllm.patches import shared_prefixes

    return shared_prefixes


@pytest.fixture(scope="module")
def engine(shared: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, list[Any]]]:
    """An engine, its model in transformers, and the patch of its model runner."""
    from transformers import AutoModelForCausalLM

    path = tiny_model_dir(tmp_path_factory.mktemp("m"), vocab_size=VOCAB_SIZE, dtype=torch.bfloat16, **HEADS)
    found: list[Any] = []
    make = shared.SharedPrefixes.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "LEAST_BYTES", 1)
        patch.setattr(
            shared.SharedPrefixes, "__init__", lambda self, *given: (found.append(self), make(self, *given))[1]
        )
        spec = EngineSpec(
            model=str(path),
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=100,
            kv_cache_memory_bytes=512 << 20,
            gpu_memory_utilization=0.05,
            seed=0,
        )
        built = build_engine("vllm", spec)
    yield built, AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval(), found
    asyncio.run(built.close())


def ask(engine: Any, requests: Sequence[tuple[np.ndarray, SamplingParams]]) -> list[list[Completion]]:
    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt, sampling in requests))

    return asyncio.run(all_of_them())


@torch.no_grad()
def logits_of(model: Any, prompt: np.ndarray, completion: Completion) -> torch.Tensor:
    tokens = torch.tensor(np.concatenate([prompt, completion.token_ids]), dtype=torch.long, device="cuda")[None]
    return model(tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)


def test_an_engine_gives_the_log_probs_of_its_model_and_the_same_greedy_tokens(engine, shared, monkeypatch) -> None:
    built, model, _ = engine
    written: list[int] = []
    write = shared.SharedPrefixes._write
    monkeypatch.setattr(
        shared.SharedPrefixes, "_write", lambda self, groups: (written.append(groups.num_saved), write(self, groups))
    )
    prompts = [
        np.append(COMMON[number % 3 * 10 :], np.arange(3 + number, 9 + number)).astype(np.int32) for number in range(12)
    ]
    drawn = [(prompt, SamplingParams(num_samples=8, max_tokens=24 + 9 * n, seed=n)) for n, prompt in enumerate(prompts)]
    greedy = [(prompt, SamplingParams(max_tokens=48, temperature=0)) for prompt in prompts]
    gaps, tokens = [], []
    for least in (1, 1 << 60):
        monkeypatch.setattr(shared, "LEAST_BYTES", least)
        written.clear()
        answers = ask(built, drawn)
        assert bool(written) == (least == 1)
        found = [
            logits_of(model, prompt, one)
            .gather(1, torch.tensor(one.token_ids, device="cuda").long()[:, None])[:, 0]
            .sub(torch.tensor(one.logprobs, device="cuda"))
            .abs()
            for (prompt, _), group in zip(drawn, answers, strict=True)
            for one in group
        ]
        gaps.append(float(torch.cat(found).mean()))
        tokens.append([group[0] for group in ask(built, greedy)])
    assert gaps[0] < LOGPROB_TOLERANCE and gaps[0] < 1.3 * gaps[1]
    num_equal = 0
    for prompt, one, other in zip(prompts, *tokens, strict=True):
        pairs = zip(one.token_ids.tolist(), other.token_ids.tolist(), strict=False)
        first = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        num_equal += len(one.token_ids) if first is None else first
        if first is not None:  # a near tie
            values = logits_of(model, prompt, one)[first]
            assert values.max() - values[int(other.token_ids[first])] < 3 * LOGPROB_TOLERANCE
            assert values.max() - values[int(one.token_ids[first])] < 3 * LOGPROB_TOLERANCE
    assert num_equal > len(prompts)
