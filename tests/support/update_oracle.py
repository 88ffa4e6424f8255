"""One update of an online run in float64, written from the formulas: rollouts to columns, losses, gradients, weights.

It shares no code with `rlhf_train`, `rlhf_kernels` or `rlhf_models`, so that tests can hold them against it. Gradients
of the policy loss are derivatives written out by hand; torch differentiates the model, the entropy and the value loss.

Shape letters: B rollouts, T token positions, L layers, D hidden, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exact_adam import Adam
from exact_losses import Recipe, kl_of_token, sequence_term, token_term
from tiny_qwen2 import TinyQwen2

# estimator: (baseline within the group, reduction, whitened over the batch, uses a critic)
ESTIMATORS = {
    "gae": ("none", "token_mean", True, True),
    "reinforce": ("none", "token_mean", True, False),
    "reinforce_baseline": ("mean", "token_mean", True, False),
    "group_norm": ("mean and deviation", "seq_mean_token_mean", False, False),
    "dr_grpo": ("mean", "seq_mean_token_sum_norm", False, False),
    "rloo": ("mean of the others", "seq_mean_token_sum", False, False),
    "lite_ppo": ("mean and deviation of all", "token_mean", False, False),
    "maxrl": ("mean, over itself", "seq_mean_token_sum", False, False),
    "opo": ("mean by tokens", "seq_mean_token_sum", False, False),
    "remax": ("greedy", "seq_mean_token_sum", False, False),
    "max_at_k": ("best of the others", "seq_mean_token_sum", False, False),
    "online_dpo": ("best and worst", "seq_mean_token_sum", False, False),
}
LOSS_REDUCTIONS = {
    "gspo": "seq_mean_token_mean", "sapo": "seq_mean_token_mean", "cispo": "token_mean", "kimi": "token_mean",
    "gmpo": "seq_mean_token_mean", "topr": "seq_mean_token_mean", "vespo": "seq_mean_token_sum",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One rollout: its tokens, which of them the policy wrote, the engine's log-probs [n] of all (0.0 for others'), and
    the versions of the weights that wrote them [n]."""

    tokens: list[int]
    is_policy: list[bool]
    rollout_logprobs: list[float]
    versions: list[int]
    reward: float
    group: str
    truncated: bool
    greedy: float = 0.0  # the reward of the greedy response


@dataclasses.dataclass
class Outcome:
    """What an update came to: columns [B, T], weights by role and name, metrics."""

    columns: dict[str, np.ndarray]
    weights: dict[str, dict[str, np.ndarray]]
    metrics: dict[str, float]


class Oracle:
    """Computes one rollout batch's update.

    Args:
        recipe: the algorithm.
        adam: the optimizer of actor and critic.
        folders: model folders by role: actor, reference (with a KL), teacher (with a weight), critic (with values).
        samples: the rollout batch, of all ranks.
        temperature: of the policy.
        max_tokens: the constant of seq_mean_token_sum_norm.
        step_versions: versions of the weights at the start of this step and of those before it.
    """

    def __init__(
        self, recipe: Recipe, adam: Adam, folders: dict[str, str], samples: Sequence[Sample], *, temperature: float,
        max_tokens: int, step_versions: Sequence[int] = (0,),
    ) -> None:  # fmt: skip
        self.recipe, self.adam, self.samples = recipe, adam, samples
        self.temperature, self.max_tokens, self.step_versions = temperature, max_tokens, step_versions
        self.baseline, own_reduction, self.whitens, self.uses_critic = ESTIMATORS[recipe.estimator]
        self.reduction = recipe.reduction or LOSS_REDUCTIONS.get(recipe.policy_loss) or own_reduction
        self.models = {role: TinyQwen2(folder) for role, folder in folders.items()}
        self.width = max(len(sample.tokens) for sample in samples)
        self.tokens = torch.tensor([s.tokens + [0] * (self.width - len(s.tokens)) for s in samples])
        # Places are (row, column) of tokens that are trained: the policy's, with a finite log-prob of the engine's.
        self.places = [
            [t for t, is_policy in enumerate(s.is_policy) if is_policy and math.isfinite(s.rollout_logprobs[t])]
            for s in samples
        ]
        self.columns: dict[str, np.ndarray] = {}
        self.metrics: dict[str, float] = {}
        self.distances: list[float] = []  # from the teacher

    # Rewards, columns

    def baselined_rewards(self) -> list[float]:
        """Return each sample's reward as compared within its group."""
        results = []
        for sample in self.samples:
            group = [other.reward for other in self.samples if other.group == sample.group]
            mean = sum(group) / len(group)
            deviation = math.sqrt(sum((reward - mean) ** 2 for reward in group) / len(group))
            if self.baseline == "none":
                results.append(sample.reward)
            elif self.baseline == "greedy":
                results.append(sample.reward - sample.greedy)
            elif self.baseline == "mean of the others":
                others = (sum(group) - sample.reward) / (len(group) - 1) if len(group) > 1 else sample.reward
                results.append(sample.reward - others)
            elif self.baseline == "mean and deviation of all":
                results.append((sample.reward - mean) / (np.std([s.reward for s in self.samples]) + 1e-6))
            elif self.baseline == "mean, over itself":
                results.append((sample.reward - mean) / (mean + 1e-6) if mean > 0 else 0.0)
            elif self.baseline == "best and worst":
                results.append(0.0)  # `_prefer` has what takes its place
            elif self.baseline == "mean by tokens":
                tokens = {id(s): sum(s.is_policy) for s in self.samples if s.group == sample.group}
                weighed = sum(tokens[id(s)] * s.reward for s in self.samples if s.group == sample.group)
                results.append(sample.reward - weighed / sum(tokens.values()))
            elif self.baseline == "best of the others":
                without = [
                    other.reward for other in self.samples if other.group == sample.group and other is not sample
                ]
                results.append(max(group) - max(without, default=max(group)))
            elif self.baseline == "mean and deviation" and self.recipe.whiten_std:
                results.append((sample.reward - mean) / (deviation + 1e-6) if deviation > 1e-12 else 0.0)
            else:
                results.append(sample.reward - mean)
        return results

    def fill_columns(self) -> None:
        """Compute everything that stays constant during the update."""
        recipe, shape = self.recipe, (len(self.samples), self.width)
        with torch.no_grad():
            before, before_entropy = self.models["actor"].logprobs(self.tokens, self.temperature)
            before = before.numpy()
            if recipe.old_logprobs == "recompute":
                self._keep("old_logprobs", before)
            elif recipe.old_logprobs == "rollout":
                rows = [s.rollout_logprobs + [0.0] * (self.width - len(s.tokens)) for s in self.samples]
                self._keep("old_logprobs", torch.tensor(rows, dtype=torch.float64))
            if recipe.kl_coef:
                self._keep("ref_logprobs", self.models["reference"].logprobs(self.tokens, self.temperature)[0])
            if recipe.distribution:
                self.taught = self.models["teacher"].distributions(self.tokens, self.temperature).exp()
            elif recipe.teacher_coef:
                self._keep("teacher_logprobs", self.models["teacher"].logprobs(self.tokens, self.temperature)[0])
            after = self.models["critic"].values_after(self.tokens).numpy() if self.uses_critic else np.zeros(shape)
            if self.uses_critic:
                self._keep("values", self.models["critic"].values(self.tokens))
        self._mask_stale()
        self._correct(before)
        self._credit(after)
        if recipe.teacher_coef and not recipe.distribution:
            self._teach()
        if self.whitens:
            self._whiten()
        if recipe.top_quantile is not None:
            self._keep_uncertain(before_entropy)

    def _keep(self, name: str, values: Any) -> None:
        kept = np.zeros((len(self.samples), self.width))
        for i, places in enumerate(self.places):
            kept[i, places] = np.asarray(values)[i, places]
        self.columns[name] = kept

    def _mask_stale(self) -> None:
        """Keep the tokens that are no more than `mask_stale` steps old: so many steps began with newer weights."""
        limit = math.inf if self.recipe.mask_stale is None else self.recipe.mask_stale
        self.policy_places, ages = [], []
        for sample, places in zip(self.samples, self.places, strict=True):
            age = {t: sum(start > sample.versions[t] for start in self.step_versions) for t in places}
            self.policy_places.append([t for t in places if age[t] <= limit])
            ages += age.values()
        self.metrics |= {"async/staleness_steps": float(np.mean(ages)), "async/staleness_steps_max": max(ages)}

    def _correct(self, before: np.ndarray) -> None:
        """Weigh tokens by how much likelier the trainer finds them before the updates than the engine did.

        A ratio whose denominator is the engine's weighs already, and a mask is all that is left to do.
        """
        if self.recipe.correction is None:
            return
        level, mode, low, high, *drops = self.recipe.correction
        weighs = self.recipe.old_logprobs == "recompute" or self.recipe.policy_loss == "reinforce"
        weights = np.zeros((len(self.samples), self.width))
        for i, places in enumerate(self.places):
            gaps = {t: before[i, t] - self.samples[i].rollout_logprobs[t] for t in places}
            total = sum(gaps.values())
            for t in places:
                exponent = {"token": gaps[t], "sequence": total, "geometric": total / len(places)}[level]
                weights[i, t] = math.exp(exponent)
            inside = {t: low <= weights[i, t] <= high for t in places}
            if mode == "truncate":
                weights[i, places] = weights[i, places].clip(low, high)
            elif drops == [True]:
                self.policy_places[i] = [t for t in self.policy_places[i] if inside[t]]
            else:
                for t in places:
                    weights[i, t] = inside[t] * (weights[i, t] if weighs and mode == "mask" else 1.0)
        if (weighs and mode != "filter") or (mode != "truncate" and drops != [True]):
            self._keep("weights", weights)

    def _credit(self, after: np.ndarray) -> None:
        """Fill in advantages and returns, from the last trained token of each rollout to its first."""
        recipe, rewards = self.recipe, self.baselined_rewards()
        shape = (len(self.samples), self.width)
        advantages, returns, values = np.zeros(shape), np.zeros(shape), self.columns.get("values", np.zeros(shape))
        kls = []
        for i, (sample, places) in enumerate(zip(self.samples, self.places, strict=True)):
            goes_on = recipe.bootstrap_truncated and sample.truncated and self.uses_critic
            next_value = after[i, len(sample.tokens) - 1] if goes_on else 0.0
            next_advantage = 0.0
            for t in reversed(places):
                gamma = recipe.gamma
                later = [place for place in places if place > t]
                # In another turn, somebody else wrote a token in between.
                if recipe.turn_gamma is not None and later and not all(sample.is_policy[t : later[0]]):
                    gamma = recipe.turn_gamma
                reward = rewards[i] if t == places[-1] else 0.0
                if recipe.kl_coef and recipe.old_logprobs != "skip":
                    pair = self.columns["old_logprobs"][i, t], self.columns["ref_logprobs"][i, t]
                    kls.append(kl_of_token(recipe, *pair)[0])
                    is_charged = not recipe.use_kl_loss and self.baseline != "best and worst"
                    reward -= recipe.kl_coef * kls[-1] * is_charged
                surprise = reward + gamma * next_value - values[i, t]
                lambd = recipe.lambd if self.uses_critic else 1.0
                advantages[i, t] = surprise + gamma * lambd * next_advantage
                returns[i, t] = advantages[i, t] + values[i, t]
                next_value, next_advantage = values[i, t], advantages[i, t]
        if kls:
            self.metrics["kl/reference"] = float(np.mean(kls))
        if self.baseline == "best and worst":
            advantages = returns = self._prefer()
        self._keep("advantages", advantages)
        self._keep("returns", returns)
        self.metrics["value/return"] = float(np.mean(self._chosen(returns)))

    def _prefer(self) -> np.ndarray:
        """Return minus the derivatives of the groups' DPO losses by the log-probs of tokens, times the group's size."""
        found, margins = np.zeros((len(self.samples), self.width)), []
        old, reference = self.columns["old_logprobs"], self.columns["ref_logprobs"]
        for group in {sample.group for sample in self.samples}:
            rows = [i for i, sample in enumerate(self.samples) if sample.group == group]
            best = max(rows, key=lambda i: self.samples[i].reward)
            worst = min(rows, key=lambda i: self.samples[i].reward)
            if (
                self.samples[best].reward == self.samples[worst].reward
                or not self.places[best]
                or not self.places[worst]
            ):
                continue
            ratios = {i: sum(old[i, t] - reference[i, t] for t in self.places[i]) for i in (best, worst)}
            margins.append(self.recipe.kl_coef * (ratios[best] - ratios[worst]))
            slope = self.recipe.kl_coef / (1 + math.exp(margins[-1])) * len(rows)
            found[best, self.places[best]], found[worst, self.places[worst]] = slope, -slope
        self.metrics["policy/pair_margin"] = float(np.mean(margins))
        self.metrics["policy/pair_accuracy"] = float(np.mean(np.array(margins) > 0))
        return found

    def _teach(self) -> None:
        """Add to each token's advantage how much likelier the teacher finds it, after all comparison within a group."""
        gaps = []
        for i, places in enumerate(self.places):
            for t in places:
                gaps.append(self.columns["old_logprobs"][i, t] - self.columns["teacher_logprobs"][i, t])
                self.columns["advantages"][i, t] -= self.recipe.teacher_coef * gaps[-1]
        self.metrics["kl/teacher"] = float(np.mean(gaps))

    def _keep_uncertain(self, entropy: Tensor) -> None:
        """Set the weights of all tokens to 0 whose entropy is below the quantile of the batch."""
        self._keep("entropy", entropy)
        policy = [(i, t) for i, places in enumerate(self.policy_places) for t in places]
        bound = np.quantile([self.columns["entropy"][place] for place in policy], 1 - self.recipe.top_quantile)
        weights = self.columns.get("weights", np.ones((len(self.samples), self.width)))
        for i, places in enumerate(self.places):
            for t in places:
                weights[i, t] *= (i, t) in policy and self.columns["entropy"][i, t] >= bound
        self._keep("weights", weights)

    def _chosen(self, values: np.ndarray) -> list[float]:
        return [values[i, t] for i, places in enumerate(self.places) for t in places]

    def _whiten(self) -> None:
        chosen = self._chosen(self.columns["advantages"])
        mean, deviation = np.mean(chosen), np.std(chosen)
        for i, places in enumerate(self.places):
            self.columns["advantages"][i, places] -= mean
            if self.recipe.whiten_std:
                self.columns["advantages"][i, places] /= deviation

    # Losses

    def _actor_loss(self, members: Sequence[int]) -> tuple[Tensor, float]:
        """Return a number with the gradient of the actor's loss, and the value of its policy term."""
        recipe, columns = self.recipe, self.columns
        logprobs, entropy = self.models["actor"].logprobs(self.tokens[members], self.temperature)
        now = logprobs.detach().numpy()
        rows = {i: self.policy_places[i] for i in members if self.policy_places[i]}
        num_tokens = sum(map(len, rows.values()))
        slopes, shares, total = torch.zeros_like(logprobs), torch.zeros_like(logprobs), 0.0
        for row, i in enumerate(members):
            places = rows.get(i, [])
            old = columns["old_logprobs"][i] if "old_logprobs" in columns else now[row]
            gaps = [now[row, t] - old[t] for t in places]
            for t, gap in zip(places, gaps, strict=True):
                share = {
                    "token_mean": 1 / num_tokens,
                    "seq_mean_token_mean": 1 / len(rows) / len(places),
                    "seq_mean_token_sum": 1 / len(rows),
                    "seq_mean_token_sum_norm": 1 / len(rows) / self.max_tokens,
                }[self.reduction]
                advantage = columns["advantages"][i, t]
                if recipe.policy_loss in ("gmpo", "topr", "vespo"):
                    others = [columns["advantages"][i, k] for k in places]
                    loss, slope = sequence_term(recipe, now[row, t], gap, advantage, gaps, others)
                else:
                    ratio = math.exp(sum(gaps) / len(gaps) if recipe.policy_loss == "gspo" else gap)
                    loss, slope = token_term(recipe, now[row, t], ratio, advantage)
                weight = columns["weights"][i, t] if "weights" in columns else 1.0
                total += share * weight * loss
                slope *= weight
                if recipe.use_kl_loss:
                    reference = columns["ref_logprobs"][i, t]
                    pull = kl_of_token(recipe, now[row, t], reference)[1]
                    if recipe.kl_unbiased_gradient:
                        pull = min(math.exp(gap), 10.0) * (now[row, t] - reference)
                    slope += recipe.kl_coef * pull
                slopes[row, t] = share * slope
                shares[row, t] = share
        loss = (slopes * logprobs).sum() - recipe.entropy_coef * (shares * entropy).sum()
        if recipe.distribution:
            loss = loss + recipe.teacher_coef * self._distance(members, rows, shares)
        return loss, total

    def _distance(self, members: Sequence[int], rows: dict[int, list[int]], shares: Tensor) -> Tensor:
        """Return the sum of the shares of the divergences from the teacher, over its likeliest tokens and the rest."""
        top_k, divergence, beta = self.recipe.distribution
        policy = self.models["actor"].distributions(self.tokens[members], self.temperature).exp()
        total = torch.zeros((), dtype=torch.float64)
        for row, i in enumerate(members):
            for t in rows.get(i, []):
                likeliest = self.taught[i, t - 1].argsort(descending=True)[:top_k]
                q, p = (table[likeliest] for table in (self.taught[i, t - 1], policy[row, t - 1]))
                q, p = (torch.cat([each, (1 - each.sum())[None]]) for each in (q, p))
                if divergence == "forward_kl":
                    found = (q * (q / p).log()).sum()
                elif divergence == "reverse_kl":
                    found = (p * (p / q).log()).sum()
                else:
                    m = beta * q + (1 - beta) * p
                    found = beta * (q * (q / m).log()).sum() + (1 - beta) * (p * (p / m).log()).sum()
                self.distances.append(float(found.detach()))
                total = total + shares[row, t] * found
        self.metrics["kl/teacher"] = float(np.mean(self.distances))
        return total

    def _critic_loss(self, members: Sequence[int]) -> tuple[Tensor, float]:
        """Return the critic's loss, with its gradient, and its value."""
        values = self.models["critic"].values(self.tokens[members])
        losses = []
        for row, i in enumerate(members):
            for t in self.places[i]:
                old, goal, value = self.columns["values"][i, t], self.columns["returns"][i, t], values[row, t]
                squares = [(value - goal) ** 2]
                if (bound := self.recipe.value_clip) is not None:
                    squares.append((old + torch.clamp(value - old, -bound, bound) - goal) ** 2)
                losses.append(torch.stack(squares).max() / 2)
        loss = torch.stack(losses).mean()
        return loss, float(loss.detach())

    # Weights

    def run(self, mini_batches: Sequence[Sequence[int]], *, max_epochs: int, seed: int) -> Outcome:
        """Train actor and critic on every mini-batch once per epoch, in the order that a run with `seed` takes."""
        self.fill_columns()
        orders = [np.random.default_rng((seed, epoch)).permutation(len(mini_batches)) for epoch in range(max_epochs)]
        updates = [list(mini_batches[index]) for order in orders for index in order]
        self._train("actor", "policy", self._actor_loss, updates)
        if self.uses_critic:
            self._train("critic", "value", self._critic_loss, updates)
        trained = ["actor", *(["critic"] if self.uses_critic else [])]
        weights = {
            role: {name: weight.detach().numpy() for name, weight in self.models[role].weights.items()}
            for role in trained
        }
        return Outcome(self.columns, weights, self.metrics)

    def _train(self, role: str, metric: str, loss_of: Any, updates: Sequence[Sequence[int]]) -> None:
        weights = self.models[role].weights
        moments = {name: [torch.zeros_like(w), torch.zeros_like(w)] for name, w in weights.items()}
        values, norms = [], []
        for step, members in enumerate(updates):
            loss, value = loss_of(members)
            gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
            norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
            factor = min(1.0, self.adam.max_norm / norm) if self.adam.max_norm else 1.0
            rate = self.adam.rate(step)
            with torch.no_grad():
                for name, weight in weights.items():
                    self.adam.step(weight, gradients[name] * factor, moments[name], rate, step + 1)
            values.append(value)
            norms.append(norm)
        self.metrics |= {f"{metric}/loss": float(np.mean(values)), f"{metric}/grad_norm": float(np.mean(norms))}
