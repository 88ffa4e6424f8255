"""What in a run needs a look. Each finding is a pure function of curves, or of counts over rollouts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhf_cli.report.runs import Curve
from rlhf_data.records import VerdictKind

# Texts of chat templates. An answer that holds one has gone on with a turn that is not its own, or imitates a template.
MARKERS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "[INST]", "[/INST]"),
    *("<<SYS>>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "### Instruction:"),
)

LEAST_POINTS = 4  # of a curve whose beginning is compared with its end
DROP = 0.02  # of held-out accuracy or reward below its best, or
DROP_SHARE = 0.05  # this share of it if that is more
LENGTH_GROWTH = 2.0
ENTROPY_LEFT = 0.1  # of the entropy at the beginning
EQUAL_SHARE = 0.5  # of groups whose rewards are all the same
TRUNCATED_SHARE = 0.2
GAP_GROWTH = 2.0
LEAST_GAP = 0.02  # nats per token; below, growth is of rounding
CLIP_SHARE = 0.3
KL_TO_REFERENCE = 1.0  # nats per token
KL_TO_OLD = 0.1  # nats per token
FAILED_SHARE = 0.05
DUPLICATE_SHARE = 0.5
MARKER_SHARE = 0.01
LOSS_GROWTH = 0.05

Curves = Mapping[str, Curve]


class Finding(NamedTuple):
    """Something in a run that needs a look.

    Attributes:
        name: short and unique, such as `truncated`.
        title: a few words.
        text: what was seen, with numbers, and what it may mean.
        metrics: names of curves that show it.
        steps: the first and the last step that show it.
        rollouts: ids of rollouts that show it.
    """

    name: str
    title: str
    text: str
    metrics: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None
    rollouts: tuple[str, ...] = ()


class Ends(NamedTuple):
    """Means of the first and of the last quarter of a curve, and the steps of the last one."""

    first: float
    last: float
    steps: tuple[int, int]


def ends(curve: Curve | None, least_points: int = LEAST_POINTS) -> Ends | None:
    """Return the ends of a curve; None if it has fewer than `least_points` values, of which it needs one at least."""
    known = [(step, value) for step, value in curve or () if value is not None]
    if len(known) < least_points:
        return None
    size = max(len(known) // 4, 1)
    last = known[-size:]
    return Ends(_mean(known[:size]), _mean(last), (last[0][0], last[-1][0]))


def _mean(points: Sequence[tuple[int, float]]) -> float:
    return math.fsum(value for _, value in points) / len(points)


def held_out_falls(curves: Curves) -> Finding | None:
    """The reward in training rises while the held-out result falls from its best."""
    name = next((name for name in ("eval/accuracy", "eval/reward") if name in curves), "")
    held_out = [(step, value) for step, value in curves.get(name, ()) if value is not None]
    reward = [(step, value) for step, value in curves.get("rollout/reward", ()) if value is not None]
    if len(held_out) < 2 or not reward:
        return None
    best_step, best = max(held_out, key=lambda point: point[1])
    last_step, last = held_out[-1]
    before = [point for point in reward if point[0] <= max(best_step, reward[0][0])]
    after = [point for point in reward if point[0] > best_step]
    if last >= best - max(DROP, DROP_SHARE * abs(best)) or not after or _mean(after) <= _mean(before):
        return None
    text = (
        f"{name} fell from {best:.4g} at step {best_step} to {last:.4g} at step {last_step}, and the mean reward in "
        f"training rose from {_mean(before):.4g} to {_mean(after):.4g}. The policy may exploit the reward, or fit the "
        f"training prompts only: read answers of high reward from these steps."
    )
    metrics = (name, "rollout/reward")
    return Finding("held-out", "Reward rises, held-out result falls", text, metrics, (best_step, last_step))


def length_runs_away(curves: Curves) -> Finding | None:
    """Responses become much longer."""
    name = "rollout/response_tokens"
    found = ends(curves.get(name))
    if found is None or found.last < LENGTH_GROWTH * found.first:
        return None
    text = (
        f"Responses grew from {found.first:.4g} to {found.last:.4g} tokens. Longer answers can be better ones; check "
        f"that the accuracy grew too, and that the reward does not pay for length."
    )
    return Finding("length", "Responses become much longer", text, (name, "rollout/truncated"), found.steps)


def entropy_collapses(curves: Curves) -> Finding | None:
    """The policy has lost most of its entropy."""
    name = "policy/entropy"
    found = ends(curves.get(name))
    if found is None or found.last > ENTROPY_LEFT * found.first:
        return None
    text = (
        f"Entropy fell from {found.first:.3g} to {found.last:.3g} nats per token. All answers to a prompt become the "
        f"same, and there is little left to learn from: see duplicates and groups of equal rewards."
    )
    return Finding("entropy", "Entropy collapses", text, (name,), found.steps)


def many_are_truncated(curves: Curves) -> Finding | None:
    """The length limit ends many responses."""
    name = "rollout/truncated"
    found = ends(curves.get(name), least_points=1)
    if found is None or found.last < TRUNCATED_SHARE:
        return None
    text = (
        f"The length limit ended {found.last:.0%} of the responses. They have no answer to judge; raise "
        f"--generate_max_len, or look whether the model ends its answers at all."
    )
    return Finding("truncated", "Many responses are cut off", text, (name,), found.steps)


def gap_grows(curves: Curves) -> Finding | None:
    """The engine's log-probs move away from the trainer's."""
    name = "mismatch/logprob_gap_mean"
    found = ends(curves.get(name))
    if found is None or found.last < LEAST_GAP or found.last < GAP_GROWTH * found.first:
        return None
    text = (
        f"The engine's log-probs differ from the trainer's by {found.last:.3g} nats per token, {found.first:.3g} at "
        f"the beginning. Rounding does not grow: samples become more and more off-policy."
    )
    metrics = (name, "mismatch/kl", "mismatch/out_of_bounds")
    return Finding("gap", "Engine and trainer drift apart", text, metrics, found.steps)


def much_is_clipped(curves: Curves) -> Finding | None:
    """Many tokens are beyond the clipping of the ratio."""
    name = "policy/clip_fraction"
    found = ends(curves.get(name), least_points=1)
    if found is None or found.last < CLIP_SHARE:
        return None
    text = f"{found.last:.0%} of the tokens are clipped and teach nothing: a step moves the policy far."
    return Finding("clip", "Many tokens are clipped", text, (name, "policy/ratio"), found.steps)


def kl_is_large(curves: Curves) -> Finding | None:
    """The policy is far from the reference, or moves far in a step."""
    for name, most, other in (
        ("kl/reference", KL_TO_REFERENCE, "the reference"),
        ("policy/kl_to_old", KL_TO_OLD, "the policy before the step"),
    ):
        found = ends(curves.get(name), least_points=1)
        if found is not None and found.last >= most:
            text = f"The KL to {other} is {found.last:.3g} nats per token at the end, {found.first:.3g} at first."
            return Finding("kl", f"Far from {other}", text, (name, "kl/coef"), found.steps)
    return None


def verdicts_fail(curves: Curves) -> Finding | None:
    """Scoring fails, which says nothing about the answers."""
    first = "rollout/verdict_"
    failing = [name for kind in VerdictKind if kind.failed and (name := f"{first}{kind}") in curves]
    counts: dict[int, list[float]] = {}  # by step: failed ones, all
    for name, curve in curves.items():
        for step, value in curve if name.startswith(first) else ():
            count = counts.setdefault(step, [0.0, 0.0])
            count[1] += value or 0.0
            count[0] += (value or 0.0) if name in failing else 0.0
    bad = {step: failed / total for step, (failed, total) in counts.items() if failed >= FAILED_SHARE * total > 0}
    if not bad:
        return None
    worst = max(bad, key=lambda step: bad[step])
    text = (
        f"Rewards failed in {len(bad)} of {len(counts)} steps, most at step {worst}: {bad[worst]:.0%}. These samples "
        f"are not trained, and the rest are those that are easy to score; `detail` of such a rollout has the reason."
    )
    return Finding("verdicts", "Rewards fail", text, tuple(failing), (min(bad), max(bad)))


def values_are_not_finite(curves: Curves) -> Finding | None:
    """Metrics are NaN or infinite."""
    bad = {name: [step for step, value in curve if value is None] for name, curve in curves.items()}
    names = [name for name, steps in bad.items() if steps]
    if not names:
        return None
    steps = [step for name in names for step in bad[name]]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    text = f"{shown}: NaN or infinite, first at step {min(steps)}."
    return Finding("finite", "Metrics are not finite", text, tuple(names), (min(steps), max(steps)))


def held_out_loss_rises(curves: Curves) -> Finding | None:
    """The held-out loss of an offline run rises from its best."""
    known = [(step, value) for step, value in curves.get("eval/loss", ()) if value is not None]
    if len(known) < 2:
        return None
    best_step, best = min(known, key=lambda point: point[1])
    last_step, last = known[-1]
    if last <= best + LOSS_GROWTH * abs(best):
        return None
    text = f"The held-out loss rose from {best:.4g} at {best_step} to {last:.4g} at {last_step}: the model overfits."
    return Finding("loss", "Held-out loss rises", text, ("eval/loss",), (best_step, last_step))


FROM_CURVES: tuple[Callable[[Curves], Finding | None], ...] = (
    held_out_falls,
    held_out_loss_rises,
    values_are_not_finite,
    length_runs_away,
    entropy_collapses,
    many_are_truncated,
    gap_grows,
    much_is_clipped,
    kl_is_large,
    verdicts_fail,
)


@dataclass(slots=True)
class StepCounts:
    """Counts over all rollouts of a step, with the ids of a few that show each.

    Attributes:
        num_groups: groups of at least two rewards.
        num_equal: those whose rewards are all the same.
        num_rollouts: rollouts.
        num_duplicates: those whose text another one of the group has, too.
        num_marked: those whose text has one of `MARKERS`.
        examples: by the name of the finding.
    """

    num_groups: int = 0
    num_equal: int = 0
    num_rollouts: int = 0
    num_duplicates: int = 0
    num_marked: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, rollouts: Sequence[tuple[str, str, float | None]]) -> None:
        """Count a group: id, text and reward of each of its rollouts."""
        rewards = [reward for _, _, reward in rollouts if reward is not None]
        first_ids: dict[str, str] = {}
        for rollout_id, text, _ in rollouts:
            self.num_rollouts += 1
            if text in first_ids:
                self.num_duplicates += 1
                self._show("duplicates", first_ids[text])
            first_ids.setdefault(text, rollout_id)
            if any(marker in text for marker in MARKERS):
                self.num_marked += 1
                self._show("markers", rollout_id)
        if len(rewards) > 1:
            self.num_groups += 1
            if min(rewards) == max(rewards):
                self.num_equal += 1
                self._show("equal", rollouts[0][0])

    def _show(self, name: str, rollout_id: str) -> None:
        examples = self.examples.setdefault(name, [])
        if len(examples) < 3 and rollout_id not in examples:
            examples.append(rollout_id)


def from_counts(counts: Mapping[int, StepCounts]) -> list[Finding]:
    """Return the findings from the counts of each step, in the order of steps."""
    return [found for check in (_equal_groups, _duplicates, _markers) if (found := check(counts)) is not None]


def _equal_groups(counts: Mapping[int, StepCounts]) -> Finding | None:
    shares = [(step, count.num_equal / count.num_groups) for step, count in counts.items() if count.num_groups]
    found = ends(shares, least_points=1)
    if found is None or found.last < EQUAL_SHARE:
        return None
    text = (
        f"In {found.last:.0%} of the groups all rewards are the same ({found.first:.0%} at first). Algorithms that "
        f"compare the answers to a prompt learn nothing from such groups: the prompts are too easy or too hard."
    )
    return _found("equal", "Groups of equal rewards", text, counts, found.steps, ("rollout/reward",))


def _duplicates(counts: Mapping[int, StepCounts]) -> Finding | None:
    shares = [(step, count.num_duplicates / count.num_rollouts) for step, count in counts.items()]
    found = ends(shares, least_points=1)
    if found is None or found.last < DUPLICATE_SHARE:
        return None
    text = (
        f"{found.last:.0%} of the answers repeat another answer to the same prompt word for word "
        f"({found.first:.0%} at first)."
    )
    return _found("duplicates", "Answers repeat each other", text, counts, found.steps, ("policy/entropy",))


def _markers(counts: Mapping[int, StepCounts]) -> Finding | None:
    marked = [step for step, count in counts.items() if count.num_marked]
    num_marked = sum(count.num_marked for count in counts.values())
    total = sum(count.num_rollouts for count in counts.values())
    if not marked or num_marked < MARKER_SHARE * total:
        return None
    text = (
        f"{num_marked} of {total} answers contain markers of a chat template as text. The model goes on with turns "
        f"that are not its own, or the prompt is rendered with another template than the model's."
    )
    return _found("markers", "Answers contain template markers", text, counts, (marked[0], marked[-1]), ())


def _found(
    name: str,
    title: str,
    text: str,
    counts: Mapping[int, StepCounts],
    steps: tuple[int, int],
    metrics: tuple[str, ...],
) -> Finding:
    """Return a finding with examples from the last steps that have some."""
    inside = [count for step, count in counts.items() if steps[0] <= step <= steps[1]]
    examples = [rollout_id for count in reversed(inside) for rollout_id in count.examples.get(name, [])]
    return Finding(name, title, text, metrics, steps, tuple(examples[:6]))
