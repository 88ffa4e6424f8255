"""`serve_rm`: a reward over HTTP, for `rlhf_rollout.rewards.remote`.

A POST to /get_reward with `{"query": [...], "prompts": [...], "labels": [...]}` is answered by `{"rewards": [...],
"scores": [...], "extra_logs": {...}, "verdicts": [...]}`, one entry per query. --extra_keys names further lists.
GET /health tells whether the server is up.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from rlhf_data.chat.tokens import Tokenizer
from rlhf_data.errors import DataError, RewardError
from rlhf_data.examples.sft import completed
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict
from rlhf_data.rows.row import Row
from rlhf_rollout.commands.configs import ServeConfig
from rlhf_rollout.commands.parts import RewardJob
from rlhf_rollout.commands.terminal import TERMINAL
from rlhf_rollout.http.server import application, listen, read_json, token_for
from rlhf_rollout.http.tokens import TOKEN_VARIABLE
from rlhf_rollout.protocols import RewardFunction
from rlhf_rollout.rewards.mix import score_each

MAX_QUERIES = 4096  # per request
ANSWER_TIMEOUT_S = 600.0  # for the rewards of a request


class Query(BaseModel, extra="allow"):
    """The body of a request.

    Attributes:
        query: texts of prompt and response together.
        prompts: the prompt at the beginning of each query; if left out, a query is a response without a prompt.
        labels: the reference answers, which reward functions receive. Lists of --extra_keys have names of their own.
    """

    query: list[str] = Field(max_length=MAX_QUERIES)
    prompts: list[str] | None = None
    labels: list[str | None] | None = None


def run(config: ServeConfig) -> int:
    """Serve until interrupted; return 0.

    Raises ConfigError for a reward that cannot be used, and for an address that other machines reach without a token.
    """
    server = config.server
    token = token_for(server.host, TOKEN_VARIABLE)
    job = RewardJob(config.reward, config.model.dtype, config.data.max_len)
    with TERMINAL.progress.doing("loading the tokenizer"):
        tokenizer = job.load_tokenizer(config.model.tokenizer)
    resources = contextlib.AsyncExitStack()
    # Opened before the server starts: an error within the server's start would not reach the caller.
    reward = job.open(tokenizer, resources)
    TERMINAL.say(f"POST to http://{server.host}:{server.port}/get_reward")
    limits = {"extra_keys": config.reward.extra_names, "max_len": config.data.max_len}
    app = create_app(reward, tokenizer, resources, token=token, **limits)
    listen(app, server.host, server.port, log=TERMINAL.err)
    return 0


def create_app(
    reward: RewardFunction,
    tokenizer: Tokenizer,
    resources: contextlib.AsyncExitStack,
    *,
    token: str = "",
    extra_keys: Sequence[str] = (),
    max_len: int | None = None,
) -> FastAPI:
    """Return the server's application.

    Args:
        reward: called concurrently for the queries of all requests, so that it may batch them.
        tokenizer: makes the tokens that a reward model reads. As in its training, prompt and response are tokenized
            separately and an EOS is added.
        resources: closed when the server ends.
        token: the bearer token that requests must carry; empty if they need none.
        extra_keys: names of further lists that a request must have, for reward functions.
        max_len: tokens per query at most; None for any number.
    """

    app = application("rlhf-rollout serve_rm", resources, token=token, variable=TOKEN_VARIABLE)

    @app.exception_handler(RewardError)
    async def fail(request: Request, error: RewardError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=500)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/get_reward")
    async def get_reward(request: Request) -> dict[str, Any]:
        query = await read_json(request, Query, advice="send fewer queries")
        count = len(query.query)
        prompts, labels = query.prompts or [""] * count, query.labels or [None] * count
        if {len(prompts), len(labels)} != {count}:
            raise HTTPException(422, f"{count} queries with {len(prompts)} prompts and {len(labels)} labels")
        try:
            cells = _extra_cells(query.model_extra or {}, extra_keys, count)
            texts = zip(query.query, prompts, labels, cells, strict=True)
            samples = [_sample(tokenizer, *parts) for parts in texts]
            _check_lengths([rollout.num_tokens for _, rollout in samples], max_len)
        except DataError as error:
            raise HTTPException(422, str(error)) from None
        calls = [score_each(reward, prompt, [rollout]) for prompt, rollout in samples]
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return _answer([verdict for [verdict] in await asyncio.gather(*calls)])
        except TimeoutError:
            raise HTTPException(504, f"no rewards within {ANSWER_TIMEOUT_S:g} s") from None

    return app


def _extra_cells(given: Mapping[str, Any], keys: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Return the extra cells of each query. Raises DataError for a list that is missing or of another length."""
    for key in keys:
        if not isinstance(given.get(key), list) or len(given[key]) != count:
            raise DataError(f"`{key}` must be a list with an entry for each of the {count} queries")
    return [{key: given[key][index] for key in keys} for index in range(count)]


def _check_lengths(lengths: Sequence[int], max_len: int | None) -> None:
    """Raise DataError for a query of more than `max_len` tokens."""
    for number, length in enumerate(lengths):
        if max_len is not None and length > max_len:
            raise DataError(f"query {number} has {length} tokens, more than --max_len {max_len} of the server")


def _sample(
    tokenizer: Tokenizer, query: str, prompt: str, label: str | None, extra: Mapping[str, Any]
) -> tuple[Prompt, Rollout]:
    if not query.startswith(prompt):
        raise DataError(f"the query {query[:60]!r} does not begin with its prompt {prompt[:60]!r}")
    response = query.removeprefix(prompt)
    token_ids, mask = completed(Row({}, "request", 0), prompt, response, tokenizer)
    first = max(1, int(mask.argmax()))
    answer = token_ids[first:]
    spans = (Span(SpanSource.PROMPT, token_ids[:first]), Span(SpanSource.POLICY, answer, [0.0] * len(answer), 0))
    asked = Prompt("request", token_ids[:first], prompt, label, extra=extra)
    return asked, Rollout("r", "r", spans, FinishReason.STOP, response)


def _answer(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return the body of the answer. Verdicts without a reward have 0.0, which clients ignore."""
    # Only numbers that every query has: a client expects one number per query.
    names = set.intersection(*(set(verdict.extra) for verdict in verdicts)) if verdicts else set()
    return {
        "rewards": [verdict.reward or 0.0 for verdict in verdicts],
        "scores": [verdict.score or 0.0 for verdict in verdicts],
        "extra_logs": {name: [verdict.extra[name] for verdict in verdicts] for name in sorted(names)},
        "verdicts": [str(verdict.kind) for verdict in verdicts],
    }
