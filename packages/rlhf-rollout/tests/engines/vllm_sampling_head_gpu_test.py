"""vLLM on a GPU with the operator of the LM head: tokens and log-probs are those of the head's float64 softmax.

Each engine is in this process, where the calls of the operator can be seen. One engine lives at a time.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_models.testing import tiny_model_dir
from rlhf_models.weights import hf_named_weights
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.vllm.core import prepare_environment
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.weights.source import WeightSource

VOCAB_SIZE, WIDTH = 1000, 256  # vLLM pads the head to 1024 rows
MASKED = range(960, 1000)
PROMPTS = [np.arange(3 + number, 5 + number + number % 7, dtype=np.int32) for number in range(24)]
# bfloat16 keeps 8 bits of an activation; the logits of this model stay below 8 in size.
LOGPROB_TOLERANCE = 0.1
LEFT: list[Any] = []  # memory of engines that were closed
HEADS = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512}


@dataclass
class Record:
    """What the operator drew, compared with the float64 softmax of its hidden states.

    Attributes:
        seeds: of each row, as all lists but `greedy_losses` and `steps`.
        positions: of the token before the drawn one.
        errors: distances of the log-probs, in nats.
        greedy_losses: of greedy rows, how far the logit of the token is below the highest.
        num_forbidden: tokens that are masked.
        weight: that of the last call.
        shares: the sum of all rows' probabilities, [V].
        steps: per step whether the operator drew its tokens, and whether a request of it had a `top_p`.
    """

    seeds: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    greedy_losses: list[float] = field(default_factory=list)
    num_forbidden: int = 0
    weight: torch.Tensor | None = None
    shares: Any = 0.0
    steps: list[tuple[bool, bool]] = field(default_factory=list)

    def add(self, hidden: Any, weight: Any, temperature: Any, seeds: Any, positions: Any, *, drawn: Any) -> None:
        """Add a call and its result."""
        logits = hidden.double() @ weight.double().T
        logits[:, MASKED.start : MASKED.stop] = -torch.inf
        own = logits.gather(1, drawn.token_ids[:, None])[:, 0]
        is_greedy = temperature == 0
        logprobs = (logits / torch.where(is_greedy, 1.0, temperature)[:, None].double()).log_softmax(1)
        expected = logprobs.gather(1, drawn.token_ids[:, None])[:, 0]
        self.errors += (drawn.logprobs - expected).abs().tolist()
        self.greedy_losses += (logits.amax(1) - own)[is_greedy].tolist()
        self.num_forbidden += int(((drawn.token_ids >= MASKED.start) & (drawn.token_ids < MASKED.stop)).sum())
        self.seeds += seeds.tolist()
        self.positions += positions.tolist()
        self.weight = weight
        self.shares = self.shares + logprobs.exp().sum(0)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    prepare_environment()  # before vLLM is imported
    from rlhf_rollout.engines.vllm.patches import sampling_head

    found = Record()
    draw = sampling_head.linear_sample
    takes = sampling_head.SamplingHead.takes

    def draw_and_add(*given: Any, bias: Any) -> Any:
        drawn = draw(*given, bias=bias)
        found.add(*given, drawn=drawn)
        return drawn

    def takes_and_add(self: Any, batch: Any, grammar_output: Any) -> bool:
        is_taken = takes(self, batch, grammar_output)
        states = self._runner.sampler.sampling_states
        found.steps.append((is_taken, bool((states.top_p.np[batch.idx_mapping_np] != 1).any())))
        return is_taken

    monkeypatch.setattr(sampling_head, "linear_sample", draw_and_add)
    monkeypatch.setattr(sampling_head.SamplingHead, "takes", takes_and_add)
    return found


def start(path: Path, **options: Any) -> Any:
    spec = EngineSpec(
        model=str(path),
        max_model_len=128,
        max_num_seqs=64,
        kv_cache_memory_bytes=256 << 20,
        gpu_memory_utilization=0.05,
        masked_ids=(MASKED,),
        seed=0,
        **{"dtype": "bfloat16"} | options,
    )
    return build_engine("vllm", spec)


def ask(engine: Any, requests: Sequence[tuple[np.ndarray, SamplingParams]]) -> list[list[Completion]]:
    """Return the completions of requests that run side by side."""

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt, sampling in requests))

    return asyncio.run(all_of_them())


def greedy(engine: Any) -> list[Completion]:
    sampling = SamplingParams(max_tokens=24, temperature=0)
    return [group[0] for group in ask(engine, [(prompt, sampling) for prompt in PROMPTS])]


@torch.no_grad()
def expected_logprobs(model: Any, prompt: np.ndarray, completion: Completion, temperature: float) -> torch.Tensor:
    """The log-probs of the vocabulary before each token of a completion, by transformers."""
    tokens = torch.tensor(np.concatenate([prompt, completion.token_ids]), dtype=torch.long, device="cuda")[None]
    logits = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    logits[:, MASKED.start : MASKED.stop] = -torch.inf
    return (logits / temperature).log_softmax(-1)


def mean_difference(
    model: Any, groups: Sequence[tuple[np.ndarray, SamplingParams]], answers: Sequence[Sequence[Completion]]
) -> float:
    """The mean distance between the engine's log-probs and those of transformers, in nats."""
    found = []
    for (prompt, sampling), group in zip(groups, answers, strict=True):
        for completion in group:
            expected = expected_logprobs(model, prompt, completion, sampling.temperature or 1.0)
            own = expected.gather(1, torch.tensor(completion.token_ids, device="cuda").long()[:, None])[:, 0]
            found.append((own - torch.tensor(completion.logprobs, device="cuda")).abs())
    return float(torch.cat(found).mean())


def test_an_engine_in_float32_samples_as_vllm_does(tmp_path: Path, record: Record) -> None:
    from transformers import AutoModelForCausalLM

    tiny_model_dir(tmp_path, vocab_size=VOCAB_SIZE, dtype=torch.float32, **HEADS)
    engine = start(tmp_path, dtype="float32", enforce_eager=True)
    try:
        requests = requests_of([0.0, 0.7])
        answers = ask(engine, requests)
    finally:
        asyncio.run(engine.close())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).cuda().eval()
    assert not record.steps and not record.errors
    # Products in float32 may be in TF32 on a GPU.
    assert mean_difference(model, requests, answers) < 1e-2


@dataclass
class Subject:
    """An engine with the operator, the model of its folder in transformers, and what vLLM's sampler gave greedily."""

    engine: Any
    model: Any
    plain: list[Completion]
    has_graphs: bool

    def send(self, version: int) -> None:
        sender = WeightSource("shared_memory", bucket_bytes=400_000, checksum=True)
        sender.send(hf_named_weights(self.model), [self.engine], version)


@pytest.fixture(scope="module")
def own_memory() -> Iterator[None]:
    """Have vLLM not see what other tests take of the GPU meanwhile: it compares the free memory around a sleep."""
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (total, total))
        yield


@pytest.fixture(scope="module", params=["tied", "untied"])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, own_memory: None
) -> Iterator[Subject]:
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp(request.param)
    tiny_model_dir(path, tied=request.param == "tied", vocab_size=VOCAB_SIZE, dtype=torch.bfloat16, **HEADS)
    # Only one engine of a process can have CUDA graphs.
    engine = start(path, skip_patches=("sampling_head",), enforce_eager=True)
    plain = greedy(engine)
    asyncio.run(engine.close())
    engine = start(path, enable_sleep=True, enforce_eager=request.param == "untied")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    yield Subject(engine, model, plain, has_graphs=request.param == "tied")
    asyncio.run(engine.close())
    # vLLM's memory for engines that can sleep is for one engine in a process: the next one gets its own.
    from vllm.device_allocator.cumem import CuMemAllocator

    LEFT.append(CuMemAllocator.instance)  # what is freed later goes back to it
    CuMemAllocator.instance = None


def requests_of(temperatures: Sequence[float], **sampling: Any) -> list[tuple[np.ndarray, SamplingParams]]:
    found = []
    for number, prompt in enumerate(PROMPTS):
        temperature = temperatures[number % len(temperatures)]
        options = {"num_samples": 2 if temperature else 1, "max_tokens": 24, "seed": number} | sampling
        found.append((prompt, SamplingParams(temperature=temperature, **options)))
    return found


def test_tokens_and_log_probs_are_those_of_the_heads_float64_softmax(subject: Subject, record: Record) -> None:
    requests = requests_of([0.0, 0.6, 1.0, 1.5])
    answers = ask(subject.engine, requests)
    num_tokens = sum(len(completion.token_ids) for group in answers for completion in group)
    assert len(record.errors) >= num_tokens > 500 and record.greedy_losses
    assert max(record.errors) < 1e-3 and max(record.greedy_losses) < 1e-3
    assert record.num_forbidden == 0 and record.weight.shape == (VOCAB_SIZE, WIDTH)
    assert all(is_taken for is_taken, _ in record.steps)
    assert mean_difference(subject.model, requests, answers) < LOGPROB_TOLERANCE


def test_greedy_tokens_are_vllms_up_to_near_ties(subject: Subject, record: Record) -> None:
    num_equal = 0
    for prompt, one, other in zip(PROMPTS, greedy(subject.engine), subject.plain, strict=True):
        pairs = zip(one.token_ids.tolist(), other.token_ids.tolist(), strict=False)
        first = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
        num_equal += len(one.token_ids) if first is None else first
        if first is not None:
            values = expected_logprobs(subject.model, prompt, one, 1.0)[first]
            assert values.max() - values[int(other.token_ids[first])] < 3 * LOGPROB_TOLERANCE
            assert values.max() - values[int(one.token_ids[first])] < 3 * LOGPROB_TOLERANCE
    assert record.greedy_losses and num_equal > len(PROMPTS)


def test_first_tokens_have_the_distribution_of_the_softmax(subject: Subject, record: Record) -> None:
    drawn = SamplingParams(num_samples=4096, max_tokens=1, temperature=0.8)
    requests = [(PROMPTS[5], drawn), (PROMPTS[5], drawn), (PROMPTS[5], replace(drawn, seed=7))]
    tokens = [int(one.token_ids[0]) for group in ask(subject.engine, requests) for one in group]
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    expected = record.shares.cpu().numpy() * len(tokens) / record.shares.sum().item()
    rare = expected < 5
    assert counts[expected == 0].sum() == 0
    counts, expected = (np.append(part[~rare], part[rare].sum()) for part in (counts, expected))
    freedom = len(expected) - 1
    assert len(tokens) == 3 * 4096 and freedom > 20
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5


def test_steps_with_a_request_of_top_p_are_vllms_and_others_are_not(subject: Subject, record: Record) -> None:
    requests = requests_of([1.0])
    restricted = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.5)
    answers = ask(subject.engine, [*requests, (PROMPTS[0], restricted)])
    assert {len(completion.token_ids) for group in answers[:-1] for completion in group} <= set(range(1, 25))
    assert {is_taken for is_taken, _ in record.steps} == {True, False}
    assert all(is_taken != has_top_p for is_taken, has_top_p in record.steps)
    assert mean_difference(subject.model, requests, answers[:-1]) < LOGPROB_TOLERANCE
    assert max(record.errors) < 1e-3


def test_the_same_seed_gives_the_same_tokens_and_another_one_others(subject: Subject) -> None:
    found = []
    for seed in (3, 3, 4):
        sampling = SamplingParams(num_samples=4, max_tokens=24, seed=seed)
        group = ask(subject.engine, [(PROMPTS[3], sampling)])[0]
        found.append([completion.token_ids.tolist() for completion in group])
    assert found[0] == found[1] != found[2]
    assert len(set(map(tuple, found[0]))) > 1


def test_several_decode_steps_per_step_of_the_scheduler(
    subject: Subject, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_rollout.engines.vllm.patches import multi_step
    from rlhf_rollout.engines.vllm.patches.replayed_steps import ReplayedSteps

    monkeypatch.setattr(multi_step, "TOKENS_PER_STEP", 1e-9)
    own = multi_step._MultiStep._num_steps
    seen = []

    def four(self: Any, *given: Any) -> int:
        self.number = 4
        seen.append(own(self, *given))
        return seen[-1]

    monkeypatch.setattr(multi_step._MultiStep, "_num_steps", four)
    compute = ReplayedSteps.compute
    replayed = []

    def count(self: Any, begun: Any, first: Any, number: int) -> Any:
        replayed.append(number)
        return compute(self, begun, first, number)

    monkeypatch.setattr(ReplayedSteps, "compute", count)
    requests = requests_of([1.0, 0.7])
    answers = ask(subject.engine, requests)
    assert 4 in seen and all(is_taken for is_taken, _ in record.steps)
    assert max(record.errors) < 1e-3
    assert mean_difference(subject.model, requests, answers) < LOGPROB_TOLERANCE
    # Each token of a sequence has noise of its own.
    noise = list(zip(record.seeds, record.positions, strict=True))
    assert len(noise) == len(set(noise)) > 500
    assert (3 in replayed) == subject.has_graphs and set(replayed) <= {1, 2, 3}
    # Steps that the host prepares one by one draw the same.
    monkeypatch.setattr(ReplayedSteps, "begun", lambda self: None)
    replayed.clear()
    prepared = ask(subject.engine, requests)
    assert not replayed
    pairs = [pair for groups in zip(answers, prepared, strict=True) for pair in zip(*groups, strict=True)]
    same = [one.token_ids.tolist() == other.token_ids.tolist() for one, other in pairs]
    assert np.mean(same) > 0.9  # the rest are near ties


def test_sleep_and_updates_leave_the_weight_that_is_drawn_from_the_engines(subject: Subject, record: Record) -> None:
    requests = requests_of([1.0])
    before = ask(subject.engine, requests[:1])
    asyncio.run(subject.engine.sleep())
    asyncio.run(subject.engine.wake_up())
    again = ask(subject.engine, requests[:1])
    assert again[0][0].token_ids.tolist() == before[0][0].token_ids.tolist()
    for version in (1, 2):
        with torch.no_grad():
            for number, parameter in enumerate(subject.model.parameters()):
                noise = torch.Generator("cuda").manual_seed(100 * version + number)
                drawn = torch.randn(parameter.shape, generator=noise, device="cuda")
                parameter.add_(drawn.to(parameter.dtype), alpha=0.05)
        stale = ask(subject.engine, requests)
        assert mean_difference(subject.model, requests, stale) > 2 * LOGPROB_TOLERANCE
        subject.send(version)
        answers = ask(subject.engine, requests)
        assert torch.equal(record.weight, subject.model.get_output_embeddings().weight)
        assert mean_difference(subject.model, requests, answers) < LOGPROB_TOLERANCE
    # Weights that sleep drops come back with an update.
    asyncio.run(subject.engine.sleep(keep_weights=False))
    asyncio.run(subject.engine.wake_up())
    subject.send(3)
    answers = ask(subject.engine, requests)
    assert mean_difference(subject.model, requests, answers) < LOGPROB_TOLERANCE
    assert max(record.errors) < 1e-3 and all(is_taken for is_taken, _ in record.steps)
