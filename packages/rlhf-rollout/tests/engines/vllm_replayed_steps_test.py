"""What the host decides of decode steps that are replays. Their tokens are in `vllm_sampling_head_gpu_test.py`."""

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

replayed_steps = pytest.importorskip("rlhf_rollout.engines.vllm.patches.replayed_steps", exc_type=ImportError)


def runner_with(**changes: Any) -> Any:
    """Return what stands for vLLM's model runner; `changes` are by name, with "__" for a dot."""
    state = object.__new__(replayed_steps.DefaultModelState)
    found = SimpleNamespace(model_state=state, parallel_config=SimpleNamespace(), sampler=SimpleNamespace())
    found.vllm_config = SimpleNamespace()
    builder = object.__new__(FlashAttentionMetadataBuilder)
    found.attn_groups = [[SimpleNamespace(get_metadata_builder=lambda _: builder)]]
    for name in replayed_steps._OBSTACLES:
        put(found, name, None)
    for name, value in changes.items():
        put(found, name.replace("__", "."), value)
    return found


def put(owner: Any, path: str, value: Any) -> None:
    place, _, name = path.rpartition(".")
    setattr(attrgetter(place)(owner) if place else owner, name, value)


def test_a_plain_model_is_replayed() -> None:
    assert isinstance(replayed_steps.replays_of(runner_with()), replayed_steps.ReplayedSteps)


@pytest.mark.parametrize("name", replayed_steps._OBSTACLES)
def test_a_runner_that_does_more_between_steps_is_not(name) -> None:
    assert replayed_steps.replays_of(runner_with(**{name.replace(".", "__"): object()})) is None


def test_another_attention_or_model_state_is_not() -> None:
    class Other(FlashAttentionMetadataBuilder):
        pass

    groups = [[SimpleNamespace(get_metadata_builder=lambda _: object.__new__(Other))]]
    assert replayed_steps.replays_of(runner_with(attn_groups=groups)) is None
    state = SimpleNamespace(rope_state=None)
    assert replayed_steps.replays_of(runner_with(model_state=state)) is None


@pytest.mark.parametrize(
    ("mode", "num_tokens", "is_replay"),
    [
        (CUDAGraphMode.FULL, 3, True),
        (CUDAGraphMode.FULL, 4, False),
        (CUDAGraphMode.PIECEWISE, 3, False),
        (CUDAGraphMode.NONE, 3, False),
    ],
)
def test_only_a_step_that_is_one_graph_and_one_token_per_sequence_goes_on(mode, num_tokens, is_replay) -> None:
    asked = []

    def dispatch(*given: Any, **options: Any) -> Any:
        asked.append((*given, *options.values()))
        return SimpleNamespace(cg_mode=mode)

    batch = SimpleNamespace(num_reqs=3, num_tokens=num_tokens)
    runner = runner_with(execute_model_state=SimpleNamespace(input_batch=batch))
    runner.cudagraph_manager = SimpleNamespace(dispatch=dispatch)
    found = replayed_steps.ReplayedSteps(runner).begun()
    assert (found is not None and found.batch is batch) == is_replay
    assert asked == [(3, num_tokens, 1, 0)]


def test_a_step_that_failed_does_not_go_on() -> None:
    assert replayed_steps.ReplayedSteps(runner_with(execute_model_state=None)).begun() is None


class CountingRunner:
    """Two sequences in the slots 3 and 1, whose next token depends on the last one, its position and its place."""

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(
            num_computed_tokens=SimpleNamespace(gpu=torch.tensor([0, 7, 0, 4])),
            last_sampled_tokens=torch.tensor([0, 21, 0, 63]),
            prefill_len=SimpleNamespace(gpu=torch.tensor([0, 5, 0, 2])),
            draft_tokens=torch.zeros(4, 0),
        )
        self.input_buffers = SimpleNamespace(
            input_ids=torch.zeros(4, dtype=torch.long),
            positions=torch.zeros(4, dtype=torch.long),
            seq_lens=torch.zeros(4, dtype=torch.long),
        )
        self.batch = SimpleNamespace(
            idx_mapping=torch.tensor([3, 1]),
            query_start_loc=torch.tensor([0, 1, 2, 2, 2]),
            seq_lens=self.input_buffers.seq_lens,
            positions=self.input_buffers.positions,
            cu_num_logits=torch.arange(3),
            num_reqs=2,
            num_tokens_after_padding=4,
        )
        self.block_tables = SimpleNamespace(compute_slot_mappings=self.compute_slots)
        self.cudagraph_manager = SimpleNamespace(run_fullgraph=self.replay)

    def compute_slots(self, rows: Any, starts: Any, positions: Any, *, num_tokens_padded: int) -> None:
        assert (rows.tolist(), starts.tolist(), num_tokens_padded) == ([3, 1], [0, 1, 2, 2, 2], 4)
        self.slots = 10 * rows + positions[:2]

    def replay(self, graph: str) -> torch.Tensor:
        assert graph == "graph"
        buffers = self.input_buffers
        assert buffers.seq_lens[:2].tolist() == [position + 1 for position in buffers.positions[:2].tolist()]
        return 5 * buffers.input_ids[:2] + 3 * buffers.positions[:2] + self.slots

    def sample(self, hidden: torch.Tensor, batch: Any, grammar: None) -> tuple[Any, str, str]:
        assert batch is self.batch and grammar is None
        return SimpleNamespace(sampled_token_ids=hidden[:, None] % 97), "sampled", "rejected"

    def postprocess_sampled(self, rows: Any, tokens: Any, sampled: str, rejected: str, starts: Any) -> None:
        assert (sampled, rejected) == ("sampled", "rejected") and starts is self.batch.query_start_loc
        self.req_states.num_computed_tokens.gpu[rows] += 1
        self.req_states.last_sampled_tokens[rows] = tokens[:, 0]


def test_each_later_step_goes_on_from_the_token_and_the_place_of_the_one_before(monkeypatch) -> None:
    def positions(rows: Any, starts: Any, lengths: Any, places: Any, seq_lens: Any) -> None:
        places[:2] = lengths[rows]
        seq_lens[:2] = lengths[rows] + 1

    def inputs(
        ids: Any, rows: Any, last: Any, starts: Any, lengths: Any, prompts: Any, drafts: Any, *rest: Any
    ) -> None:
        assert (lengths[:2] > prompts[rows]).all() and drafts.shape == (4, 0)
        assert (rest[0].tolist(), rest[1]) == ([0, 1, 2], 2)
        ids[:2] = last[rows]

    monkeypatch.setattr(replayed_steps, "prepare_pos_seq_lens", positions)
    monkeypatch.setattr(replayed_steps, "combine_sampled_and_draft_tokens", inputs)
    monkeypatch.setattr(replayed_steps, "_LaterOutput", lambda first, samples, runner: (first, samples))
    runner = CountingRunner()
    begun = replayed_steps.Begun(runner.batch, "graph")
    first, samples = replayed_steps.ReplayedSteps(runner).compute(begun, "first", 3)
    expected = []
    for slot, token, position in ((3, 63, 4), (1, 21, 7)):
        for later in range(3):
            token = (5 * token + 4 * (position + later) + 10 * slot) % 97
            expected.append(token)
    found = torch.cat([sample.sampled_token_ids for sample in samples], 1)
    assert first == "first" and found.flatten().tolist() == expected
