"""The loss, gradient and metrics of every offline objective, against plain float64 arithmetic over a bigram model."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.preference import PreferenceExample, ProcessExample, UnpairedExample
from rlhf_data.examples.sft import SftExample
from rlhf_models.batch import TokenBatch
from rlhf_train.batching import Denominators
from rlhf_train.offline.epochs import MicroBatch, score_moments
from rlhf_train.offline.objectives.distillation import DistillationObjective
from rlhf_train.offline.objectives.dpo import PreferenceObjective
from rlhf_train.offline.objectives.kto import KtoObjective
from rlhf_train.offline.objectives.process_reward import ProcessRewardObjective
from rlhf_train.offline.objectives.reward_model import RewardModelObjective
from rlhf_train.offline.objectives.supervised import SupervisedObjective

VOCAB_SIZE = 6
# What the whole batch is divided by; larger than a micro-batch's own counts, as in a run with several.
DENOMINATORS = Denominators(num_tokens=50, num_sequences=8, max_tokens=9)
LAYOUTS = pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])


class Bigram:
    """A model that draws the next token by the last one, from a table of logits [V, W]. A score is table[last, 0]."""

    def __init__(self, seed: int, width: int = VOCAB_SIZE, *, scores: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCAB_SIZE, width, generator=generator, dtype=torch.float64).requires_grad_()
        self.scores = scores

    def __call__(self, batch: TokenBatch, *, logits_mask: Tensor | None = None, logits_after: Tensor | None = None):
        ids = batch.input_ids.flatten()
        if self.scores:
            return self.table[ids[batch.last_index], 0]
        if logits_after is not None:
            return self.table[ids[logits_after]].float()
        wanted = logits_mask.flatten().nonzero()[:, 0]
        rows = self.table[ids[wanted - 1]].log_softmax(-1)
        flat = torch.zeros(ids.numel(), dtype=torch.float64)
        logprobs = flat.index_copy(0, wanted, rows[torch.arange(len(wanted)), ids[wanted]])
        entropy = flat.index_copy(0, wanted, -(rows.exp() * rows).sum(-1))
        return SimpleNamespace(logprobs=logprobs.view(logits_mask.shape), entropy=entropy.view(logits_mask.shape))

    @property
    def engine(self) -> Any:
        return SimpleNamespace(forward=self, device=torch.device("cpu"), module=torch.nn.Module())

    def rows(self, sequence: SftExample) -> list[Tensor]:
        """Return the log-probs [V] of what each trained token of a sequence was drawn from."""
        places = [t for t in range(1, len(sequence.token_ids)) if sequence.loss_mask[t]]
        return [self.table[int(sequence.token_ids[t - 1])].log_softmax(-1) for t in places]

    def answer(self, sequence: SftExample) -> tuple[Tensor, int]:
        """Return the log-prob of a sequence's answer and its number of tokens."""
        drawn = self.drawn(sequence)
        return sum(drawn), len(drawn)

    def drawn(self, sequence: SftExample) -> list[Tensor]:
        """Return the log-prob of each trained token."""
        tokens = [int(t) for t, mask in zip(sequence.token_ids[1:], sequence.loss_mask[1:], strict=True) if mask]
        return [row[token] for row, token in zip(self.rows(sequence), tokens, strict=True)]


def sequence(tokens: list[int], num_prompt: int, **fields: Any) -> SftExample:
    kind = UnpairedExample if fields else SftExample
    return kind(f"e{tokens}", np.array(tokens), np.arange(len(tokens)) >= num_prompt, **fields)


PAIRS = [
    PreferenceExample("a", sequence([1, 2, 3, 4], 2), sequence([1, 2, 5], 2), 0.5),
    PreferenceExample("b", sequence([3, 0, 2, 2, 5, 1], 1), sequence([3, 4], 1), -0.25),
    PreferenceExample("c", sequence([2, 5, 4], 2), sequence([2, 5, 4], 2), 1.0),  # a tie
]
UNPAIRED = [
    sequence([1, 2, 3, 4], 2, is_desirable=True),
    sequence([5, 4, 4], 1, is_desirable=False),
    sequence([0, 3, 1, 2, 2, 1], 3, is_desirable=False),
    sequence([2, 2, 0, 5], 2, is_desirable=True),
]


def check(loss: Tensor, expected: Tensor, model: Bigram) -> None:
    """Compare a loss and its gradient, and check that the loss is one that a step could lower."""
    assert loss.item() == pytest.approx(float(expected.detach()), rel=1e-5)
    found, wanted = (torch.autograd.grad(value, model.table)[0] for value in (loss, expected))
    assert found.abs().max() > 1e-4
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)


def values(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: metric.result() for name, metric in metrics.items()}


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


# Each pair's loss from what it compares: log-ratios to the reference, or log-probs (simpo, orpo, cpo) of its answers.
PAIR_LOSSES = {
    "dpo": lambda c, r: -0.9 * torch.sigmoid(0.3 * (c - r)).log() - 0.1 * torch.sigmoid(0.3 * (r - c)).log(),
    "ipo": lambda c, r: (c - r - 1 / 0.6) ** 2,
    "simpo": lambda c, r: -torch.sigmoid(0.3 * (c - r) - 0.2).log(),
    "orpo": lambda c, r: -0.3 * torch.sigmoid(c - (1 - c.exp()).log() - r + (1 - r.exp()).log()).log(),
    "cpo": lambda c, r: (1 + (0.3 * (r - c)).exp()).log(),
    "hinge": lambda c, r: (1 - 0.3 * (c - r)).clamp(min=0),
    "robust": lambda c, r: (0.9 * (1 + (0.3 * (r - c)).exp()).log() - 0.1 * (1 + (0.3 * (c - r)).exp()).log()) / 0.8,
    "exo_pair": lambda c, r: sum(
        p * (p / q).log() for p, q in ((sigmoid(0.3 * (c - r)), 0.9), (sigmoid(0.3 * (r - c)), 0.1))
    ),
    "nca_pair": lambda c, r: -(sigmoid(0.3 * c) * (sigmoid(-0.3 * c) * sigmoid(-0.3 * r)).sqrt()).log(),
    "bco_pair": lambda c, r: -(sigmoid(0.3 * c) * sigmoid(-0.3 * r)).log(),
    "sppo_hard": lambda c, r: c**2 + r**2 - (c - r) / 0.3 + 2 / 0.36,
    "apo_zero": lambda c, r: 1 - sigmoid(0.3 * c) + sigmoid(0.3 * r),
    "apo_down": lambda c, r: 1 + sigmoid(0.3 * c) - sigmoid(0.3 * (c - r)),
    "discopop": lambda c, r: (
        sigmoid(-0.6 * (c - r)) * (1 + (0.3 * (r - c)).exp()).log() + sigmoid(0.6 * (c - r)) * (0.3 * (r - c)).exp()
    ),
}
PREFERENCES = {
    "dpo": {"label_smoothing": 0.1},
    "dpo of means, with likelihood": {"label_smoothing": 0.1, "length_average": True, "nll_loss_coef": 0.7},
    "ipo": {},
    "ipo of means": {"length_average": True},
    "simpo, with likelihood": {"simpo_gamma": 0.2, "nll_loss_coef": 0.4},
    "orpo": {},
    "cpo": {},
    "hinge": {},
    "robust": {"label_smoothing": 0.1},
    "exo_pair of means": {"label_smoothing": 0.1, "length_average": True},
    "nca_pair": {},
    "bco_pair, with likelihood": {"nll_loss_coef": 0.4},
    "sppo_hard": {},
    "apo_zero": {},
    "apo_down": {},
    "discopop": {"discopop_tau": 0.5},
}


@LAYOUTS
@pytest.mark.parametrize("upfront", [False, True], ids=["reference runs", "reference ran"])
@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_loss_and_metrics_equal_plain_arithmetic(name, upfront, packing):
    options, kind = PREFERENCES[name], name.replace(",", "").split()[0]
    model, reference = Bigram(0), Bigram(1)
    objective = PreferenceObjective(loss_type=kind, beta=0.3, packing=packing, reference=reference, **options)
    items = objective.items(PAIRS)
    if upfront:
        ran = [tuple(float(reference.answer(s)[0].detach()) for s in item.sequences) for item in items]
        items = [dataclasses.replace(item, ref_logprobs=logprobs) for item, logprobs in zip(items, ran, strict=True)]
        objective = dataclasses.replace(objective, reference=None)
    total, sums = 0.0, dict.fromkeys(("loss", "nll", "accuracy", "chosen_reward", "rejected_reward", "margin"), 0.0)
    for pair in PAIRS:
        compared = []
        for answer in (pair.chosen, pair.rejected):
            logprob, count = model.answer(answer)
            if kind not in ("simpo", "orpo", "cpo"):
                ratio = logprob - reference.answer(answer)[0].detach()
                compared.append(ratio / count if options.get("length_average") else ratio)
            else:
                compared.append(logprob if kind == "cpo" else logprob / count)
        chosen, rejected = compared
        logprob, count = model.answer(pair.chosen)
        weight = 1.0 if kind in ("orpo", "cpo") else options.get("nll_loss_coef", 0.0)
        loss = PAIR_LOSSES[kind](chosen, rejected) - weight * logprob / count
        total = total + loss
        order = 0.5 if pair.example_id == "c" else float(chosen > rejected)
        parts = {"loss": loss, "nll": -logprob / count, "accuracy": order, "margin": 0.3 * (chosen - rejected)}
        parts |= {"chosen_reward": 0.3 * chosen, "rejected_reward": 0.3 * rejected}
        sums = {key: sums[key] + float(torch.as_tensor(parts[key]).detach()) for key in sums}
    found, metrics = objective.loss(model.engine, items, DENOMINATORS)
    check(found, total / DENOMINATORS.num_sequences, model)
    wanted = {f"preference/{key}": value / len(PAIRS) for key, value in sums.items()}
    assert values(metrics) == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    # 2 and 1, 5 and 1, 1 and 1 answer tokens.
    assert [objective.num_trained_tokens(item) for item in items] == [3, 6, 2]
    assert objective.needs_reference == (kind not in ("simpo", "orpo", "cpo"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "dpoo"}, "dpo"),
        ({"beta": 0.0}, "beta must be above 0"),
        ({"label_smoothing": 0.5}, r"in \[0, 0.5\)"),
        ({"label_smoothing": -0.1}, r"in \[0, 0.5\)"),
        ({"loss_type": "simpo", "simpo_gamma": -1.0}, "simpo_gamma -1.0"),
        ({"nll_loss_coef": -1.0}, "nll_loss_coef -1.0"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing has no effect on the loss ipo"),
        ({"simpo_gamma": 0.1}, "simpo_gamma has no effect on the loss dpo"),
        ({"loss_type": "orpo", "nll_loss_coef": 0.1}, "nll_loss_coef has no effect on the loss orpo"),
        ({"discopop_tau": 0.1}, "discopop_tau has no effect on the loss dpo"),
        ({"loss_type": "discopop", "discopop_tau": 1.0}, r"discopop_tau is 1.0; it must be in \(0, 1\)"),
        ({"loss_type": "robust"}, "needs a probability of swapped labels"),
        ({"loss_type": "exo_pair"}, "needs a probability of swapped labels"),
        ({"loss_type": "simpo", "length_average": True}, "length_average has no effect on the loss simpo"),
    ],
)
def test_preference_option_out_of_bounds_or_without_effect_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PreferenceObjective(**options)


@LAYOUTS
def test_kto_loss_and_metrics_equal_plain_arithmetic(packing):
    model, reference = Bigram(0), Bigram(1)
    weights = {"desirable_loss_weight": 2.0, "undesirable_loss_weight": 0.5}
    objective = KtoObjective(beta=0.4, kl=0.3, packing=packing, reference=reference, **weights)
    items = objective.items(UNPAIRED)
    total, rewards = 0.0, {True: [], False: []}
    for example in UNPAIRED:
        ratio = model.answer(example)[0] - reference.answer(example)[0].detach()
        sign, weight = (1, 2.0) if example.is_desirable else (-1, 0.5)
        total = total + weight * (1 - torch.sigmoid(sign * 0.4 * (ratio - 0.3)))
        rewards[example.is_desirable].append(0.4 * float(ratio))
    found, metrics = objective.loss(model.engine, items, DENOMINATORS)
    check(found, total / DENOMINATORS.num_sequences, model)
    wanted = {"kto/loss": float(total) / 4, "kto/kl": 0.3}
    wanted |= {"kto/desirable_reward": np.mean(rewards[True]), "kto/undesirable_reward": np.mean(rewards[False])}
    assert values(metrics) == pytest.approx(wanted, rel=1e-5)
    assert [objective.num_trained_tokens(item) for item in items] == [2, 2, 3, 2]


def test_kto_sets_each_prompt_before_the_answer_of_another_cut_at_the_longest_example():
    prompts = {tuple(example.token_ids[~example.loss_mask]) for example in UNPAIRED}
    answers = [tuple(example.token_ids[example.loss_mask]) for example in UNPAIRED]
    partners = []
    for item in KtoObjective().items(UNPAIRED):
        own, mixed = item.sequences
        assert own is item.example
        prompt, answer = tuple(mixed.token_ids[~mixed.loss_mask]), tuple(mixed.token_ids[mixed.loss_mask])
        assert prompt == tuple(own.token_ids[~own.loss_mask]) and prompt in prompts
        assert answer != tuple(own.token_ids[own.loss_mask])
        partners.append(answer)
    assert sorted(partners) == sorted(answers)  # each answer once
    long = [sequence([1] * 5 + [2], 5, is_desirable=True), sequence([3] + [4] * 5, 1, is_desirable=True)]
    mixed = [item.sequences[1] for item in KtoObjective().items(long)]
    assert mixed[0].token_ids.tolist() == [1, 1, 1, 1, 1, 4]  # 5 + 5 tokens cut at 6
    assert mixed[1].token_ids.tolist() == [3, 2] and mixed[1].loss_mask.tolist() == [False, True]
    with pytest.raises(DataError, match="two examples"):
        KtoObjective().items(UNPAIRED[:1])


def test_kto_divergence_is_the_mean_log_ratio_of_mismatched_answers_and_never_negative(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    near, far = Bigram(0), Bigram(1)
    items = KtoObjective().items(UNPAIRED)
    mismatched = [item.sequences[1] for item in items]
    mean = float(sum(near.answer(answer)[0] - far.answer(answer)[0] for answer in mismatched).detach()) / 4
    if mean < 0:
        near, far = far, near
    # A batch that is run for nothing, to keep the ranks in step, counts for nothing.
    batches = [MicroBatch(items[:3], [0, 1, 2]), MicroBatch(items[3:], [3]), MicroBatch(items[:1], [])]
    assert KtoObjective(reference=far).for_batch(near.engine, batches).kl == pytest.approx(abs(mean), rel=1e-5)
    assert KtoObjective(reference=near).for_batch(far.engine, batches).kl == 0.0


@pytest.mark.parametrize("training", [True, False])
def test_kto_divergence_is_measured_in_eval_mode_and_the_mode_is_put_back(monkeypatch, training):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    model, engine, modes = Bigram(0), Bigram(0).engine, []

    def forward(*args: Any, **options: Any) -> Any:
        modes.append((engine.module.training, torch.is_grad_enabled()))
        return model(*args, **options)

    engine.forward = forward
    engine.module.train(training)
    items = KtoObjective().items(UNPAIRED)
    KtoObjective(reference=model).for_batch(engine, [MicroBatch(items, range(4))])
    assert modes == [(False, False)]
    assert engine.module.training == training


@pytest.mark.parametrize("name", ["beta", "desirable_loss_weight", "undesirable_loss_weight"])
def test_kto_option_out_of_bounds_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is 0.0"):
        KtoObjective(**{name: 0.0})


# Fewer trained tokens than the vocabulary has, so that the two axes of the logits have different sizes.
DEMONSTRATIONS = [sequence([5, 1, 2, 3, 0], 3), sequence([4, 4, 1], 1), sequence([0, 2], 1)]


@LAYOUTS
@pytest.mark.parametrize("width", [VOCAB_SIZE, VOCAB_SIZE + 3, VOCAB_SIZE - 1])
def test_distillation_loss_and_metrics_equal_plain_arithmetic(width, packing):
    model, teacher = Bigram(0), Bigram(1, width)
    objective = DistillationObjective(kd_coef=0.3, packing=packing, reference=teacher)
    common, total, count = min(width, VOCAB_SIZE), {"nll": 0.0, "distillation": 0.0}, 0
    for example in DEMONSTRATIONS:
        for t in range(1, len(example.token_ids)):
            if example.loss_mask[t]:
                before, token = int(example.token_ids[t - 1]), int(example.token_ids[t])
                target = teacher.table[before, :common].detach().softmax(-1)
                total["nll"] = total["nll"] - model.table[before].log_softmax(-1)[token]
                cross = -(target * model.table[before, :common].log_softmax(-1)).sum()
                total["distillation"] = total["distillation"] + cross
                count += 1
    total["loss"] = 0.7 * total["nll"] + 0.3 * total["distillation"]
    found, metrics = objective.loss(model.engine, DEMONSTRATIONS, DENOMINATORS)
    check(found, total["loss"] / DENOMINATORS.num_tokens, model)
    assert count == 2 + 2 + 1
    assert values(metrics) == pytest.approx({f"kd/{name}": float(t) / count for name, t in total.items()}, rel=1e-5)


@pytest.mark.parametrize("kd_coef", [0.0, 1.1])
def test_distillation_weight_out_of_bounds_is_refused(kd_coef):
    with pytest.raises(ConfigError, match=r"kd_coef is .*; it must lie in \(0, 1\]"):
        DistillationObjective(kd_coef=kd_coef)
    with pytest.raises(ConfigError, match=r"jsd_beta is .*; it must lie in \(0, 1\)"):
        DistillationObjective(jsd_beta=round(kd_coef))
    with pytest.raises(ConfigError, match="did you mean `reverse_kl`"):
        DistillationObjective(kd_divergence="reverse")


@LAYOUTS
@pytest.mark.parametrize("dft", [False, True], ids=["likelihood", "dft"])
def test_supervised_loss_and_metrics_equal_plain_arithmetic(dft, packing):
    model, objective = Bigram(0), SupervisedObjective(packing=packing, dft=dft)
    total = -sum(model.answer(example)[0] for example in DEMONSTRATIONS)
    entropy = -sum(float((row.exp() * row).sum()) for example in DEMONSTRATIONS for row in model.rows(example))
    found, metrics = objective.loss(model.engine, DEMONSTRATIONS, DENOMINATORS)
    trained = total
    if dft:
        logprobs = [logprob for example in DEMONSTRATIONS for logprob in model.drawn(example)]
        trained = -sum(math.exp(logprob.item()) * logprob for logprob in logprobs)
    check(found, trained / DENOMINATORS.num_tokens, model)
    assert values(metrics) == pytest.approx({"sft/loss": float(total) / 5, "sft/entropy": entropy / 5}, rel=1e-5)
    # Where all tokens are trained, nothing stands before the first of a sequence, which is never counted.
    whole = [sequence([5, 1, 2], 0), sequence([4, 4], 0)]
    assert [objective.num_trained_tokens(each) for each in whole] == [2, 1]
    assert objective.loss(model.engine, whole, DENOMINATORS)[1]["sft/loss"].count == 3


SOLUTIONS = [
    ProcessExample("a", np.array([1, 2, 3, 2, 4]), np.array([1, 3]), np.array([1.0, 0.0])),
    ProcessExample("b", np.array([5, 4, 0]), np.array([2]), np.array([0.75])),
]


@LAYOUTS
def test_process_reward_loss_and_metrics_equal_plain_arithmetic(packing):
    model, objective = Bigram(0), ProcessRewardObjective(reward_tokens=(4, 1), packing=packing)
    total, right = 0.0, 0
    for example in SOLUTIONS:
        for place, label in zip(example.positions, example.labels, strict=True):
            good, bad = (model.table[int(example.token_ids[place]), token] for token in (4, 1))
            total = total - float(label) * torch.sigmoid(good - bad).log()
            total = total - (1 - float(label)) * torch.sigmoid(bad - good).log()
            right += int((good > bad) == (label > 0.5))
    found, metrics = objective.loss(model.engine, SOLUTIONS, DENOMINATORS)
    check(found, total / DENOMINATORS.num_tokens, model)
    assert 0 < right < 3
    assert values(metrics) == pytest.approx({"prm/loss": float(total) / 3, "prm/accuracy": right / 3}, rel=1e-5)
    assert [objective.num_trained_tokens(example) for example in SOLUTIONS] == [2, 1]


def test_process_reward_tie_between_the_tokens_is_a_verdict_of_bad():
    model, labels = Bigram(0), [0.0, 1.0, 0.5]
    with torch.no_grad():
        model.table[2, 1] = model.table[2, 4]
    example = ProcessExample("a", np.array([2, 2, 2]), np.array([0, 1, 2]), np.array(labels))
    _, metrics = ProcessRewardObjective(reward_tokens=(4, 1)).loss(model.engine, [example], DENOMINATORS)
    assert metrics["prm/accuracy"].result() == pytest.approx(2 / 3)  # a label of one half is no good step either


def test_process_reward_of_a_single_token_is_refused():
    with pytest.raises(ConfigError, match="must be two"):
        ProcessRewardObjective(reward_tokens=(3, 3))


@LAYOUTS
@pytest.mark.parametrize("margin_loss", [False, True])
def test_reward_model_loss_and_metrics_equal_plain_arithmetic(margin_loss, packing):
    model, objective = Bigram(0, scores=True), RewardModelObjective(margin_loss=margin_loss, packing=packing)
    total, scores, margins, order = 0.0, [], [], []
    for pair in PAIRS:
        chosen, rejected = (model.table[int(s.token_ids[-1]), 0] for s in (pair.chosen, pair.rejected))
        total = total - torch.sigmoid(chosen - rejected - (pair.margin if margin_loss else 0.0)).log()
        scores += [float(chosen), float(rejected)]
        margins.append(scores[-2] - scores[-1])
        order.append(0.5 if pair.example_id == "c" else float(margins[-1] > 0))
    items = objective.items(PAIRS)
    found, metrics = objective.loss(model.engine, items, DENOMINATORS)
    check(found, total / DENOMINATORS.num_sequences, model)
    wanted = {"loss": float(total) / 3, "accuracy": np.mean(order), "margin": np.mean(margins)}
    wanted |= {"score": np.mean(scores), "squared_score": np.mean(np.square(scores))}
    assert values(metrics) == pytest.approx({f"rm/{name}": value for name, value in wanted.items()}, rel=1e-5)
    assert [objective.num_trained_tokens(item) for item in items] == [2, 2, 2]
    mean, deviation = score_moments({"eval/score": wanted["score"], "eval/squared_score": wanted["squared_score"]})
    assert (mean, deviation) == pytest.approx((np.mean(scores), np.std(scores)))


def test_reward_model_margins_that_are_missing_are_refused_only_when_wanted():
    pairs = [*PAIRS, PreferenceExample("d", PAIRS[0].chosen, PAIRS[0].rejected)]
    with pytest.raises(DataError, match="1 of 4 pairs have no margin, d among them"):
        RewardModelObjective(margin_loss=True).items(pairs)
    assert RewardModelObjective().items(pairs) == pairs


def test_score_moments_of_equal_scores_have_no_deviation():
    # Rounding can leave a variance a little below 0.
    assert score_moments({"eval/score": 0.1, "eval/squared_score": 0.1**2 - 1e-18}) == (0.1, 0.0)
    assert math.isclose(score_moments({"eval/score": 3.0, "eval/squared_score": 13.0})[1], 2.0)


@pytest.mark.parametrize(
    ("objective", "lower"),
    [
        (SupervisedObjective, {"loss"}),
        (RewardModelObjective, {"loss"}),
        (ProcessRewardObjective, {"loss"}),
        (PreferenceObjective, {"loss", "nll", "rejected_reward"}),
        (KtoObjective, {"loss", "kl", "undesirable_reward"}),
        (DistillationObjective, {"loss", "nll", "distillation"}),
    ],
)
def test_every_objective_says_which_of_its_metrics_are_better_when_they_are_lower(objective, lower):
    assert set(objective.lower_is_better) == lower
