"""A client of a vLLM server (OpenAI's completions API): tokens in, tokens and log-probs out."""

import asyncio
import json
from typing import Any

import httpx
import numpy as np

from rlhf_data.errors import ConfigError, EngineError
from rlhf_data.records import FinishReason
from rlhf_data.safety import is_loopback, without_secrets
from rlhf_rollout import answers
from rlhf_rollout.engines.requests import check_request, deadline, sample_seeds
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import Completion, EngineHealth, PauseMode, SamplingParams, check_pause_mode

_RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
_MAX_RETRY_WAIT_S = 30.0
_MAX_TIMEOUTS = 2
_HEALTH_TIMEOUT_S = 10.0


class HttpEngine:
    """Generates on a vLLM server that runs elsewhere, with the server's fixed weights.

    The server must be started with `--logprobs-mode processed_logprobs`: log-probs are then those of the distribution
    sampled from. Without it they ignore the temperature, and the client cannot see that in an answer.

    Args:
        spec: `base_url`, such as "http://host:8000" or "http://host:8000/v1", and `model`, its name on the server.
            `max_model_len` is checked before a request goes out. `request_timeout_s` is the deadline of one attempt at
            a request, with all of its samples.
        num_retries: further attempts after a temporary error: no connection, a timeout, or status 408, 429 or 5xx. A
            second timeout ends the attempts.
        retry_wait_s: pause before the first retry; it doubles with each further one, to at most 30 s.
        policy_version: version of the server's weights.
        api_key: sent as a bearer token.
        transport: replaces the network, for tests.

    Raises:
        ConfigError: the api_key would go to another machine without encryption.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        num_retries: int = 3,
        retry_wait_s: float = 0.5,
        policy_version: int = 0,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        base_url = spec.base_url or ""
        parsed = httpx.URL(base_url)
        if api_key and parsed.scheme != "https" and not is_loopback(parsed.host):
            message = f"the api_key would go to {without_secrets(base_url)} without encryption"
            raise ConfigError(message, hint="give the server an https address")
        self._address = base_url.rstrip("/").removesuffix("/v1") + "/v1/completions"
        self._url = without_secrets(self._address)  # for messages
        self._spec = spec
        self._num_retries = num_retries
        self._retry_wait_s = retry_wait_s
        self._policy_version = policy_version
        self._num_in_flight = 0
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(spec.request_timeout_s, connect=min(spec.request_timeout_s, 10.0)),
            limits=httpx.Limits(max_connections=None),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            transport=transport,
        )

    async def generate(
        self, token_ids: np.ndarray, sampling: SamplingParams, *, timeout_s: float | None = None
    ) -> list[Completion]:
        """See `RolloutEngine.generate`; `timeout_s` covers all attempts."""
        check_request(token_ids, sampling, max_model_len=self._spec.max_model_len)
        self._num_in_flight += 1
        try:
            async with deadline(timeout_s, f"a request to {self._url}"):
                answer = await self._post(self._request(token_ids, sampling))
        finally:
            self._num_in_flight -= 1
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != sampling.num_samples:
            raise EngineError(f"{self._url} answered without {sampling.num_samples} choices: {_excerpt(answer)}")
        return [self._completion(choice) for choice in sorted(choices, key=lambda choice: choice.get("index", 0))]

    def _request(self, token_ids: np.ndarray, sampling: SamplingParams) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self._spec.model,
            "prompt": [int(token) for token in token_ids],
            "n": sampling.num_samples,
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        if sampling.seed is not None:
            # The server adds the sample's index to the seed, so neighbouring seeds would share samples.
            request["seed"] = sample_seeds(sampling.seed, 1)[0]
        return request

    def _completion(self, choice: dict[str, Any]) -> Completion:
        token_ids = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        reason = choice.get("finish_reason")
        if token_ids is None or logprobs is None:
            message = f"{self._url} answered without token_ids or log-probs"
            raise EngineError(message, hint="the server must be vLLM 0.26 or newer: it has return_token_ids")
        if len(token_ids) != len(logprobs) or None in logprobs:
            raise EngineError(f"{self._url} answered {len(token_ids)} tokens with log-probs {_excerpt(logprobs)}")
        if reason not in tuple(FinishReason):
            raise EngineError(f"{self._url} ended a completion with the unknown finish_reason {reason!r}")
        return Completion.single(token_ids, logprobs, FinishReason(reason), self._policy_version)

    async def _post(self, request: dict[str, Any]) -> dict[str, Any]:
        failure = ""
        num_timeouts = 0
        content = json.dumps(request).encode()
        for attempt in range(self._num_retries + 1):
            if attempt:
                await asyncio.sleep(min(self._retry_wait_s * 2 ** (attempt - 1), _MAX_RETRY_WAIT_S))
            try:
                # httpx's timeout limits each read, not the request
                async with asyncio.timeout(self._spec.request_timeout_s):
                    response = await answers.post(self._client, self._address, content=content, headers={})
            except TimeoutError:
                failure = f"no answer within {self._spec.request_timeout_s:g} s"
                num_timeouts += 1
                if num_timeouts == _MAX_TIMEOUTS:
                    break
                continue
            except httpx.HTTPError as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if response.status_code in _RETRIED_STATUS:
                failure = f"status {response.status_code}: {_excerpt(response.text)}"
                continue
            if response.is_error:
                raise EngineError(
                    f"{self._url} refused the request with status {response.status_code}: {_excerpt(response.text)}"
                )
            try:
                return response.json()
            except (ValueError, RecursionError) as error:
                raise EngineError(f"{self._url} answered no JSON: {_excerpt(response.text)}") from error
        message = f"{self._url} failed {attempt + 1} times; last: {failure}"
        raise EngineError(message, hint="is the server up and healthy?")

    async def pause(self, mode: PauseMode) -> None:
        """Raise EngineError: the server has no call that holds requests back."""
        check_pause_mode(mode, (), "an HTTP engine")

    async def resume(self) -> None:
        """Do nothing, because the engine is never paused."""

    async def health(self) -> EngineHealth:
        """Ask the server. Raises EngineError when it reports a problem or does not answer within 10 s."""
        url = self._url.removesuffix("/v1/completions") + "/health"
        address = self._address.removesuffix("/v1/completions") + "/health"
        async with deadline(_HEALTH_TIMEOUT_S, f"a request to {url}"):
            try:
                response = await self._client.get(address)
            except httpx.TransportError as error:
                message = f"{url} does not answer: {type(error).__name__}: {error}"
                raise EngineError(message, hint="is the server up?") from error
        if not response.is_success:
            raise EngineError(f"{url} answered with status {response.status_code}: {_excerpt(response.text)}")
        return EngineHealth(
            policy_version=self._policy_version, num_in_flight=self._num_in_flight, is_paused=False, is_asleep=False
        )

    async def begin_weight_update(self, *_: Any) -> None:
        """Raise EngineError: the server's weights cannot be changed."""
        raise EngineError("an HTTP engine takes no weights", hint="train with engine vllm, which receives them live")

    receive_weights = finish_weight_update = begin_weight_update

    async def sleep(self) -> None:
        """Raise EngineError: the server's memory cannot be freed."""
        raise EngineError("an HTTP engine cannot be put to sleep", hint="train with engine vllm")

    async def wake_up(self) -> None:
        """Do nothing, because the engine never sleeps."""

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _excerpt(value: Any) -> str:
    text = str(value).strip()
    return text if len(text) <= 300 else text[:300] + " ..."
