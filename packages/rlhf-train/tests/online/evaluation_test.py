"""What an evaluation says: pass@k, data sources, failures, and which weights were the best."""

import itertools
import json

import pytest

from record_testing import make_group, short_rollout
from rlhf_data.records import FinishReason, Prompt, RolloutGroup, Verdict, VerdictKind
from rlhf_train.evaluation import pass_at_k, summarize_evaluation
from rlhf_train.run.best_model import STATE_FILE, BestModel

OK, WRONG, CRASH = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.CRASH


@pytest.mark.parametrize("num_samples", range(1, 7))
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_right_sample(num_samples):
    for num_right, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        right = [index < num_right for index in range(num_samples)]
        choices = list(itertools.combinations(right, k))
        assert pass_at_k(num_samples, num_right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_of_too_few_samples_is_refused(k):
    with pytest.raises(ValueError, match=f"pass@{k} of 3 samples"):
        pass_at_k(3, 1, k)


def group(name: str, source: str, kinds: list[VerdictKind], length: int = 2) -> RolloutGroup:
    """A group of rollouts of `length` tokens; those that crash have no verdict's number, the last one is truncated."""
    rollouts = []
    for index, kind in enumerate(kinds):
        reason = FinishReason.LENGTH if index == len(kinds) - 1 else FinishReason.STOP
        verdict = Verdict(kind, None if kind.failed else float(kind is OK))
        rollouts.append(short_rollout(f"{name}{index}", name, tokens=length, reason=reason, verdict=verdict))
    return make_group(name, Prompt(name, [1], "1", source=source), tuple(rollouts))


def test_summarize_evaluation_of_one_source_matches_hand_values():
    # 1 of 3 right: pass@1 = 1/3, pass@2 = 1 - C(2,2)/C(3,2) = 2/3, pass@3 = 1. 0 of 3: 0. Means of the two.
    metrics = summarize_evaluation([group("a", "math", [OK, WRONG, WRONG]), group("b", "math", [WRONG] * 3)])
    assert {name: value for name, value in metrics.items() if "pass@" in name} == pytest.approx(
        {"eval/pass@1": 1 / 6, "eval/pass@2": 1 / 3, "eval/pass@3": 1 / 2}
    )
    assert metrics["eval/accuracy"] == metrics["eval/reward"] == pytest.approx(1 / 6)
    assert not any(name.startswith("eval/math/") for name in metrics)


def test_summarize_evaluation_without_a_scorer_has_lengths_only():
    unscored = [VerdictKind.UNSCORED] * 2
    metrics = summarize_evaluation([group("a", "math", unscored, 3), group("b", "code", unscored, 1)])
    names = ("response_tokens", "truncated")
    assert set(metrics) == {"eval/failed"} | {f"eval/{part}{name}" for part in ("", "math/", "code/") for name in names}
    assert (metrics["eval/response_tokens"], metrics["eval/code/truncated"], metrics["eval/failed"]) == (2.0, 0.5, 0.0)


def test_summarize_evaluation_of_several_sources_tells_them_apart():
    groups = [group("a", "math", [OK, OK], 3), group("b", "code", [WRONG, OK], 5), group("c", "code", [WRONG] * 2, 1)]
    metrics = summarize_evaluation(groups)
    assert metrics["eval/pass@1"] == pytest.approx(1 / 2)
    assert metrics["eval/math/pass@1"] == 1.0
    assert metrics["eval/code/pass@1"] == pytest.approx(1 / 4)
    assert metrics["eval/code/pass@2"] == pytest.approx(1 / 2)
    assert (metrics["eval/math/response_tokens"], metrics["eval/code/response_tokens"]) == (3.0, 3.0)
    assert metrics["eval/code/truncated"] == 0.5


def test_summarize_evaluation_counts_a_failed_reward_as_not_passed():
    metrics = summarize_evaluation([group("a", "math", [OK, CRASH]), group("b", "math", [CRASH, CRASH])])
    assert metrics["eval/pass@1"] == pytest.approx(1 / 4)
    assert metrics["eval/pass@2"] == pytest.approx(1 / 2)
    assert metrics["eval/reward"] == 1.0  # of the one that has a reward
    assert metrics["eval/verdict_crash"] == 3.0


def test_summarize_evaluation_of_single_samples_has_pass_at_1_only():
    metrics = summarize_evaluation([group("a", "math", [OK])])
    assert [name for name in metrics if "pass@" in name] == ["eval/pass@1"]


def keep(best: BestModel, step: int, value: float) -> None:
    best.staging.mkdir()
    (best.staging / "weights").write_text(f"of step {step}")
    best.keep(step, {"eval/pass@1": value}, {"kl_coef": 0.5})


@pytest.mark.parametrize(
    ("lowest", "values", "expected", "step", "best_value"),
    [
        (False, [0.2, 0.2, 0.1, 0.3, float("nan"), 0.3], [True, False, False, True, False, False], 3, 0.3),
        (True, [float("nan"), 0.2, 0.2, 0.3, 0.1, float("nan")], [False, True, False, False, True, False], 4, 0.1),
    ],
    ids=["highest", "lowest"],
)
def test_best_model_is_the_first_until_one_is_better(tmp_path, lowest, values, expected, step, best_value):
    best = BestModel("eval/pass@1", tmp_path / "best", lowest=lowest)
    verdicts = []
    for number, value in enumerate(values):
        verdicts.append(best.beaten_by({"eval/pass@1": value, "eval/reward": 9.0}))
        if verdicts[-1]:
            keep(best, number, value)
    assert verdicts == expected
    assert best.state() == {"eval/pass@1": best_value}
    assert (tmp_path / "best/weights").read_text() == f"of step {step}"
    state = json.loads((tmp_path / "best" / STATE_FILE).read_text())
    assert state == {"step": step, "metric": "eval/pass@1", "value": best_value, "kl_coef": 0.5}
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_best_model_stays_while_the_next_is_written(tmp_path):
    best = BestModel("eval/pass@1", tmp_path / "best")
    keep(best, 1, 0.5)
    best.staging.mkdir()
    assert (tmp_path / "best/weights").read_text() == "of step 1"


def test_best_model_takes_the_place_of_what_a_killed_process_left(tmp_path):
    """It was killed while it removed the weights before."""
    best = BestModel("eval/pass@1", tmp_path / "best")
    keep(best, 1, 0.5)
    old = tmp_path / ".best.old"
    old.mkdir()
    (old / "weights").write_text("of step 0")
    keep(best, 2, 0.6)
    assert (tmp_path / "best/weights").read_text() == "of step 2"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize(("metric", "beaten"), [("eval/pass@1", [False, True]), ("eval/reward", [True, True])])
def test_best_model_goes_on_with_the_best_value_of_the_same_metric(tmp_path, metric, beaten):
    first = BestModel("eval/pass@1", tmp_path / "best")
    assert first.state() is None
    keep(first, 1, 0.5)
    second = BestModel(metric, tmp_path / "best")
    second.restore(json.loads(json.dumps(first.state())))
    assert [second.beaten_by({metric: value}) for value in (0.4, 0.6)] == beaten
    second.restore(None)
    assert [second.beaten_by({metric: value}) for value in (0.4, 0.6)] == beaten
