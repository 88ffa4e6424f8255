"""Tokens that vLLM drafts and checks have the distribution, the log-probs and the weights of the policy."""

import asyncio
import copy
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig
from vllm.config import CUDAGraphMode
from vllm.v1.sample import rejection_sampler

from engine_testing import Subject, stopped_amid, update
from rlhf_data.errors import ConfigError, EngineError, WeightSyncError
from rlhf_models.testing import tiny_model_dir
from rlhf_models.weights import hf_named_weights
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.engines.vllm.core import graph_options
from rlhf_rollout.engines.vllm.speculation import expand_rows_on_cpu, plan_as_captured
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.weights.bucket import DRAFT

ALLOWED = range(100, 104)
UNSEEN = ALLOWED[-1]  # by the prompt
PAIRS = list(itertools.product(range(100, 103), repeat=2))
PROMPT = np.array([*itertools.chain(*PAIRS), 101, 101, 102, 100, 100, 102, 101, 100], np.int32)
BOUND = 1e-4  # nats


def spec(path, **options):
    own = {"max_model_len": 256, "max_num_seqs": 256, "masked_ids": (range(100), range(104, 512)), "seed": 0}
    own |= {} if "draft_model" in options else {"speculative": "ngram"}
    return EngineSpec(model=str(path), speculative_tokens=3, **(own | options))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny", initializer_range=0.2)


@pytest.fixture(scope="module")
def draft_path(path, tmp_path_factory):
    """A model that differs from the policy as one of an earlier step does, and in its depth."""
    shallow = tiny_model_dir(tmp_path_factory.mktemp("model") / "draft", initializer_range=0.2, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(shallow)
    policy = AutoModelForCausalLM.from_pretrained(path).state_dict()
    model.load_state_dict({name: policy[name] for name in model.state_dict()})
    model.save_pretrained(shallow)
    return shallow


@pytest.fixture(scope="module", params=["ngram", "model"])
def engine(request, path, draft_path):
    drafts = {"draft_model": str(draft_path)} if request.param == "model" else {}
    engine = build_engine("vllm", spec(path, enable_sleep=True, **drafts))
    yield engine
    asyncio.run(engine.close())


def draft_weights(engine):
    model = engine._loop._core.engine_core.model_executor.driver_worker.model_runner.get_draft_model()
    return {} if model is None else {name: value.clone() for name, value in model.named_parameters()}


@pytest.fixture
def model(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)


def log_softmax(model, tokens, *, temperature=1.0, top_k=None, penalty=1.0):
    """Return what `tokens` [n, L] are drawn from, [n, L - P, allowed], in float64."""
    ids = torch.as_tensor(tokens, dtype=torch.long)
    logits = model(ids).logits[:, len(PROMPT) - 1 : -1, list(ALLOWED)].double()
    for place, number in itertools.product(range(logits.shape[1]), range(len(ALLOWED))):
        seen = (ids[:, : len(PROMPT) + place] == ALLOWED[number]).any(1)
        value = logits[:, place, number]
        logits[:, place, number] = torch.where(seen, torch.where(value > 0, value / penalty, value * penalty), value)
    logits /= temperature
    if top_k is not None:
        logits[logits < logits.topk(top_k).values[..., -1:]] = -torch.inf
    return logits.log_softmax(-1)


def expected(model, completion, **sampling):
    """Return the log-probs of a completion by transformers, [n]."""
    places = torch.tensor(completion.token_ids, dtype=torch.long)[:, None] - ALLOWED.start
    rows = log_softmax(model, np.concatenate([PROMPT, completion.token_ids])[None], **sampling)[0]
    return rows.gather(1, places)[:, 0].numpy()


def generate(engine, **sampling):
    return asyncio.run(engine.generate(PROMPT, SamplingParams(**sampling)))


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 2.0, "top_k": 3}], ids=str)
def test_samples_and_their_logprobs_are_those_of_the_policy(engine, model, sampling):
    length, number = 3, 1500
    completions = generate(engine, max_tokens=length, num_samples=number, seed=5, **sampling)
    drafts, drafted, accepted = np.sum([completion.drafts for completion in completions], 0)
    assert drafts > number / 2 and drafted / 10 < accepted < 0.9 * drafted
    outcomes = np.array(list(itertools.product(ALLOWED, repeat=length)))
    rows = log_softmax(model, np.concatenate([np.tile(PROMPT, (len(outcomes), 1)), outcomes], 1), **sampling)
    logprobs = rows.gather(2, torch.tensor(outcomes)[..., None] - ALLOWED.start)[..., 0].numpy()
    weights = len(ALLOWED) ** np.arange(length)[::-1]
    drawn = np.array([(completion.token_ids - ALLOWED.start) @ weights for completion in completions])
    for completion, outcome in zip(completions, drawn, strict=True):
        assert np.abs(completion.logprobs - logprobs[outcome]).max() < BOUND
    probabilities = np.exp(logprobs.sum(1))
    counts = np.bincount(drawn, minlength=len(outcomes))
    often = number * probabilities > 5
    assert often.sum() > 10 and not counts[probabilities == 0].any()
    seen, means = (np.array([*part[often], part[~often].sum()]) for part in (counts, number * probabilities))
    statistic = ((seen - means) ** 2 / means)[means > 0].sum()
    # The share of chi-square's distribution above it.
    assert torch.special.gammaincc(torch.tensor(often.sum() / 2.0), torch.tensor(statistic / 2)) > 1e-3


def test_greedy_tokens_are_the_most_likely_ones(engine, model):
    [completion] = generate(engine, max_tokens=80, temperature=0.0)
    rows = log_softmax(model, np.concatenate([PROMPT, completion.token_ids])[None])[0]
    assert completion.token_ids.tolist() == (rows.argmax(-1) + ALLOWED.start).tolist()
    assert completion.drafts[2] > 20


def test_penalties_count_the_tokens_of_drafts(engine, model):
    sampling = {"temperature": 0.8, "repetition_penalty": 1.5}
    completions = generate(engine, max_tokens=30, num_samples=8, seed=1, **sampling)
    assert any(UNSEEN in completion.token_ids for completion in completions)
    for completion in completions:
        gap = completion.logprobs - expected(model, completion, temperature=0.8, penalty=1.5)
        assert np.abs(gap).max() < BOUND and completion.drafts[2]


def subject_of(engine, model):
    weights = {name: value.numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    return Subject("vllm", engine, weights, 512)


@pytest.mark.parametrize("mode", ["keep", "restart"])
def test_each_token_has_the_logprob_of_the_weights_that_drew_it(engine, model, mode):
    """Sequences go on behind an update, with drafts from before it; then the engine sleeps and wakes."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in other.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    subjects = [subject_of(engine, each) for each in (model, other)]
    before = draft_weights(engine)

    async def update_amid():
        await update(subjects[0], 1)
        requests = [engine.generate(PROMPT, SamplingParams(max_tokens=120, num_samples=4, seed=2))]
        async with stopped_amid(engine, requests, num_sequences=4) as tasks:
            pausing = asyncio.create_task(engine.pause(mode))
        await pausing
        await update(subjects[1], 2)
        await engine.resume()
        completions = await tasks[0]
        await engine.sleep()
        await engine.wake_up()
        return completions, await engine.generate(PROMPT, SamplingParams(max_tokens=9, seed=2))

    completions, [later] = asyncio.run(update_amid())
    after = draft_weights(engine)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert bool(before) == (engine._spec.draft_model is not None)
    assert np.abs(later.logprobs - expected(other, later)).max() < BOUND
    for completion in completions:
        assert [span.policy_version for span in completion.spans] == [1, 2] and completion.drafts[2]
        first = len(completion.spans[0].token_ids)
        for own, part in zip((model, other), (slice(first), slice(first, None)), strict=True):
            assert np.abs(completion.logprobs - expected(own, completion))[part].max() < BOUND


def test_updates_bring_the_weights_of_the_draft_model(tmp_path):
    """A draft model that gets the policy's weights has all of its tokens accepted, after each update that does so."""
    paths = [tiny_model_dir(tmp_path / str(seed), initializer_range=0.2, tied=False, seed=seed) for seed in range(3)]
    policies = [AutoModelForCausalLM.from_pretrained(path).requires_grad_(False) for path in paths]
    engine = build_engine("vllm", spec(paths[0], draft_model=str(paths[2]), masked_ids=()))
    weights = [{name: value.numpy() for name, value in each.state_dict().items()} for each in policies]

    def accepted(policy):
        """Return the share of the drafted tokens that are accepted, where `policy` has the most likely tokens."""
        [completion] = generate(engine, max_tokens=60, temperature=0.0)
        ids = np.concatenate([PROMPT, completion.token_ids])
        likely = policies[policy](torch.tensor(ids, dtype=torch.long)[None]).logits[0].argmax(-1)
        assert completion.token_ids.tolist() == likely[len(PROMPT) - 1 : -1].tolist()
        return completion.drafts[2] / completion.drafts[1]

    def send(version, policy, draft):
        drafted = {DRAFT + name: value for name, value in weights[draft].items()}
        asyncio.run(update(Subject("vllm", engine, {}, 512), version, weights[policy] | drafted))

    try:
        assert accepted(0) < 0.5
        # vLLM's loader loads the first update, and others repeat what it did.
        for version, (policy, draft, is_same) in enumerate([(0, 0, True), (1, 0, False), (1, 1, True)], 1):
            send(version, policy, draft)
            assert (accepted(policy) == 1.0) == is_same
        del weights[2]["model.norm.weight"]
        with pytest.raises(WeightSyncError, match=r"draft model: model\.norm\.weight"):
            send(4, 0, 2)
    finally:
        asyncio.run(engine.close())


def with_layers_for_drafts(path):
    """Give a model of two layers a third one, which drafts: a copy of its last layer with what stands around it."""
    config = Glm4MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1, num_nextn_predict_layers=1, tie_word_embeddings=False, initializer_range=0.2,
        max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    last, own = "model.layers.1.", "model.layers.2."
    weights |= {name.replace(last, own): value.clone() for name, value in weights.items() if last in name}
    weights |= {f"{own}{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    weights[f"{own}eh_proj.weight"] = torch.eye(64, 128)
    weights[f"{own}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{own}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_a_models_own_layers_draft_and_tokens_are_those_of_its_weights_before_and_after_an_update(path, tmp_path):
    own = with_layers_for_drafts(tiny_model_dir(tmp_path / "own", vocab_size=512))
    with pytest.raises(ConfigError, match=r"has no layers that predict several tokens(.|\n)*hint: draft with"):
        build_engine("vllm", spec(path, speculative="mtp"))
    engine = build_engine("vllm", spec(own, speculative="mtp", max_num_seqs=8))
    before = draft_weights(engine)
    policy = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32).requires_grad_(False)
    try:
        for version, scale in enumerate((1.0, 0.9, 0.8), 1):
            for name, value in policy.named_parameters():
                value *= scale if "proj" in name else 1.0
            weights = {name: value.numpy() for name, value in hf_named_weights(policy)}
            asyncio.run(update(Subject("vllm", engine, weights, 512), version))
            completions = generate(engine, max_tokens=40, num_samples=4, seed=3)
            assert sum(completion.drafts[2] for completion in completions)
            for completion in completions:
                assert np.abs(completion.logprobs - expected(policy, completion)).max() < BOUND
            [likely] = generate(engine, max_tokens=40, temperature=0.0)
            rows = log_softmax(policy, np.concatenate([PROMPT, likely.token_ids])[None])[0]
            assert likely.token_ids.tolist() == (rows.argmax(-1) + ALLOWED.start).tolist()
        after = draft_weights(engine)
        layers = [name for name in before if "mtp_block" in name]
        assert layers and all(torch.equal(before[name], after[name]) for name in layers)
    finally:
        asyncio.run(engine.close())


def test_speed_ups_of_single_tokens_are_left_out(engine):
    scheduler = engine._loop._core.engine_core.scheduler
    assert "schedule" not in vars(scheduler)
    assert not {"allocate_slots", "cache_blocks"} & vars(scheduler.kv_cache_manager).keys()


@pytest.mark.parametrize(
    ("slots", "length", "last"), [(2, 256, [1, 2, 4, 8]), (64, 256, [224, 232, 240, 248, 256]), (64, 30, [16, 24, 28])]
)
def test_graphs_hold_drafts_of_any_length_and_no_more_tokens_than_a_sequence(path, slots, length, last):
    options = graph_options(spec(path, max_num_seqs=slots, max_model_len=length))
    assert options["cudagraph_mode"] == "FULL" and options["cudagraph_capture_sizes"][-len(last) :] == last
    plain = graph_options(spec(path, max_num_seqs=2, speculative=None))
    assert plain == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2]}


@pytest.mark.parametrize(
    ("mode", "padded", "planned"), [("FULL", 24, 24), ("FULL", None, 1), ("FULL_DECODE_ONLY", 24, 1)]
)
def test_attention_is_planned_for_the_kernel_of_the_graph_that_a_step_replays(mode, padded, planned):
    runner = SimpleNamespace(cudagraph_dispatcher=SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode]))
    runner._build_attention_metadata = lambda **options: options
    plan_as_captured(runner)
    given = {"num_tokens": 20, "num_tokens_padded": padded}
    assert runner._build_attention_metadata(max_query_len=1, **given) == {"max_query_len": planned, **given}


def test_draft_models_of_other_vocabularies_are_refused(path, tmp_path):
    other = tiny_model_dir(tmp_path / "other", vocab_size=300)
    with pytest.raises(
        ConfigError, match=r"vocabulary of 300 tokens, and the policy one of 512(.|\n)*hint: draft with"
    ):
        build_engine("vllm", spec(path, draft_model=str(other)))
    with pytest.raises(ConfigError, match="none"):
        build_engine("vllm", spec(path, draft_model=str(tmp_path / "none")))
    head = tiny_model_dir(tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    for kind in ("LlamaForCausalLMEagle3", "MiMoMTPModel", "MedusaModel", "MLPSpeculatorPreTrainedModel"):
        (head / "config.json").write_text(json.dumps(config | {"architectures": [kind]}))
        with pytest.raises(ConfigError, match=rf"is a {kind}, which drafts from (.|\n)*hint: draft with"):
            build_engine("vllm", spec(path, draft_model=str(head)))


def test_what_drafts_do_not_go_with_is_refused(engine):
    with pytest.raises(EngineError, match=r"vLLM drafts no tokens for ``min_p``(.|\n)*hint: use ``min_p=0``"):
        generate(engine, max_tokens=1, min_p=0.1)
    with pytest.raises(EngineError, match=r"longer than min_tokens 8 (.|\n)*hint: use min_tokens 0"):
        generate(engine, max_tokens=9, min_tokens=8)
    [completion] = generate(engine, max_tokens=9, min_tokens=9, stop_token_ids=(101,))
    assert len(completion.token_ids) == 9 and 101 not in completion.token_ids
    with pytest.raises(ConfigError, match=r"two ways to draft tokens(.|\n)*hint: drop one of them"):
        EngineSpec(model="", speculative="ngram", draft_model="small")
    with pytest.raises(ConfigError, match="unknown speculative"):
        EngineSpec(model="", speculative="eagle")
    for option in ({"return_routes": True}, {"adapter_rank": 4}, {"images": True}, {"tensor_parallel_size": 2}):
        with pytest.raises(ConfigError, match=r"not tested with ``(.|\n)*hint: drop one of them"):
            EngineSpec(model="", draft_model="small", **option)
    for kind in ("fake", "transformers"):
        with pytest.raises(ConfigError, match=f"engine {kind} drafts no tokens"):
            EngineSpec(model="", speculative="ngram").check_kind(kind)


def test_drafts_without_a_token_are_no_fault_of_a_step():
    expand_rows_on_cpu()
    limits = SimpleNamespace(
        all_greedy=False, temperature=torch.ones(2), top_k=torch.tensor([3, 3]), top_p=None, all_random=True
    )
    logits = torch.empty(0, 512)
    assert rejection_sampler.apply_sampling_constraints(logits, torch.zeros(2, dtype=torch.int32), limits) is logits
