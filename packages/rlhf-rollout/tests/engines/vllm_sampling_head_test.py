"""Which steps of vLLM's model runner the operator of the LM head samples for, and what it gives them.

The runner is a stand-in, as vLLM's needs a GPU, and the operator computes as its plain twin.
"""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.v1.worker.gpu.sample.sampler import Sampler

from rlhf_rollout.engines.vllm import patches
from rlhf_rollout.engines.vllm.patches import sampling_head
from sampling_head_testing import PADDED_SIZE, VOCAB_SIZE, WIDTH, Model

SLOTS = 6
ROWS = [4, 0, 3]  # slots of the requests of a step


def column(value, dtype):
    array = np.full(SLOTS, value, dtype=dtype)
    return SimpleNamespace(np=array, gpu=torch.from_numpy(array))


def make_sampler(num_logprobs=0):
    sampler = Sampler.__new__(Sampler)
    states = SimpleNamespace(
        temperature=column(0.7, np.float32),
        seeds=column(11, np.int64),
        top_k=column(PADDED_SIZE, np.int32),
        top_p=column(1.0, np.float32),
        min_p=column(0.0, np.float32),
        vocab_size=PADDED_SIZE,
        num_logprobs=np.full(SLOTS, num_logprobs, dtype=np.int32),
    )
    states.max_num_logprobs = lambda rows: int(states.num_logprobs[rows].max())
    num_told = np.zeros(SLOTS, dtype=np.int32)
    vars(sampler).update(
        logprobs_mode="processed_logprobs",
        compute_nans=False,
        use_fp64_gumbel=False,
        sampling_states=states,
        penalties_state=SimpleNamespace(use_penalty=np.zeros(SLOTS, dtype=bool)),
        logit_bias_state=SimpleNamespace(use_logit_bias=np.zeros(SLOTS, dtype=bool)),
        bad_words_state=SimpleNamespace(num_bad_words=column(0, np.int32)),
        logprob_token_ids_state=SimpleNamespace(
            num_token_ids=num_told, max_num_token_ids=lambda rows: int(num_told[rows].max())
        ),
    )
    return sampler


class Runner:
    """Stands in for vLLM's model runner."""

    def __init__(self, model=None):
        self.model = model or Model()
        self.sampler = make_sampler()
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.max_num_reqs = SLOTS
        self.lora_config = self.speculative_config = None
        self.model_config = SimpleNamespace(get_hidden_size=lambda: WIDTH)
        self.parallel_config = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        self.req_states = SimpleNamespace(prefill_len=column(4, np.int32))

    def sample(self, hidden_states, batch, grammar_output):
        return "vLLM's"


Runner.__module__ = "vllm.v1.worker.gpu.model_runner"


def make_batch(rows=ROWS):
    """A step whose requests have two tokens each, of which the second gives logits, at positions 1, 3, 5."""
    last = torch.arange(len(rows)) * 2 + 1
    return SimpleNamespace(
        idx_mapping_np=np.array(rows),
        idx_mapping=torch.tensor(rows),
        expanded_idx_mapping=torch.tensor(rows),
        num_reqs=len(rows),
        num_tokens=2 * len(rows),
        num_draft_tokens=0,
        logits_indices=last,
        positions=torch.arange(2 * len(rows)),
        seq_lens=torch.tensor([9, 9, 2])[: len(rows)],
        cu_num_logits=torch.arange(len(rows) + 1),
    )


def num_sampled(ones, lengths, bounds, rows, prompt_lengths):
    """Do what vLLM's kernel does: rows that have not come to their prompt's end sample nothing."""
    ends = lengths >= prompt_lengths[rows]
    return ones * ends, torch.zeros_like(ones)


@pytest.fixture(autouse=True)
def operator_of_a_gpu(monkeypatch):
    monkeypatch.setattr(sampling_head, "is_fused", lambda hidden, weight: True)
    monkeypatch.setattr(sampling_head, "get_num_sampled_and_rejected", num_sampled)


@pytest.fixture
def hidden():
    torch.manual_seed(1)
    return torch.randn(2 * len(ROWS), WIDTH)


def patched(runner=None, masked_ids=()):
    runner = runner or Runner()
    patches.patch_runner(runner, (), masked_ids)
    return runner


def logits_of(hidden, weight):
    """The logits of a step's requests in float64, [3, 150]."""
    return hidden[1::2].double().numpy() @ weight[:VOCAB_SIZE].double().numpy().T


def log_softmax(values):
    values = values - values.max(1, keepdims=True)
    return values - np.log(np.exp(values).sum(1, keepdims=True))


def test_a_plain_step_gets_tokens_with_their_log_probs_and_what_was_sampled(hidden):
    runner = patched()
    temperature = runner.sampler.sampling_states.temperature.np
    temperature[ROWS] = [0.7, 0.0, 1.3]
    output, sampled, rejected = runner.sample(hidden, make_batch(), None)
    logits = logits_of(hidden, runner.model.lm_head.weight)
    tokens = output.sampled_token_ids[:, 0].numpy()
    assert output.sampled_token_ids.shape == (3, 1)
    assert tokens[1] == logits[1].argmax() and tokens.max() < VOCAB_SIZE
    expected = log_softmax(logits / np.array([[0.7], [1.0], [1.3]]))[np.arange(3), tokens]
    rows = output.logprobs_tensors
    np.testing.assert_allclose(rows.logprobs[:, 0], expected, atol=1e-5)
    assert rows.logprob_token_ids[:, 0].tolist() == tokens.tolist()
    assert rows.selected_token_ranks.tolist() == [0, 0, 0] and rows.selected_token_ranks.dtype == torch.int64
    assert rows.cu_num_generated_tokens is None
    # The third request has two of four tokens of its prompt.
    assert sampled.tolist() == output.num_sampled.tolist() == [1, 1, 0]
    assert rejected.tolist() == output.num_rejected.tolist() == [0, 0, 0] and output.num_nans is None


def test_draws_have_the_distribution_of_each_rows_own_temperature(hidden):
    runner = patched()
    states = runner.sampler.sampling_states
    states.temperature.np[ROWS] = [0.5, 2.0, 1.0]
    small = 0.2 * hidden
    num_draws = 4000
    step = make_batch(ROWS * num_draws)  # at other positions, with noise of their own
    step.seq_lens = torch.full((3 * num_draws,), 9)
    tokens = runner.sample(small.repeat(num_draws, 1), step, None)[0].sampled_token_ids.view(num_draws, 3)
    logits = logits_of(small, runner.model.lm_head.weight) / np.array([[0.5], [2.0], [1.0]])
    for found, share in zip(tokens.T.numpy(), np.exp(log_softmax(logits)), strict=True):
        counts = np.bincount(found, minlength=VOCAB_SIZE)
        expected = num_draws * share
        rare = expected < 5
        counts, expected = (np.append(part[~rare], part[rare].sum() + 1e-9) for part in (counts, expected))
        freedom = len(expected) - 1
        assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5


def test_a_request_draws_by_its_own_seed_and_position_whatever_is_beside_it(hidden):
    runner = patched()
    hidden = 0.2 * hidden  # many tokens are likely
    seeds = runner.sampler.sampling_states.seeds.np
    seeds[:] = np.arange(SLOTS)
    together = runner.sample(hidden, make_batch(), None)[0].sampled_token_ids
    alone = make_batch([0])
    alone.positions = torch.tensor([2, 3])
    assert runner.sample(hidden[2:4], alone, None)[0].sampled_token_ids.tolist() == [together[1].tolist()]
    drawn = set()
    for number in range(20):
        seeds[0] = 100 + number
        alone = make_batch([0])
        alone.positions = torch.tensor([2, 3 + number])
        drawn.add(runner.sample(hidden[2:4], alone, None)[0].sampled_token_ids.item())
    assert len(drawn) > 5


def test_later_steps_of_a_batch_draw_at_their_own_positions_from_their_own_hidden_states(hidden):
    def decoding(positions):
        batch = make_batch([0, 3])
        batch.num_tokens, batch.logits_indices = 2, torch.arange(2)
        batch.positions, batch.seq_lens = positions, torch.tensor([9, 9])
        return batch

    runner = patched()
    padded = 0.2 * hidden  # of a CUDA graph for more rows
    positions = torch.tensor([5, 8, 0])
    batch = decoding(positions)
    found, expected = [], []
    for step in range(20):
        output, sampled, _ = runner.sample(padded.roll(step, 1), batch, None)
        found.append(output.sampled_token_ids.tolist())
        expected.append(
            runner.sample(padded.roll(step, 1), decoding(positions.clone()), None)[0].sampled_token_ids.tolist()
        )
        assert sampled.tolist() == [1, 1] and output.logprobs_tensors.logprobs.shape == (2, 1)
        positions += 1
    assert found == expected and len({str(tokens) for tokens in found}) > 5


def test_masked_ids_are_never_drawn_and_the_others_share_all_probability(hidden):
    masked = [[0, 60], [70, VOCAB_SIZE], [VOCAB_SIZE, PADDED_SIZE]]
    runner = patched(masked_ids=masked)
    logits = logits_of(hidden, runner.model.lm_head.weight)[:, 60:70] / 0.7
    for seed in range(50):
        runner.sampler.sampling_states.seeds.np[:] = seed
        output, *_ = runner.sample(hidden, make_batch(), None)
        tokens = output.sampled_token_ids[:, 0].numpy()
        assert ((tokens >= 60) & (tokens < 70)).all()
        expected = log_softmax(logits)[np.arange(3), tokens - 60]
        np.testing.assert_allclose(output.logprobs_tensors.logprobs[:, 0], expected, atol=1e-5)


def test_a_step_is_drawn_from_the_weight_that_the_layer_has_then(hidden):
    runner = patched()
    runner.sampler.sampling_states.temperature.np[:] = 0.0
    layer = runner.model.lm_head
    before = runner.sample(hidden, make_batch(), None)[0].sampled_token_ids[:, 0].tolist()
    layer.weight.data[:VOCAB_SIZE] *= -1  # in place, as an update by recorded copies
    in_place = runner.sample(hidden, make_batch(), None)[0].sampled_token_ids[:, 0].tolist()
    layer.weight = nn.Parameter(torch.randn(PADDED_SIZE, WIDTH), requires_grad=False)
    other = runner.sample(hidden, make_batch(), None)[0].sampled_token_ids[:, 0].tolist()
    assert other == logits_of(hidden, layer.weight).argmax(1).tolist()
    assert len({tuple(tokens) for tokens in (before, in_place, other)}) == 3


def test_log_probs_are_given_where_a_request_of_the_step_asks_for_them(hidden):
    runner = patched()
    asked = runner.sampler.sampling_states.num_logprobs
    asked[:] = -1
    assert runner.sample(hidden, make_batch(), None)[0].logprobs_tensors is None
    asked[ROWS[1]] = 0
    assert runner.sample(hidden, make_batch(), None)[0].logprobs_tensors is not None


def set_slot(array, slot, value):
    array[slot] = value


OF_REQUESTS = {
    "top_p": lambda sampler, slot: set_slot(sampler.sampling_states.top_p.np, slot, 0.9),
    "top_k": lambda sampler, slot: set_slot(sampler.sampling_states.top_k.np, slot, 20),
    "min_p": lambda sampler, slot: set_slot(sampler.sampling_states.min_p.np, slot, 0.1),
    "penalty": lambda sampler, slot: set_slot(sampler.penalties_state.use_penalty, slot, True),
    "bias": lambda sampler, slot: set_slot(sampler.logit_bias_state.use_logit_bias, slot, True),
    "bad words": lambda sampler, slot: set_slot(sampler.bad_words_state.num_bad_words.np, slot, 2),
    "log-probs": lambda sampler, slot: set_slot(sampler.sampling_states.num_logprobs, slot, 1),
    "all log-probs": lambda sampler, slot: set_slot(sampler.sampling_states.num_logprobs, slot, PADDED_SIZE),
    "ids": lambda sampler, slot: set_slot(sampler.logprob_token_ids_state.num_token_ids, slot, 1),
}


@pytest.mark.parametrize("name", OF_REQUESTS)
def test_a_request_that_asks_for_more_sends_its_step_to_vllm_and_no_other(name, hidden):
    runner = patched()
    OF_REQUESTS[name](runner.sampler, 1)  # in no step
    assert runner.sample(hidden, make_batch(), None) != "vLLM's"
    OF_REQUESTS[name](runner.sampler, 3)  # the last of the step
    assert runner.sample(hidden, make_batch(), None) == "vLLM's"
    assert runner.sample(hidden, make_batch([4, 0]), None) != "vLLM's"


def test_grammars_and_drafts_send_a_step_to_vllm(hidden):
    runner = patched()
    assert runner.sample(hidden, make_batch(), object()) == "vLLM's"
    drafted = make_batch()
    drafted.num_draft_tokens = 1
    assert runner.sample(hidden, drafted, None) == "vLLM's"
    more_logits = make_batch()
    more_logits.logits_indices = torch.arange(5)
    assert runner.sample(hidden, more_logits, None) == "vLLM's"
    assert runner.sample(hidden, make_batch(), None) != "vLLM's"


class Other(Sampler):
    pass


def set_all(owner, **values):
    vars(owner).update(values)


OF_ENGINES = {
    "several GPUs share": lambda runner: set_all(runner.parallel_config, tensor_parallel_size=2),
    "several GPUs share the": lambda runner: set_all(runner.parallel_config, pipeline_parallel_size=2),
    "has adapters": lambda runner: set_all(runner, lora_config=object()),
    "tokens are drafted": lambda runner: set_all(runner, speculative_config=object()),
    "a sampler of its own": lambda runner: setattr(runner.sampler, "__class__", Other),
    "the sampler has new_state, other_state": lambda runner: set_all(runner.sampler, other_state=0, new_state=0),
    "not those after the temperature": lambda runner: set_all(runner.sampler, logprobs_mode="raw_logprobs"),
    "NaNs are counted": lambda runner: set_all(runner.sampler, compute_nans=True),
    "noise is in float64": lambda runner: set_all(runner.sampler, use_fp64_gumbel=True),
    "what could be sampled is told": lambda runner: set_all(runner.sampler, return_sampling_mask=True),
    "thoughts have budgets": lambda runner: set_all(
        runner.sampler, thinking_budget_state=SimpleNamespace(enabled=True)
    ),
}


@pytest.mark.parametrize("reason", OF_ENGINES)
def test_an_engine_that_does_more_with_all_logits_is_left_to_vllm(reason, hidden, caplog):
    runner = Runner()
    OF_ENGINES[reason](runner)
    with caplog.at_level(logging.INFO, "rlhf_rollout"):
        patched(runner)
    assert runner.sample(hidden, make_batch(), None) == "vLLM's"
    assert reason in caplog.text and "vLLM's sampler draws all tokens" in caplog.text
    own = [record for record in caplog.records if record.name.startswith("rlhf_rollout")]
    assert own and not [record for record in own if record.levelno > logging.INFO]


def test_kernels_that_do_not_depend_on_the_batch_are_vllms(monkeypatch, hidden):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert patched().sample(hidden, make_batch(), None) == "vLLM's"


def test_parts_of_later_versions_that_do_nothing_change_nothing(hidden):
    runner = Runner()
    quiet = {"thinking_budget_state": SimpleNamespace(enabled=False), "return_sampling_mask": False}
    set_all(runner.sampler, needs_logits_processing=None, **quiet)
    assert patched(runner).sample(hidden, make_batch(), None) != "vLLM's"


def test_a_head_that_the_operator_does_not_take_is_left_to_vllm(monkeypatch, hidden, caplog):
    seen = []
    monkeypatch.setattr(sampling_head, "is_fused", lambda *tensors: seen.append(tensors))
    with caplog.at_level(logging.INFO, "rlhf_rollout"):
        assert patched().sample(hidden, make_batch(), None) == "vLLM's"
    assert "does not take a head [150, 8] torch.float32" in caplog.text
    [(states, weight)] = seen
    assert (states.shape, states.dtype, weight.shape) == ((2, WIDTH), torch.float32, (VOCAB_SIZE, WIDTH))


def test_the_first_runner_and_an_installation_without_the_kernels_are_left_alone_without_a_word(monkeypatch, caplog):
    runner = Runner()
    with monkeypatch.context() as changed:
        changed.setattr(patches, "find_spec", lambda name: None)
        patches.patch_runner(runner, (), ())
    patches.patch_runner(runner, ("sampling_head",), ())
    assert "sample" not in vars(runner)
    first = type("GPUModelRunner", (Runner,), {"__module__": "vllm.v1.worker.gpu_model_runner"})()
    patches.patch_runner(first, (), ())
    assert "sample" not in vars(first)
    assert not [record for record in caplog.records if record.name.startswith("rlhf_rollout")]


def test_a_runner_that_lacks_something_is_left_alone_with_a_warning(caplog):
    runner = Runner()
    del runner.sampler.sampling_states.min_p
    patches.patch_runner(runner, (), ())
    assert "sample" not in vars(runner)
    assert "does without the speed-up sampling_head" in caplog.text
    assert "its model runner has no sampler.sampling_states.min_p.np" in caplog.text
