"""A reward model whose weights are divided over processes: the scores of the whole model, and processes that fail."""

import asyncio
import os
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_data.errors import ConfigError, DataError, EngineError, RewardError
from rlhf_data.records import Prompt
from rlhf_models.loading import load_reward_model
from rlhf_models.reward import score_sequences
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.ray_actors import RewardModelActor, plain_errors
from rlhf_rollout.rewards.model import ModelReward
from rlhf_rollout.rewards.sources import CallOptions, RewardSource
from rlhf_train import processes as online_cluster
from rlhf_train.cluster.placement import PlacementRequest, plan_placement
from rlhf_train.cluster.ray_session import started_cluster
from rlhf_train.generation import divided_rewards
from rlhf_train.generation.divided_rewards import (
    DividedScorer,
    RewardRank,
    _all_answers,
    _even_batches,
    _ProcessGoneError,
)
from rlhf_train.generation.run_spec import RewardSpec
from rlhf_train.processes import placed_bundles, start_scorers
from trainer_testing import random_rollouts
from warm_commands import warm_commands

VOCAB_SIZE = 512
MODELS = {"actor": SimpleNamespace(packing=False, torch_compile="auto")}

# Processes get the classes below by value. By name they would import this file, and PyTorch with it, in seconds.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Whose processes are forks: DeepSpeed is imported once."""
    with warm_commands(["worker"]), started_cluster(16, 0):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Its matrices have more than 100,000 weights: DeepSpeed leaves smaller ones gathered between passes."""
    sizes = {"hidden_size": 320, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4}
    return str(
        tiny_reward_model_dir(tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, mean=0.5, std=2.0, **sizes)
    )


def sequences(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, rng.integers(1, 40)).astype(np.int32) for _ in range(count)]


def starts_of(path: str, *, num_ranks: int, **options):
    return [lambda: ray.remote(Reachable).options(num_cpus=0).remote(path, dtype="float32", **options)] * num_ranks


@pytest.fixture(scope="module")
def scorer(folder):
    """Of three processes, with several sequences per pass as on a GPU."""
    return DividedScorer(starts_of(folder, num_ranks=3, normalize=True), batch_size=4)


class Reachable(RewardRank):
    """Says how much of the weights it has."""

    def weights_here(self) -> tuple[int, int]:
        from rlhf_train.engine.deepspeed_internals import frozen_parts

        parts = sum(part.numel() for part in frozen_parts(self._model))
        return parts, sum(weight.ds_numel for weight in self._model.parameters())


class Light(RewardRank):
    """Scores a sequence by its sum, without a model or PyTorch, for what is between the scorer and its processes."""

    def load(self, rank, num_ranks, master):
        self._limits = SimpleNamespace(num_rows=VOCAB_SIZE, context=100)
        self._error = None

    def score(self, passes):
        self.ready()
        return [sums(sequences) for sequences in passes]

    def pid(self) -> int:
        return os.getpid()

    def hang(self) -> None:
        time.sleep(1000)


def sums(token_ids) -> list[float]:
    return [float(sum(sequence)) for sequence in token_ids]


def light_starts(started: list, kind: type = Light):
    def start():
        started.append(ray.remote(kind).options(num_cpus=0).remote("no model", dtype="float32"))
        return started[-1]

    return [start] * 2


def expected(path: str, token_ids, **options) -> list[float]:
    return score_sequences(load_reward_model(path, dtype="float32", **options), token_ids, batch_size=1)


def test_scores_are_those_of_the_whole_model_and_each_process_has_its_part(scorer, folder):
    wanted = sequences(10)

    async def all_calls():
        return await asyncio.gather(scorer.score(wanted[:7]), scorer.score([]), scorer.score(wanted[7:]))

    first, nothing, rest = asyncio.run(all_calls())
    assert nothing == []
    assert first + rest == pytest.approx(expected(folder, wanted, normalize=True), abs=1e-5)
    plain = expected(folder, wanted)
    assert first + rest == pytest.approx([(score - 0.5) / 2.0 for score in plain], abs=1e-5)
    for here, whole in ray.get([handle.weights_here.remote() for handle in scorer.handles]):
        assert whole / 3 <= here < 0.5 * whole
    assert all(seconds > 0 for seconds in ray.get([handle.ready.remote() for handle in scorer.handles]))


@pytest.mark.parametrize("count", [1, 3, 29])
def test_any_number_of_sequences_is_scored(scorer, folder, count):
    wanted = sequences(count, seed=1)
    assert asyncio.run(scorer.score(wanted)) == pytest.approx(expected(folder, wanted, normalize=True), abs=1e-5)


def test_passes_are_equally_many_for_each_process():
    lengths = [[1, 2, 3, 4, 5], [6], []]
    assert _even_batches(lengths, 2) == [[[0, 1], [2, 3], [4]], [[0], [], []], [[], [], []]]
    assert _even_batches([[20_000, 20_000], [20_000]], 64) == [[[0], [1]], [[0], []]]  # 32,768 tokens per pass


def test_bad_sequences_are_refused_before_any_process_sees_them(scorer, folder):
    good = sequences(2)

    async def all_calls():
        bad = [np.array([5, VOCAB_SIZE], np.int32)]
        calls = (scorer.score(good), scorer.score(bad), scorer.score([np.zeros(0, np.int32)]))
        return await asyncio.gather(*calls, return_exceptions=True)

    scores, stray, empty = asyncio.run(all_calls())
    assert scores == pytest.approx(expected(folder, good, normalize=True), abs=1e-5)
    assert isinstance(stray, DataError) and "512 embedding rows and got the token id 512" in str(stray)
    assert isinstance(empty, DataError) and "empty sequence" in str(empty)


def test_requests_that_wait_share_a_call_up_to_its_limit():
    scorer = object.__new__(DividedScorer)
    scorer._most_at_once, scorer._waiting, scorer._num_alone = 6, [], 0

    async def taken() -> list[list[int]]:
        from rlhf_train.generation.divided_rewards import _Request

        scorer._waiting = [_Request([np.zeros(1)] * count) for count in (9, 4, 1, 1, 1, 3)]
        scorer._waiting[2].answer.cancel()
        found = []
        while requests := scorer._next():
            found.append([len(request.token_ids) for request in requests])
        return found

    assert asyncio.run(taken()) == [[9], [4, 1, 1], [3]]


def test_model_without_a_score_is_an_error_of_the_start(tmp_path):
    path = str(tiny_model_dir(tmp_path / "actor"))
    scorer = DividedScorer(starts_of(path, num_ranks=1), batch_size=4, on_cpu=True)
    with pytest.raises(ConfigError, match="has no scalar head"), plain_errors(RewardError):
        ray.get(scorer.handles[0].ready.remote())
    with pytest.raises(ConfigError, match="has no scalar head"):
        asyncio.run(scorer.score(sequences(1)))


@pytest.mark.parametrize("count", [1, 6])
def test_processes_start_again_after_one_has_died_and_lose_no_score(count):
    started: list = []
    scorer = DividedScorer(light_starts(started), batch_size=4, on_cpu=True)
    reward = ModelReward([scorer], CallOptions(batch_size=8), timeout_s=120)
    rollouts = random_rollouts(count, vocab_size=VOCAB_SIZE)

    async def verdicts(kills: bool):
        if kills:
            os.kill(await scorer.handles[1].pid.remote(), signal.SIGKILL)
        return await reward.score(Prompt("prompt", [3], "text"), rollouts)

    async def both():
        return await verdicts(False), await verdicts(True)

    for found in asyncio.run(both()):
        assert [verdict.reward for verdict in found] == sums(rollout.token_ids for rollout in rollouts)
    assert len(started) == 4
    with pytest.raises(RewardError), plain_errors(RewardError):  # the others ended, too: they would wait for it
        ray.get(started[0].pid.remote())


class Dying(Light):
    """Dies in each call."""

    def score(self, passes):
        os._exit(1)


def test_processes_that_never_answer_start_three_times():
    started: list = []
    scorer = DividedScorer(light_starts(started, Dying), batch_size=4, on_cpu=True)
    ended = "have ended 3 times in a row without an answer"
    for match in ("is gone", ended, ended):  # a call whose process dies is made twice
        with pytest.raises(RewardError, match=match):
            asyncio.run(scorer.score(sequences(1)))
    assert len(started) == 6


class Failing(Light):
    """Runs out of memory where it gets more than two sequences."""

    def score(self, passes):
        if sum(map(len, passes)) > 2:
            raise RewardError("the GPU has too little memory")
        return super().score(passes)


def test_sequences_of_a_call_that_failed_are_scored_one_by_one():
    started: list = []
    scorer = DividedScorer(light_starts(started, Failing), batch_size=8, on_cpu=True)
    reward = ModelReward([scorer], CallOptions(batch_size=8), timeout_s=120)
    rollouts = random_rollouts(6, vocab_size=VOCAB_SIZE)
    found = asyncio.run(reward.score(Prompt("prompt", [3], "text"), rollouts))
    assert [verdict.reward for verdict in found] == sums(rollout.token_ids for rollout in rollouts)
    assert len(started) == 4


def test_error_of_a_load_that_nobody_foresaw_is_told_with_its_text(folder):
    starts = starts_of(folder, num_ranks=1, attn_implementation="auto", device="nowhere")
    [handle] = DividedScorer(starts, batch_size=4, on_cpu=True).handles
    with pytest.raises(EngineError, match=r"(?s)cannot be loaded: .*nowhere.*hint: "), plain_errors(RewardError):
        ray.get(handle.ready.remote())


@pytest.mark.parametrize("is_told", [True, False])
def test_a_peer_that_fails_first_waits_for_word_of_a_death_but_not_for_ever(monkeypatch, is_told):
    async def call(seconds: float, error: Exception):
        await asyncio.sleep(seconds)
        raise error

    async def calls():
        peer = call(0.0, RewardError("connection closed"))
        dead = call(0.05 if is_told else 60.0, _ProcessGoneError("a process has ended"))
        async with asyncio.timeout(30):
            await _all_answers([asyncio.ensure_future(each) for each in (peer, dead)])

    monkeypatch.setattr(divided_rewards, "_DEATH_S", 0.5)
    with pytest.raises(RewardError, match="a process has ended" if is_told else "connection closed"):
        asyncio.run(calls())


def test_processes_that_hang_end_after_two_late_calls_and_start_again():
    started: list = []
    scorer = DividedScorer(light_starts(started), batch_size=4, on_cpu=True)
    wanted = sequences(3)

    async def calls():
        await scorer.score(wanted[:1])
        started[1].hang.remote()
        late = 0
        for _ in range(2):
            try:
                async with asyncio.timeout(0.5):
                    await scorer.score(wanted)
            except TimeoutError:
                late += 1
        assert late == 2
        return await scorer.score(wanted)

    assert asyncio.run(calls()) == sums(wanted)
    assert len(started) == 4


def test_reward_models_of_a_run_have_the_frequencies_of_its_longest_sequence_and_its_images(monkeypatch):
    started = []
    monkeypatch.setattr(online_cluster, "_start_one", lambda *args, **kwargs: started.append((args[0], kwargs)))
    monkeypatch.setattr(online_cluster, "DividedScorer", lambda starts, **_: [start() for start in starts])
    monkeypatch.setattr(online_cluster.ray, "remote", lambda *args, **_: args[0] if args else lambda kind: kind)
    reward = RewardSpec(
        sources=tuple(RewardSource(kind="model", targets=(path,)) for path in ("one", "other", "steps")),
        divided_models=("one",),
        process_models=frozenset({"steps"}),
    )
    plan = plan_placement(PlacementRequest(ranks={"actor": 1}, reward_ranks=1), [])
    engine = EngineSpec(model="none", max_model_len=77, images=True)
    start_scorers(SimpleNamespace(plan=plan, reward=reward, engine=engine, models=MODELS), None)
    assert [kind for kind, _ in started] == [RewardRank, RewardModelActor, RewardModelActor]
    assert [options["max_length"] for _, options in started] == [77, 77, 77]
    assert [options.get("images") for _, options in started] == [None, True, True]


def test_a_divided_model_has_the_frequencies_of_the_longest_sequence_of_the_run(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, "attention_factor": 1.0}
    rope |= {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    folder = tiny_reward_model_dir(tmp_path, architecture="llama", rope_parameters=rope, initializer_range=0.5)
    wanted = [np.arange(20, 30, dtype=np.int32)]
    divided = DividedScorer(starts_of(str(folder), num_ranks=1, max_length=9), batch_size=4)
    found = asyncio.run(divided.score(wanted))
    plain = AutoModelForSequenceClassification.from_pretrained(
        folder, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    )
    assert found == pytest.approx(plain(torch.tensor(np.array(wanted))).logits[0].tolist(), abs=1e-5)


def test_a_run_starts_one_scorer_of_a_divided_model_and_replicas_of_another(folder, tmp_path):
    sizes = {"vocab_size": VOCAB_SIZE, "mean": 1.0, "std": 3.0}
    paths = (folder, str(tiny_reward_model_dir(tmp_path / "other", seed=5, **sizes)))
    sources = tuple(RewardSource(kind="model", targets=(path,)) for path in paths)
    calls = CallOptions(batch_size=2)
    reward = RewardSpec(sources=sources, calls=calls, divided_models=(folder,), normalize_reward=True)
    plan = plan_placement(PlacementRequest(ranks={"actor": 1}, reward_ranks=2), [])
    job = SimpleNamespace(plan=plan, reward=reward, engine=EngineSpec(model="none"), models=MODELS)
    wanted = sequences(5)
    with placed_bundles(plan) as reserved:
        [divided], replicas = start_scorers(job, reserved)
        assert (len(divided.handles), len(replicas)) == (2, 2)
        for path, scorer in zip((folder, paths[1], paths[1]), (divided, *replicas), strict=True):
            normalized = expected(path, wanted, normalize=True)
            assert asyncio.run(scorer.score(wanted)) == pytest.approx(normalized, abs=1e-5)
        assert ray.get([replica.handle.has_moments.remote() for replica in replicas]) == [True, True]
