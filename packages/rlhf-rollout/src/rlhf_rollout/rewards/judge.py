"""Rewards from a judge: a language model behind an OpenAI-compatible URL, which grades or compares responses."""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from rlhf_data.records import Prompt, Rollout, Verdict, VerdictKind
from rlhf_rollout.http.breaker import Breaker, Failure
from rlhf_rollout.http.client import Client, Outcome, RequestFailure, check_passing, insist
from rlhf_rollout.http.tokens import check_url
from rlhf_rollout.rewards.rubric import load_rubric, read_share
from rlhf_rollout.rewards.sources import DEFAULT_CALLS, CallOptions, RewardSource
from rlhf_rollout.rewards.user_function import kind_of
from rlhf_rollout.workers.user_code import one_line

KEY_VARIABLE = "RLHF_JUDGE_API_KEY"

_MAX_ANSWER_BYTES = 2**22
_FIRST_PAUSE_S = 0.25
_MAX_FAILURES = 8  # slow failures in a row after which the judge is asked only now and then
_URL_HINT = "give ``JudgeOptions.url`` with the part before /chat/completions, such as https://host/v1"

Messages = list[dict[str, str]]
Cost = dict[str, float]  # tokens and unparsable answers, by the names that verdicts give them


class Judge:
    """Asks a model behind an OpenAI-compatible URL, a bounded number of questions at a time.

    After a temporary failure (no connection, status 408, 425, 429 or 5xx) a question is asked again, after a pause and
    within its time limit; see `insist`. A judge that fails slowly many times in a row, for several prompts, is held
    back by a `Breaker`. Use it from one event loop.

    Args:
        calls: the judge's address, model and number of concurrent questions, and the time limit of a question with all
            its tries.
        request: further fields of each request.

    Raises:
        ConfigError: the URL is invalid, or `tokens_of` refuses the key in the environment variable RLHF_JUDGE_API_KEY.
    """

    def __init__(self, calls: CallOptions, request: Mapping[str, Any]) -> None:
        check_url(calls.judge.url, giver="judge", example=_URL_HINT, variable=KEY_VARIABLE)
        self._url = calls.judge.url.rstrip("/") + "/chat/completions"
        self._timeout_s = calls.timeout_s
        self._body = {"model": calls.judge.model, **request}
        limits = {"timeout_s": calls.timeout_s, "max_bytes": _MAX_ANSWER_BYTES}
        self._client = Client([self._url], variable=KEY_VARIABLE, **limits)
        self._slots = asyncio.Semaphore(calls.judge.num_calls)
        self._breaker = Breaker(_MAX_FAILURES)

    async def ask(self, messages: Messages, read: Callable[[str], Any], prompt_id: str) -> tuple[Any, Cost]:
        """Return what `read` finds in the answer to a question about a prompt, or a Failure; and what the answer cost.

        None from `read` stands for an answer that does not say what it should.
        """
        async with self._slots:
            started = time.monotonic()
            outcome: Any = self._breaker.refusal()
            if outcome is None:
                outcome = await self._insist(messages)
                failure = outcome if isinstance(outcome, RequestFailure) else None
                self._breaker.note(failure, time.monotonic() - started, prompt_id=prompt_id)
        outcome, cost = self._text(outcome)
        if isinstance(outcome, str):
            found = read(outcome)
            cost["judge_unparsable"] = float(found is None)
            shown = self._client.shown(outcome[-200:])
            failure = Failure(VerdictKind.CRASH, f"unparsable answer of the judge: {shown}")
            outcome = failure if found is None else found
        return outcome, cost

    async def try_once(self, messages: Messages) -> str | Failure:
        """Return the text that answers a question, asked once, or a Failure."""
        return self._text(await self._client.send(self._url, {**self._body, "messages": messages}))[0]

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _insist(self, messages: Messages) -> Outcome:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        body = {**self._body, "messages": messages}

        async def ask(_: int) -> Outcome:
            return await self._client.send(self._url, body, within=asyncio.timeout_at(deadline))

        outcome, failures = await insist(ask, first_pause_s=_FIRST_PAUSE_S, deadline=deadline)
        if not (isinstance(outcome, RequestFailure) and outcome.passing):
            return outcome
        # The last failure other than the end of the time says more.
        told = [failure for failure in failures if failure.kind is not VerdictKind.TIMEOUT] or failures
        detail = f"{told[-1].detail}; asked {len(failures)} times within {self._timeout_s:g} s"
        return replace(told[-1], kind=VerdictKind.TIMEOUT, detail=detail)

    def _text(self, outcome: httpx.Response | Failure) -> tuple[str | Failure, Cost]:
        """Return the text of an answer, or why there is none; and what it cost."""
        if isinstance(outcome, Failure):
            return outcome, {}
        text = usage = None
        try:
            content = outcome.json()
            usage = content.get("usage")
            text = content["choices"][0]["message"]["content"]
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            pass  # the failure says so
        cost = {f"judge_{name}": _count(usage, name) for name in ("prompt_tokens", "completion_tokens")}
        cost = {name: count for name, count in cost.items() if count is not None}
        if isinstance(text, str):
            return text, cost
        shown = self._client.shown(outcome.text)
        return Failure(VerdictKind.CRASH, f"{self._url}: no text of an answer: {shown}"), cost


class JudgeReward:
    """A `RewardFunction` that has a judge grade each response by a rubric; see `Rubric.reward`.

    An answer without a score per criterion gives the verdict crash and no reward: it is the judge's fault. `extra`
    holds the tokens of the question and of the answer, the scores of a rubric with several criteria, and the number of
    unparsable answers.

    Args:
        path: the file of the rubric.
        calls: how the judge is asked.

    Raises:
        ConfigError: the rubric or the judge's address cannot be used.
    """

    def __init__(self, path: str, calls: CallOptions) -> None:
        self._rubric = load_rubric(path)
        self._threshold = calls.success_threshold
        self.judge = Judge(calls, self._rubric.request or {})

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order."""
        return await asyncio.gather(*[self._grade(prompt, rollout.text) for rollout in rollouts])

    async def close(self) -> None:
        """Close the connections."""
        await self.judge.close()

    def question(self, prompt: Prompt, *texts: str) -> Messages:
        """Return the question about one response, or about two."""
        return self._rubric.messages(prompt.text, prompt.label, *texts)

    async def _grade(self, prompt: Prompt, text: str) -> Verdict:
        started = time.monotonic()
        question = self.question(prompt, text)
        outcome, extra = await self.judge.ask(question, self._rubric.read_scores, prompt.prompt_id)
        if isinstance(outcome, Failure):
            return self._verdict(outcome, extra, started)
        if len(outcome) > 1:
            extra |= {f"judge_{name}": score for name, score in outcome.items()}
        return self._verdict(self._rubric.reward(outcome), extra, started)

    def _verdict(self, outcome: float | Failure, extra: Cost, started: float) -> Verdict:
        seconds = time.monotonic() - started
        if isinstance(outcome, Failure):
            return Verdict(outcome.kind, detail=one_line(outcome.detail), extra=extra, seconds=seconds)
        return Verdict(kind_of(outcome, self._threshold), outcome, extra=extra, seconds=seconds)


class PairwiseReward(JudgeReward):
    """A `RewardFunction` that has a judge compare the responses of a group; the reward is the share of wins.

        reward_i = mean over opponents j of (share of i as response A + share of i as response B) / 2

    A win is a share of 1, a tie one of 0.5. The judge is asked about each pair twice, in both orders, so that a judge
    who prefers one place calls it a tie. A pair counts only if both answers can be read; a rollout without a pair that
    counts has the verdict of a failure. Equal responses tie unasked, and a response without opponents has 0.5.
    `extra` holds a half of what each of the rollout's comparisons cost, and the share of them that failed.
    """

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order."""
        started = time.monotonic()
        texts = [rollout.text for rollout in rollouts]
        pairs = choose_pairs(len(texts), self._rubric.opponents)
        games = await asyncio.gather(*[self._compare(prompt, texts[a], texts[b]) for a, b in pairs])
        shares: list[list[float]] = [[] for _ in texts]
        failures: list[list[Failure]] = [[] for _ in texts]
        costs: list[Counter[str]] = [Counter() for _ in texts]
        for (a, b), (outcome, cost) in zip(pairs, games, strict=True):
            for index, sign in ((a, 1.0), (b, -1.0)):
                costs[index].update({name: count / 2 for name, count in cost.items()})
                if isinstance(outcome, Failure):
                    failures[index].append(outcome)
                else:
                    shares[index].append(0.5 + sign * (outcome - 0.5))
        verdicts = []
        for won, failed, cost in zip(shares, failures, costs, strict=True):
            extra = dict(cost) | ({"judge_failed": len(failed) / len(won + failed)} if won or failed else {})
            reward = sum(won) / len(won) if won else 0.5
            verdicts.append(self._verdict(failed[0] if failed and not won else reward, extra, started))
        return verdicts

    async def _compare(self, prompt: Prompt, first: str, second: str) -> tuple[float | Failure, Counter[str]]:
        """Return the first response's share of the win, or why there is none; and what the answers cost."""
        cost: Counter[str] = Counter()
        if first == second:
            return 0.5, cost
        orders = [self.question(prompt, first, second), self.question(prompt, second, first)]
        asked = [self.judge.ask(messages, read_share, prompt.prompt_id) for messages in orders]
        answers = await asyncio.gather(*asked)
        for _, own in answers:
            cost.update(own)
        failed = [outcome for outcome, _ in answers if isinstance(outcome, Failure)]
        return failed[0] if failed else (answers[0][0] + 1.0 - answers[1][0]) / 2, cost


JUDGES = {"judge": (JudgeReward, 1), "pairwise": (PairwiseReward, 2)}  # with the number of responses in a question


def choose_pairs(count: int, opponents: int | None) -> list[tuple[int, int]]:
    """Return which of `count` responses are compared: all pairs, or on a ring those at most `opponents` / 2 apart.

    Each response then has the same number of opponents, `opponents` rounded up to an even number.
    """
    if opponents is None or opponents >= count - 1:
        return list(itertools.combinations(range(count), 2))
    steps = range(1, math.ceil(opponents / 2) + 1)
    return sorted({tuple(sorted((index, (index + step) % count))) for index in range(count) for step in steps})


def check_judge(source: RewardSource, prompts: Sequence[Prompt] = (), calls: CallOptions = DEFAULT_CALLS) -> str | None:
    """Ask a judge once about the first prompt, before anything expensive starts; not from within an event loop.

    Returns the problem of a judge that was late or reported a temporary error; None without a problem. Raises
    ConfigError for a rubric or an address that cannot be used, and like `remote.check_passing`.
    """

    async def try_it() -> str | Failure:
        kind, num_texts = JUDGES[source.kind]
        reward = kind(source.targets[0], calls)
        try:
            if not prompts:
                return ""
            question = reward.question(prompts[0], *[prompts[0].label or "", ""][:num_texts])
            return await reward.judge.try_once(question)
        finally:
            await reward.close()

    outcome = asyncio.run(try_it())
    if isinstance(outcome, RequestFailure):
        wanted = f"check ``JudgeOptions.model``; {_URL_HINT}"
        check_passing(calls.judge.url, outcome, giver="judge", wanted=wanted, variable=KEY_VARIABLE)
    return outcome.detail if isinstance(outcome, Failure) else None


def _count(usage: Any, name: str) -> float | None:
    count = usage.get(name) if isinstance(usage, dict) else None
    return float(count) if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 2**53 else None
