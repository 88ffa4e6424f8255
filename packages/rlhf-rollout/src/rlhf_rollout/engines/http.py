"""A client of `rlhf-rollout serve` and of vLLM's server: tokens in, tokens and log-probs out."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, astuple
from typing import Any

import httpx
import numpy as np

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_data.records import FinishReason, Span, SpanSource
from rlhf_data.safety import without_secrets
from rlhf_rollout.engines.requests import Progress, check_request, deadline, sample_seeds, time_limit
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.http.client import Client, Headers, Outcome, RequestFailure, insist
from rlhf_rollout.http.tokens import ENGINE_TOKEN_VARIABLE
from rlhf_rollout.protocols import Completion, Draft, EngineHealth, PauseMode, SamplingParams, check_pause_mode
from rlhf_rollout.weights.bucket import WeightBucket
from rlhf_rollout.weights.shared_memory import map_segment

_GRACE_S = 1.0  # for the answer of a server that has ended a request at its deadline
_PIECE_BYTES = 2**20
_PATH = "/v1/completions"
_LOOKS = 16  # at a server's metrics in the time for which it may write nothing
# Lines of its metrics that change with each token.
_WRITTEN = re.compile(
    r"^(?:vllm:generation_tokens_total|rlhf_rollout_generated_tokens_total|rlhf_rollout_unfinished_tokens)\b.*",
    re.MULTILINE,
)
_ERRORS = {"WeightSyncError": WeightSyncError}  # the classes of a server's errors; others are EngineError


class HttpEngine:
    """Generates on a server that runs elsewhere: one of `rlhf-rollout serve`, or vLLM's with its fixed weights.

    vLLM's server must be started with `--logprobs-mode processed_logprobs`: log-probs are then those of the
    distribution sampled from. Without it they ignore the temperature, and the client cannot see that in an answer.

    Args:
        spec: `base_url`, such as "http://host:8000" or "http://host:8000/v1", and `model`, its name on the server.
            `max_model_len` is checked before a request goes out. `request_timeout_s` is for how long the
            server may write nothing during an attempt at a request, by the counters of its `/metrics`. For a server
            without them, it is the deadline of an attempt, with all of its samples.
        num_retries: further attempts at a request after a temporary error: no connection, a timeout, or status 408,
            425, 429 or 5xx; see `insist`. A second timeout ends the attempts. Control calls are not repeated.
        transport: replaces the network, for tests.

    Attributes:
        takes_conversation: `generate` takes the key of a conversation.

    Raises:
        ConfigError: `tokens_of` refuses the token in the environment variable RLHF_ENGINE_TOKEN.
    """

    takes_conversation = True

    def __init__(
        self,
        spec: EngineSpec,
        *,
        num_retries: int = 3,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._address = (spec.base_url or "").rstrip("/").removesuffix("/v1")
        self._url = without_secrets(self._address)  # for messages
        limits = {"timeout_s": spec.request_timeout_s, "transport": transport}
        self._http = Client([self._address], variable=ENGINE_TOKEN_VARIABLE, **limits)
        self._spec = spec
        self._num_retries = num_retries
        self._num_in_flight = 0
        self._progress = Progress()
        self._listening: asyncio.Task[None] | None = None
        self._updating: int | None = None
        self._is_closed = False

    @property
    def _client(self) -> Client:
        if self._is_closed:
            raise EngineError("the engine was closed")
        return self._http

    async def generate(
        self,
        token_ids: np.ndarray,
        sampling: SamplingParams,
        *,
        timeout_s: float | None = None,
        drafts: Sequence[Draft] | None = None,
        conversation: str | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`; `timeout_s` covers all attempts, and `drafts` stay empty.

        `conversation` is sent as the header X-Session-Id: a load balancer in front of several servers may send the
        requests of a conversation to the one that has its prefix in the cache, and servers count what it uses.
        """
        check_request(token_ids, sampling, max_model_len=self._spec.max_model_len, adapters=None)
        headers = {} if conversation is None else {"X-Session-Id": conversation}
        with self._listened():
            async with deadline(timeout_s, f"a request to {self._url}", grace_s=_GRACE_S, progress=self._progress):
                answer = await self._complete(self._request(token_ids, sampling, timeout_s), headers)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != sampling.num_samples:
            raise self._unusable(f"answered without {sampling.num_samples} choices:", answer)
        return [self._completion(choice) for choice in sorted(choices, key=lambda choice: choice.get("index", 0))]

    @contextmanager
    def _listened(self) -> Iterator[None]:
        """Count a request as in flight, and watch meanwhile whether the server gets further."""
        self._num_in_flight += 1
        if self._listening is None or self._listening.done():
            self._listening = asyncio.create_task(self._listen())
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._listening.cancel()

    async def _listen(self) -> None:
        """Give a sign of progress when the server's counters have values that they have not had before.

        Behind one address there may be several servers, each with values of its own: only new ones are a sign.
        """
        interval_s = self._spec.request_timeout_s / _LOOKS
        known: set[tuple[str, ...]] = set()
        while True:
            await asyncio.sleep(interval_s)
            looking = asyncio.timeout(self._spec.health_timeout_s)
            response = await self._client.send(self._address + "/metrics", within=looking)
            if isinstance(response, RequestFailure):
                continue
            found = tuple(_WRITTEN.findall(response.text))
            if known and found not in known:
                self._progress.advance()
            known.add(found)

    def _request(self, token_ids: np.ndarray, sampling: SamplingParams, timeout_s: float | None) -> dict[str, Any]:
        limit_s = self._spec.request_timeout_s
        # All of them, because vLLM's server takes what is left out from the model's generation_config.json.
        request = asdict(sampling)
        num_samples, seed = request.pop("num_samples"), request.pop("seed")
        request |= {
            "model": request.pop("adapter") or self._spec.model,
            "prompt": [int(token) for token in token_ids],
            "n": num_samples,
            "skip_special_tokens": False,  # in the text in which vLLM's server looks for `stop`
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "timeout_s": limit_s if timeout_s is None else min(timeout_s, limit_s),  # vLLM's server ignores it
        }
        if seed is not None:
            # vLLM's server adds the sample's index to `seed`, so neighbouring seeds would share samples.
            request["seed"] = sample_seeds(seed, 1)[0]
            request["request_seed"] = seed
        return request

    def _completion(self, choice: dict[str, Any]) -> Completion:
        token_ids = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        reason = choice.get("finish_reason")
        if token_ids is None or logprobs is None:
            message = f"{self._url} answered without token_ids or log-probs"
            raise EngineError(message, hint="the server must be vLLM 0.26 or newer: it has return_token_ids")
        if len(token_ids) != len(logprobs) or None in logprobs:
            raise self._unusable(f"answered {len(token_ids)} tokens with log-probs", logprobs)
        if reason not in tuple(FinishReason):
            raise EngineError(f"{self._url} ended a completion with the unknown finish_reason {reason!r}")
        parts = choice.get("policy_versions", [[0, len(token_ids)]])
        if sum(count for _, count in parts) != len(token_ids):
            raise self._unusable(f"answered {len(token_ids)} tokens with policy_versions", parts)
        spans = []
        end = 0
        for version, count in parts:
            start = end
            end += count
            spans.append(Span(SpanSource.POLICY, token_ids[start:end], logprobs[start:end], version))
        cached = choice.get("num_cached_tokens")  # vLLM's server does not tell it
        return Completion(tuple(spans), FinishReason(reason), cached if isinstance(cached, int) else None)

    async def _complete(self, request: dict[str, Any], headers: dict[str, str]) -> Any:
        limit_s = self._spec.request_timeout_s + _GRACE_S

        async def ask(_: int) -> Outcome:
            within = time_limit(limit_s, self._progress)
            return await self._client.send(self._address + _PATH, request, headers=headers, within=within)

        outcome, failures = await insist(ask, num_retries=self._num_retries)
        url = self._url + _PATH
        if isinstance(outcome, RequestFailure) and outcome.passing:
            message = f"{url} failed {len(failures)} times; last: {outcome.problem}"
            raise EngineError(message, hint="is the server up and healthy?")
        return self._answer(outcome, url)

    async def _control(self, call: str, body: Any = None, *, drains: bool = False, headers: Headers = None) -> Any:
        """Make a control call and return its answer; with `drains` it may have to wait for the requests in flight."""
        path = f"/engine/{call}"
        timeout_s = self._spec.control_timeout_s + (self._spec.request_timeout_s if drains else 0.0)
        async with deadline(timeout_s, f"`{call}`"):
            sent = {} if body is None else body
            outcome = await self._client.send(self._address + path, sent, headers=headers, within=nullcontext())
        if isinstance(outcome, RequestFailure) and outcome.status == 404:
            message = f"{self._url}{path} does not exist"
            raise EngineError(message, hint="only a server of `rlhf-rollout serve` has control calls")
        return self._answer(outcome, self._url + path)

    async def pause(self, mode: PauseMode) -> int:
        """See `RolloutEngine.pause`."""
        check_pause_mode(mode)
        answer = await self._control("pause", {"mode": mode}, drains=mode == "drain")
        self._progress.pause()
        if not isinstance(answer, dict) or not isinstance(num_found := answer.get("num_in_flight"), int):
            raise self._unusable("paused without the number of its requests:", answer)
        return num_found

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._progress.resume()
        await self._control("resume")

    async def health(self) -> EngineHealth:
        """Ask the server. Raises EngineError when it reports a problem or does not answer in time."""
        url = self._url + "/health"
        async with deadline(self._spec.health_timeout_s, f"a request to {url}"):
            outcome = await self._client.send(self._address + "/health", within=nullcontext())
        if isinstance(outcome, httpx.Response) and not outcome.content:  # vLLM's server says no more
            own = {"policy_version": 0, "num_in_flight": self._num_in_flight}
            return EngineHealth(**own, is_paused=False, is_asleep=False)
        state = self._answer(outcome, url)
        try:
            return EngineHealth(**{name: state[name] for name in EngineHealth.__slots__})
        except (KeyError, TypeError) as error:
            raise self._unusable("told of its health without the engine's state:", state) from error

    async def begin_weight_update(self, policy_version: int) -> None:
        """See `RolloutEngine.begin_weight_update`."""
        self._updating = policy_version
        await self._control("begin_weight_update", self._version(), drains=True)

    def _version(self, **more: Any) -> dict[str, Any]:
        if self._updating is None:
            raise WeightSyncError("no weight update has begun")
        return {"policy_version": self._updating, **more}

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """Send a bucket's bytes. Raises WeightSyncError for a bucket that lies in a GPU's memory."""
        if bucket.medium != "shared_memory":
            raise WeightSyncError(f"an HTTP engine sends buckets of shared_memory, not of {bucket.medium}")
        slots = [astuple(slot) for slot in bucket.tensors]
        head = json.dumps(self._version(tensors=slots, checksum=bucket.checksum)).encode() + b"\n"
        buffer = map_segment(bucket.handle)[: bucket.used_bytes]

        async def pieces() -> AsyncIterator[bytes]:
            yield head
            for start in range(0, len(buffer), _PIECE_BYTES):
                yield buffer[start : start + _PIECE_BYTES].tobytes()

        size = {"Content-Length": str(len(head) + len(buffer)), "Content-Type": "application/octet-stream"}
        await self._control("receive_weights", pieces(), headers=size)

    async def finish_weight_update(self) -> None:
        """See `RolloutEngine.finish_weight_update`."""
        await self._control("finish_weight_update", self._version())
        self._updating = None

    async def sleep(self, keep_weights: bool = True) -> None:
        """See `RolloutEngine.sleep`. A server keeps its weights in any case: others may use it, too."""
        await self._control("sleep")

    async def wake_up(self) -> None:
        """See `RolloutEngine.wake_up`."""
        await self._control("wake_up")

    async def close(self) -> None:
        """Close the connections; the server goes on."""
        self._is_closed = True
        await self._http.close()

    def _unusable(self, problem: str, answer: object) -> EngineError:
        return EngineError(f"{self._url} {problem} {self._http.shown(answer)}")

    def _answer(self, outcome: Outcome, url: str) -> Any:
        """Return the JSON of an answer. Raises the error of the engine behind the server, or EngineError."""
        if not isinstance(outcome, RequestFailure):
            try:
                return outcome.json()
            except (ValueError, RecursionError) as error:
                raise EngineError(f"{url} answered no JSON: {self._http.shown(outcome.text)}") from error
        if outcome.response is None:
            raise EngineError(f"{url} does not answer: {outcome.problem}", hint="is the server up?")
        try:
            said = outcome.response.json()
        except (ValueError, RecursionError):
            said = None
        if isinstance(said, dict) and {"kind", "detail"} <= said.keys():
            raise _ERRORS.get(said["kind"], EngineError)(str(said["detail"]))
        hint = f"set {ENGINE_TOKEN_VARIABLE} to the server's token" if outcome.status == 401 else None
        raise EngineError(f"{url} refused the request with {outcome.problem}", hint=hint)
