"""Rewards by reward models: batches, replicas and failures on scripted scorers; a real tiny model in this process."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, VerdictKind
from rlhf_models.host_states import RestingModel
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_rollout.rewards.model import LocalScorer, ModelReward, ProcessReward
from rlhf_rollout.rewards.sources import CallOptions

PROMPT = Prompt("p0", [5, 6], "two tokens")


def rollouts(*responses: Sequence[int]) -> list[Rollout]:
    spans = [(Span(SpanSource.PROMPT, [5, 6]), Span(SpanSource.POLICY, ids, [-1.0] * len(ids), 0)) for ids in responses]
    return [Rollout(f"r{index}", "g", pair, FinishReason.STOP) for index, pair in enumerate(spans)]


class Scripted:
    """Scores the last token minus 10; raises for the token 13, or `error` for any, and gives NaN for 14."""

    def __init__(self, hold: asyncio.Event | None = None, excess: int = 0, error: Exception | None = None) -> None:
        self.batches: list[list[list[int]]] = []
        self._error = error
        self._hold = hold
        self._excess = excess

    async def score(self, token_ids: list[np.ndarray]) -> list[float]:
        self.batches.append([ids.tolist() for ids in token_ids])
        if self._hold:
            await self._hold.wait()
        if self._error:
            raise self._error
        if any(13 in ids for ids in token_ids):
            raise RuntimeError("unlucky\nand more")
        return [float("nan") if ids[-1] == 14 else float(ids[-1]) - 10.0 for ids in token_ids] + [0.0] * self._excess


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_model_reward_sends_prompt_and_response_as_tokens_and_compares_with_the_threshold() -> None:
    scorer = Scripted()
    reward = ModelReward([scorer], CallOptions(success_threshold=1.5))
    verdicts = run(reward.score(PROMPT, rollouts([7, 12], [9], [10])))
    assert scorer.batches == [[[5, 6, 7, 12], [5, 6, 9], [5, 6, 10]]]
    assert [(verdict.kind, verdict.reward, verdict.score) for verdict in verdicts] == [
        (VerdictKind.OK, 2.0, 2.0),
        (VerdictKind.WRONG, -1.0, -1.0),
        (VerdictKind.WRONG, 0.0, 0.0),
    ]


def test_model_reward_by_turn_scores_the_conversation_after_each_turn() -> None:
    spans = (
        Span(SpanSource.PROMPT, [5, 6]),
        Span(SpanSource.POLICY, [7, 12], [-1.0] * 2, 0),
        Span(SpanSource.ENVIRONMENT, [8]),
        Span(SpanSource.POLICY, [11], [-1.0], 0),
    )
    talk = Rollout("r", "g", spans, FinishReason.STOP)
    failing = Rollout("f", "g", (*spans[:2], Span(SpanSource.ENVIRONMENT, [13]), *spans[3:]), FinishReason.STOP)
    scorer = Scripted()
    [empty] = rollouts([])
    verdicts = run(ModelReward([scorer], by_turn=True).score(PROMPT, [talk, failing, empty]))
    assert (
        sorted(scorer.batches[0], key=len)[:2] == [[5, 6], [5, 6, 7, 12]] and [5, 6, 7, 12, 8, 11] in scorer.batches[0]
    )
    # 12 and 11, minus 10; the score is the last one.
    assert (verdicts[0].kind, verdicts[0].reward, verdicts[0].score) == (VerdictKind.OK, 3.0, 1.0)
    assert verdicts[0].token_rewards == ((3, 2.0), (5, 1.0))
    assert (verdicts[1].kind, verdicts[1].reward) == (VerdictKind.CRASH, None)
    assert (verdicts[2].reward, verdicts[2].token_rewards) == (-4.0, ())
    [whole] = run(ModelReward([Scripted()]).score(PROMPT, [talk]))
    assert (whole.reward, whole.token_rewards) == (1.0, ())


class Judge:
    """Judges a step at every token of the policy, good with a tenth of the token's id; 13 is a crash, 14 gives NaN."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    async def score(self, samples: list[tuple[np.ndarray, np.ndarray]]) -> list[list[tuple[int, float]]]:
        self.batches.append([(ids.tolist(), mask.tolist()) for ids, mask in samples])
        if any(13 in ids for ids, _ in samples):
            raise RuntimeError("unlucky")
        return [
            [(at, float("nan") if ids[at] == 14 else ids[at] / 10) for at in np.flatnonzero(mask)]
            for ids, mask in samples
        ]


def test_process_reward_puts_each_steps_probability_at_its_end_and_scores_by_the_worst() -> None:
    judge = Judge()
    reward = ProcessReward([judge], CallOptions(success_threshold=0.5))
    verdicts = run(reward.score(PROMPT, rollouts([8, 6], [9, 2], [], [13], [14])))
    assert judge.batches[0][0] == ([5, 6, 8, 6], [False, False, True, True])
    good, bad, empty, crashed, broken = verdicts
    assert (good.kind, good.score, good.token_rewards) == (VerdictKind.OK, 0.6, ((2, 0.8), (3, 0.6)))
    assert good.reward == pytest.approx(1.4, abs=1e-12) and dict(good.extra) == {"steps": 2.0}
    assert (bad.kind, bad.score) == (VerdictKind.WRONG, 0.2)
    assert (empty.kind, empty.reward, empty.score, empty.token_rewards) == (VerdictKind.WRONG, 0.0, 0.0, ())
    assert (crashed.kind, crashed.detail) == (VerdictKind.CRASH, "RuntimeError: unlucky")
    assert (broken.kind, broken.detail) == (VerdictKind.CRASH, "the reward is nan")


def test_local_scorer_with_a_step_separator_judges_steps(tmp_path: Path) -> None:
    from rlhf_models.checkpoint.files import write_fields
    from rlhf_models.process_reward import StepFormat, StepJudge

    folder = tiny_model_dir(tmp_path)
    write_fields(folder, StepFormat(5, 10, 12).fields)
    options = {"dtype": "float32", "attn_implementation": "auto", "device": "cpu", "batch_size": 4}
    scorer = LocalScorer(str(folder), step_separator="", **options)
    [rollout] = rollouts([40, 41])
    [verdict] = run(ProcessReward([scorer]).score(PROMPT, [rollout]))
    scorer.close()
    [expected] = StepJudge(str(folder), "", **options)([(rollout.token_ids, rollout.loss_mask)])
    assert verdict.token_rewards == tuple(expected) and len(expected) == 1 and not scorer.has_moments


def test_model_reward_batches_across_calls_up_to_the_batch_size(monkeypatch) -> None:
    monkeypatch.setattr("rlhf_rollout.http.batcher.MAX_WAIT_S", 0.05)
    scorer = Scripted()
    reward = ModelReward([scorer], CallOptions(batch_size=4))

    async def groups() -> Any:
        return await asyncio.gather(*(reward.score(PROMPT, rollouts([20 + index], [30 + index])) for index in range(3)))

    verdicts = run(groups())
    assert [[verdict.reward for verdict in group] for group in verdicts] == [[10.0, 20.0], [11.0, 21.0], [12.0, 22.0]]
    assert [len(batch) for batch in scorer.batches] == [4, 2]


def test_model_reward_prefers_the_replica_with_the_fewest_under_way() -> None:
    async def scenario() -> list[list[int]]:
        hold = asyncio.Event()
        scorers = [Scripted(hold), Scripted(hold)]
        reward = ModelReward(scorers, CallOptions(batch_size=3))
        tasks = []
        for count in (3, 1, 1, 1):
            tasks.append(asyncio.create_task(reward.score(PROMPT, rollouts(*[[20]] * count))))
            await asyncio.sleep(0.02)
        hold.set()
        await asyncio.gather(*tasks)
        return [[len(batch) for batch in scorer.batches] for scorer in scorers]

    # 3 go to the first and 1 to the second; the others come while both are busy.
    assert run(scenario()) == [[3, 2], [1]]


def test_model_reward_failed_batch_charges_the_culprit_only() -> None:
    scorer = Scripted()
    verdicts = run(ModelReward([scorer]).score(PROMPT, rollouts([20], [13], [14], [21])))
    assert [verdict.kind for verdict in verdicts] == [
        VerdictKind.OK,
        VerdictKind.CRASH,
        VerdictKind.CRASH,
        VerdictKind.OK,
    ]
    assert verdicts[1].detail == "RuntimeError: unlucky"
    assert verdicts[2].detail == "the reward is nan"
    assert verdicts[1].reward is None and verdicts[3].reward == 11.0


def test_model_reward_dead_replica_charges_nobody_and_is_asked_last() -> None:
    alive = Scripted()
    reward = ModelReward([Scripted(error=RuntimeError("gone")), alive], CallOptions(batch_size=2))

    async def rounds() -> list[Any]:
        return [await reward.score(PROMPT, rollouts([11], [12], [11])) for _ in range(4)]

    verdicts = [verdict for part in run(rounds()) for verdict in part]
    assert {verdict.kind for verdict in verdicts} == {VerdictKind.OK}
    assert reward._num_failures[0] < 3  # not once a batch


@pytest.mark.parametrize("error", [RuntimeError("gone"), TimeoutError("of a socket")])
def test_model_reward_of_dead_replicas_says_why(error: Exception) -> None:
    [verdict] = run(ModelReward([Scripted(error=error)] * 2).score(PROMPT, rollouts([11])))
    assert (verdict.kind, verdict.detail) == (VerdictKind.CRASH, f"{type(error).__name__}: {error}")


class Hung:
    """A replica that never answers."""

    def __init__(self) -> None:
        self.num_cancelled = 0

    async def score(self, token_ids: list[np.ndarray]) -> list[float]:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return []


def test_model_reward_hung_replica_is_a_timeout_of_the_whole_batch_with_a_hint() -> None:
    hung = Hung()
    verdicts = run(ModelReward([hung], timeout_s=0.05).score(PROMPT, rollouts([11], [12], [14])))
    assert [verdict.kind for verdict in verdicts] == [VerdictKind.TIMEOUT] * 3
    assert hung.num_cancelled == 1  # one call: its sequences are not asked for one by one
    detail = verdicts[0].detail
    assert detail.startswith("the reward model gave no scores for 3 sequences within 0.05 s")
    assert "lower ``CallOptions.batch_size``" in detail


def test_model_reward_another_replica_answers_for_a_hung_one() -> None:
    hung, alive = Hung(), Scripted()
    verdicts = run(ModelReward([hung, alive], timeout_s=0.05).score(PROMPT, rollouts([11], [12])))
    assert [verdict.reward for verdict in verdicts] == [1.0, 2.0]
    assert (hung.num_cancelled, len(alive.batches)) == (1, 1)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_model_reward_deadline_that_is_not_positive_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        ModelReward([Scripted()], timeout_s=timeout_s)


def test_model_reward_another_number_of_scores_is_a_crash() -> None:
    (verdict,) = run(ModelReward([Scripted(excess=1)]).score(PROMPT, rollouts([20])))
    assert verdict.kind is VerdictKind.CRASH
    assert verdict.detail == "RewardError: the reward model gave 2 scores for 1 sequences"


def test_model_reward_without_rollouts_asks_nobody_and_without_scorers_is_refused() -> None:
    scorer = Scripted()
    assert run(ModelReward([scorer]).score(PROMPT, [])) == []
    assert scorer.batches == []
    with pytest.raises(ConfigError, match="at least one scorer"):
        ModelReward([])


@pytest.fixture(scope="module")
def reward_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_reward_model_dir(tmp_path_factory.mktemp("reward"), mean=2.0, std=0.5, max_position_embeddings=48)


@pytest.mark.parametrize("packs", [False, True])
def test_local_scorer_gives_the_models_scores_in_order(reward_dir: Path, monkeypatch: Any, packs: bool) -> None:
    from rlhf_models import reward
    from rlhf_models.batch import TokenBatch
    from rlhf_models.loading import load_reward_model

    asked: list[Any] = []
    passes: list[Any] = []
    compiled: list[Any] = []
    reasons = ["no layers", None]

    def watched(model: Any, samples: Any, **options: Any) -> Any:
        passes.append(([len(sample) for sample in samples], options["packing"]))
        return score(model, samples, **options)

    score = reward.score_sequences
    monkeypatch.setattr(reward, "score_sequences", watched)
    monkeypatch.setattr(reward, "has_packed_kernel", lambda *model: asked.append(model[1:]) or packs)
    monkeypatch.setattr("rlhf_models.fast.compiled.compile_layers", compiled.append)
    monkeypatch.setattr("rlhf_models.fast.compiled.compile_unavailable_reason", lambda *_: reasons.pop())
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 512, length).astype(np.int32) for length in (5, 1, 40, 12)]
    expected = load_reward_model(reward_dir, dtype="float32")(TokenBatch.padded(sequences, 0)).numpy()
    raw = LocalScorer(str(reward_dir), max_length=40, compiles=True)
    # Packs are tried before anybody waits for scores, on as many tokens as the run and the model allow.
    assert passes == ([([40] * 4, True), ([39, 1, 1], True)] if packs else [])
    normalized = LocalScorer(str(reward_dir), normalize=True, compiles=True)
    assert passes[2:] == ([([48] * 4, True), ([47, 1, 1], True)] if packs else [])
    np.testing.assert_allclose(run(raw.score(sequences)), expected, atol=1e-5)
    np.testing.assert_allclose(run(normalized.score(sequences)), (expected - 2.0) / 0.5, atol=1e-5)
    assert normalized.has_moments and not raw.has_moments
    assert (passes[-1], asked) == (([5, 1, 40, 12], packs), [("float32", "cpu")] * 2)
    assert compiled == ([raw._run.args[0].model] if packs else [])
    raw.close()


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, "attention_factor": 1.0}
LONG_ROPE |= {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}


@pytest.mark.parametrize("judges_steps", [False, True])
@pytest.mark.parametrize(("max_length", "factor"), [(8, 1.0), (9, 4.0), (None, 4.0)])  # None: the model's context, 64
def test_local_scorer_has_the_frequencies_of_the_longest_sequence_of_the_run(
    tmp_path: Path, judges_steps: bool, max_length: int | None, factor: float
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from rlhf_models.checkpoint.files import write_fields
    from rlhf_models.process_reward import StepFormat

    make = tiny_model_dir if judges_steps else tiny_reward_model_dir
    sizes = {"max_position_embeddings": 64, "initializer_range": 0.5}
    folder = make(tmp_path, architecture="llama", rope_parameters=LONG_ROPE, **sizes)
    write_fields(folder, StepFormat(5, 10, 12).fields)
    options: dict[str, Any] = {"step_separator": ""} if judges_steps else {}
    scorer = LocalScorer(str(folder), max_length=max_length, **options)
    short = np.array([40, 41, 42], np.int32)
    long = np.arange(20, 40, dtype=np.int32)
    found = [run(scorer.score([(ids, ids > 20) if judges_steps else ids]))[0] for ids in (long, short)]
    # LongRoPE with one factor for all frequencies is linear scaling by it.
    write_fields(folder, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": factor}})
    for ids, answer in zip((long, short), found, strict=True):
        asked = torch.tensor([[*ids, 5] if judges_steps else ids.tolist()])
        plain: Any = AutoModelForCausalLM if judges_steps else AutoModelForSequenceClassification
        with torch.no_grad():
            expected = plain.from_pretrained(folder)(asked).logits[0]
        expected = expected[-1, [10, 12]].softmax(-1)[0] if judges_steps else expected[0]
        assert (answer[0][1] if judges_steps else answer) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("judges_steps", [False, True])
def test_local_scorer_whose_weights_rest_between_calls_gives_the_same_answers(
    tmp_path: Path, judges_steps: bool
) -> None:
    from rlhf_models.checkpoint.files import write_fields
    from rlhf_models.process_reward import StepFormat

    folder = (tiny_model_dir if judges_steps else tiny_reward_model_dir)(tmp_path)
    options: dict[str, Any] = {}
    sample: Any = np.arange(3, 9, dtype=np.int32)
    if judges_steps:
        write_fields(folder, StepFormat(5, 10, 12).fields)
        options = {"step_separator": ""}
        sample = (sample, sample > 4)
    plain = LocalScorer(str(folder), **options)
    # A CPU by a name that does not keep weights in their files.
    resting = LocalScorer(str(folder), device="cpu:0", offload=True, **options)
    for _ in range(2):
        assert run(resting.score([sample])) == run(plain.score([sample]))
    model = resting._awake.args[0]
    assert isinstance(model, RestingModel) and not model._is_awake


def test_local_scorer_whose_weights_rest_between_calls_has_compiled_layers(reward_dir: Path, monkeypatch: Any) -> None:
    from rlhf_models import host_states, reward
    from rlhf_models.fast import compiled

    events: list[str] = []

    class Resting(RestingModel):
        def __init__(self, *args: Any) -> None:
            events.append("weights are on the CPU")
            super().__init__(*args)

    monkeypatch.setattr(host_states, "RestingModel", Resting)
    monkeypatch.setattr(reward, "has_packed_kernel", lambda *_: True)
    monkeypatch.setattr(compiled, "compile_unavailable_reason", lambda *_: events[-1] if events else None)
    monkeypatch.setattr(compiled, "compile_layers", lambda _: events.append("compiled"))
    LocalScorer(str(reward_dir), device="cpu:0", offload=True, compiles=True).close()
    assert events == ["compiled", "weights are on the CPU"]


def test_local_scorer_does_not_depend_on_who_is_scored_beside(reward_dir: Path) -> None:
    sequences = [np.arange(3, 3 + length, dtype=np.int32) for length in range(1, 30)]
    scorer = LocalScorer(str(reward_dir))
    together = run(scorer.score(sequences))
    assert together == [run(scorer.score([ids]))[0] for ids in sequences]


def test_local_scorer_unknown_token_is_an_error_and_a_crash_of_its_rollout_alone(reward_dir: Path) -> None:
    scorer = LocalScorer(str(reward_dir))
    with pytest.raises(DataError, match="got the token id 512"):
        run(scorer.score([np.array([3, 512], np.int32)]))
    verdicts = run(ModelReward([scorer]).score(PROMPT, rollouts([512], [20])))
    assert [verdict.kind.failed for verdict in verdicts] == [True, False]


def test_local_scorer_of_a_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no scalar head"):
        LocalScorer(str(tiny_model_dir(tmp_path)))
