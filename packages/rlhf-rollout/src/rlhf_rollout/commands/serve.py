"""`serve`: an engine over HTTP. `rlhf_rollout.engines.http` is its client, with which a trainer elsewhere drives it.

| request | what it does |
|---|---|
| `POST /v1/completions` | generates; vLLM's form of OpenAI's call, with token ids as `prompt` and in the answer |
| `GET /v1/models` | the model and its adapters, in OpenAI's form |
| `POST /engine/pause`, `resume`, `sleep`, `wake_up` | the control calls of `RolloutEngine` |
| `POST /engine/begin_weight_update`, `receive_weights`, `finish_weight_update` | new weights |
| `GET /health`, `/version`, `/metrics` | the engine's state; what it serves; Prometheus metrics |
| `GET`, `DELETE /sessions/ID` | what requests with the header `X-Session-Id: ID` have used; DELETE ends them |

The body of `receive_weights` is one line of JSON, a `BucketHead`, and behind it the bytes of the bucket's buffer. An
error of the engine is answered by `{"kind": its class, "detail": its text}`.
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, Field, NonNegativeInt
from starlette.exceptions import HTTPException

from rlhf_data.errors import ConfigError, EngineError, RlhfError, WeightSyncError
from rlhf_data.pretrained import load_tokenizer
from rlhf_rollout.commands.configs import WITH_MODEL, EngineServerConfig
from rlhf_rollout.commands.parts import EngineJob, make_engine
from rlhf_rollout.commands.terminal import TERMINAL
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.engines.adapter_files import LoraModule, check_adapters, parse_lora_modules
from rlhf_rollout.engines.model_files import resolve_model_dir
from rlhf_rollout.engines.process import start_engine
from rlhf_rollout.http.server import application, listen, parse, read_body, read_json, token_for, while_connected
from rlhf_rollout.http.sessions import Sessions, cached_tokens
from rlhf_rollout.http.tokens import ENGINE_TOKEN_VARIABLE
from rlhf_rollout.protocols import Completion, Draft, RolloutEngine, SamplingParams
from rlhf_rollout.weights.bucket import TensorSlot, WeightBucket

MAX_HEAD_BYTES = 16 * 2**20
MAX_BUCKET_BYTES = 16 * 2**30  # the largest weight of a model must fit
BUCKET_TIMEOUT_S = 600.0  # for the body of a bucket
_LATENCIES_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

_numbers = itertools.count()  # a later segment may have the descriptor, and so the path, of an earlier one
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # the engine knows its vocabulary


class Generation(BaseModel, extra="forbid"):
    """The body of `/v1/completions`. A field that is not here is refused, because it would have no effect.

    Attributes:
        prompt, n, max_tokens ... stop: see `SamplingParams`; `n` is `num_samples`.
        seed: the request's seed.
        request_seed: comes before `seed`. `HttpEngine` sends both, because vLLM adds a sample's index to `seed`.
        timeout_s: for which the engine may write nothing.
        model: the model's name or that of an adapter. Without adapters any name is accepted; a server in front of
            another one hands it on.
        logprobs, return_token_ids, add_special_tokens, skip_special_tokens: what OpenAI's and vLLM's clients send.
    """

    prompt: list[TokenId]
    n: int = Field(1, ge=1, le=4096)
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: list[TokenId] = []
    stop: tuple[str, ...] = ()
    skip_special_tokens: Literal[False] = False
    seed: int | None = None
    request_seed: int | None = None
    timeout_s: float | None = Field(None, gt=0)
    model: str | None = None
    logprobs: Literal[0] | None = 0
    return_token_ids: Literal[True] = True
    add_special_tokens: Literal[False] = False

    def sampling(self, adapter: str | None = None) -> SamplingParams:
        """Return how the engine samples, by an adapter. Raises ConfigError for values that cannot work."""
        own: dict[str, Any] = {"num_samples": self.n, "adapter": adapter}
        own["seed"] = self.seed if self.request_seed is None else self.request_seed
        own["stop_token_ids"] = tuple(self.stop_token_ids)
        same = {field.name for field in fields(SamplingParams)} - own.keys()
        return SamplingParams(**own, **self.model_dump(include=same))


class Pause(BaseModel, extra="forbid"):
    """The body of `/engine/pause`."""

    mode: str


class Update(BaseModel, extra="forbid"):
    """The body of `/engine/begin_weight_update` and `/engine/finish_weight_update`."""

    policy_version: NonNegativeInt


class BucketHead(Update):
    """The first line of a bucket: the version that it belongs to, and `TensorSlot` and `checksum` of `WeightBucket`."""

    tensors: list[tuple[str, str, tuple[NonNegativeInt, ...], NonNegativeInt, NonNegativeInt]]
    checksum: int | None = None


def run(config: EngineServerConfig) -> int:
    """Serve until interrupted; return 0.

    Raises ConfigError for a model that cannot be used, and for an address that other machines reach without a token.
    """
    server = config.server
    token = token_for(server.host, ENGINE_TOKEN_VARIABLE)
    job = _job(config)
    with TERMINAL.progress.doing("starting the engine"):
        job.check_model()
        _check_adapters(job.spec, resolve_model_dir)
        tokenizer = None
        if job.kind in WITH_MODEL:
            try:
                tokenizer = load_tokenizer(job.tokenizer or job.spec.model)
            except ConfigError as error:  # a server gets and sends tokens: its model need not have a tokenizer
                reason = str(error).partition("\n")[0]
                TERMINAL.say(f"notice: no ids of the vocabulary are masked: {reason}")
        job.check_draft_model(tokenizer)
        spec = job.spec if tokenizer is None else job.masked_spec(tokenizer)
        engine = asyncio.run(start_engine(job.kind, spec))
    about = {"engine": job.kind, "model": spec.model, "max_model_len": spec.max_model_len}
    TERMINAL.say(f"POST to http://{server.host}:{server.port}/v1/completions")
    if spec.lora_modules:
        TERMINAL.say(f"models: {', '.join([spec.model, *(module.name for module in spec.lora_modules)])}")
    app = create_app(engine, about, token=token, modules=spec.lora_modules)
    listen(app, server.host, server.port, log=TERMINAL.err)
    return 0


def check_data(config: EngineServerConfig) -> None:
    """Raise ConfigError for adapters that the engine cannot apply. A model with a hub name is not downloaded for it."""
    _check_adapters(_job(config).spec, lambda name: path if (path := Path(name)).is_dir() else None)


def _job(config: EngineServerConfig) -> EngineJob:
    section = config.engine
    options = {"enable_sleep": section.vllm_enable_sleep, "lora_modules": parse_lora_modules(section.lora_modules)}
    return make_engine(config.model, section, section.max_model_len, **options)


def _check_adapters(spec: EngineSpec, find: Callable[[str], Path | None]) -> None:
    """Raise ConfigError for adapters that the engine cannot apply; tell of those that had a model of another name."""
    if not spec.lora_modules:
        return
    stored = check_adapters(spec.lora_modules, find(spec.model))
    for module, adapter in zip(spec.lora_modules, stored, strict=True):
        if adapter.base and Path(adapter.base).name != Path(spec.model).name:
            TERMINAL.say(f"notice: the adapter {module.name} was trained on {adapter.base}, and is not on {spec.model}")


class _Metrics:
    """What `/metrics` tells. Requests are counted when they end."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = {"namespace": "rlhf_rollout", "registry": self.registry}
        self.requests = Counter("requests", "requests by outcome: ok, failed or cancelled", ["outcome"], **own)
        self.prompt_tokens = Counter("prompt_tokens", "tokens of prompts, once per request", **own)
        self.cached_tokens = Counter("cached_prompt_tokens", "those of them that were in the engine's cache", **own)
        self.generated_tokens = Counter("generated_tokens", "tokens of completions", **own)
        self.unfinished_tokens = Gauge("unfinished_tokens", "tokens so far of requests that have not ended", **own)
        self.seconds = Histogram("request_seconds", "time to completion", buckets=_LATENCIES_S, **own)
        self.in_flight = Gauge("requests_in_flight", "requests that have not ended", **own)
        self.sessions = Gauge("sessions", "sessions of the last hour that were not ended", **own)
        self.weight_updates = Counter("weight_updates", "weight updates that were finished", **own)
        self.policy_version = Gauge("policy_version", "version of the weights in force", **own)
        self.is_up = Gauge("engine_up", "1 while the engine reports no problem", **own)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Count a request by how the context ends."""
        started = time.monotonic()
        outcome = "cancelled"
        try:
            with self.in_flight.track_inprogress():
                yield
            outcome = "ok"
        except HTTPException:  # the client has gone
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.requests.labels(outcome).inc()
            self.seconds.observe(time.monotonic() - started)


class EngineServer:
    """The calls of the server, in front of one engine. For the arguments see `create_app`."""

    def __init__(self, engine: RolloutEngine, about: dict[str, Any], modules: Sequence[LoraModule] = ()) -> None:
        self._engine = engine
        self._about = about
        self._modules = {module.name: module for module in modules}
        self._started = int(time.time())
        self._updating: int | None = None
        self._metrics = _Metrics()
        self._sessions = Sessions()
        self._metrics.sessions.set_function(lambda: len(self._sessions))
        self._drafts: dict[int, list[Draft]] = {}  # by request in flight
        self._metrics.unfinished_tokens.set_function(self._num_unfinished)

    async def complete(self, request: Request) -> JSONResponse:
        """Generate."""
        asked = await _json(request, Generation)
        names = [self._about.get("model"), *self._modules]
        if self._modules and asked.model is not None and asked.model not in names:
            message = f"The model `{asked.model}` does not exist; known: {', '.join(names)}"
            error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
            return JSONResponse({"error": error}, status_code=404)
        # An engine of `engines/http.py`: the server behind it knows its own models, and gets the session.
        hands_on = getattr(self._engine, "takes_conversation", False)
        sampling = asked.sampling(asked.model if hands_on or asked.model in self._modules else None)
        token_ids = np.array(asked.prompt, np.int32)
        name = request.headers.get("x-session-id")
        more = {"conversation": name} if hands_on else {}
        with self._metrics.measured():
            drafts = [Draft() for _ in range(sampling.num_samples)]
            self._drafts[id(drafts)] = drafts
            generating = self._engine.generate(token_ids, sampling, timeout_s=asked.timeout_s, drafts=drafts, **more)
            call = asyncio.ensure_future(generating)
            try:
                with self._sessions.calling(name, call, len(token_ids)):
                    completions = await while_connected(request, call)
            finally:
                del self._drafts[id(drafts)]
        self._metrics.prompt_tokens.inc(len(token_ids))
        self._metrics.cached_tokens.inc(cached_tokens(completions))
        self._metrics.generated_tokens.inc(sum(len(completion.token_ids) for completion in completions))
        return JSONResponse({"choices": [_choice(*numbered) for numbered in enumerate(completions)]})

    async def models(self) -> dict[str, Any]:
        """Tell the names that requests may give as `model`, in the form of OpenAI's and vLLM's servers."""
        base = self._about.get("model")
        own = {"object": "model", "created": self._started, "owned_by": "rlhf"}
        length = {"max_model_len": self._about.get("max_model_len")}
        data = [{"id": base, **own, "root": base, "parent": None, **length}]
        data += [
            {"id": module.name, **own, "root": module.path, "parent": base, **length}
            for module in self._modules.values()
        ]
        return {"object": "list", "data": data}

    def _num_unfinished(self) -> int:
        return sum(len(draft.token_ids) for drafts in list(self._drafts.values()) for draft in drafts)

    async def session(self, request: Request, name: str) -> dict[str, int]:
        """Tell what a session has used; DELETE also cancels its requests and forgets it."""
        counts = self._sessions.counts(name)
        if counts is None:
            raise HTTPException(404, "there is no such session: it was ended, was idle for an hour, or never began")
        if request.method == "DELETE":
            self._sessions.end(name)
        return counts

    async def control(self, request: Request, call: Literal["resume", "sleep", "wake_up"]) -> dict[str, Any]:
        """Make a control call without arguments."""
        await while_connected(request, getattr(self._engine, call)())
        return {}

    async def pause(self, request: Request) -> dict[str, Any]:
        """Pause the engine."""
        asked = await _json(request, Pause)
        return {"num_in_flight": await while_connected(request, self._engine.pause(asked.mode))}

    async def begin(self, request: Request) -> dict[str, Any]:
        """Begin a weight update; another one that has begun is given up."""
        asked = await _json(request, Update)
        await while_connected(request, self._engine.begin_weight_update(asked.policy_version))
        self._updating = asked.policy_version
        return {}

    async def receive(self, request: Request) -> dict[str, Any]:
        """Load a bucket."""
        with contextlib.closing(_Arrival()) as arrival:
            limits = {"limit_bytes": MAX_BUCKET_BYTES, "timeout_s": BUCKET_TIMEOUT_S}
            await read_body(request, arrival.take, advice="send smaller buckets", **limits)
            bucket = arrival.bucket(self._check_version)
            await while_connected(request, self._engine.receive_weights(bucket))
        return {}

    async def finish(self, request: Request) -> dict[str, Any]:
        """Finish a weight update."""
        self._check_version(await _json(request, Update))
        await while_connected(request, self._engine.finish_weight_update())
        self._updating = None
        self._metrics.weight_updates.inc()
        return {}

    def _check_version(self, update: Update) -> None:
        if self._updating is None:
            raise WeightSyncError("no weight update has begun")
        if update.policy_version != self._updating:
            message = f"weights of version {update.policy_version} arrived in the update to version {self._updating}"
            raise WeightSyncError(message, hint="one trainer at a time may update an engine")

    async def health(self) -> JSONResponse:
        """Tell the engine's state."""
        try:
            state = await self._engine.health()
        except EngineError as error:
            return _failure(error, 503)
        return JSONResponse({"status": "ok"} | asdict(state))

    async def version(self) -> dict[str, Any]:
        """Tell what is served."""
        return self._about | {"policy_version": (await self._engine.health()).policy_version}

    async def metrics(self) -> Response:
        """Tell the metrics, in the text format of Prometheus."""
        try:
            self._metrics.policy_version.set((await self._engine.health()).policy_version)
            self._metrics.is_up.set(1)
        except EngineError:
            self._metrics.is_up.set(0)
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)


def create_app(
    engine: RolloutEngine, about: dict[str, Any], *, token: str = "", modules: Sequence[LoraModule] = ()
) -> FastAPI:
    """Return the server's application. Another one may be mounted in it, behind the same check of the token.

    Args:
        engine: answers the requests; it is closed when the server ends.
        about: what `/version` tells besides the policy version.
        token: the bearer token that requests must carry; empty if they need none.
        modules: adapters of the engine, which requests name.
    """

    resources = contextlib.AsyncExitStack()
    resources.push_async_callback(engine.close)
    app = application("rlhf-rollout serve", resources, token=token, variable=ENGINE_TOKEN_VARIABLE)

    @app.exception_handler(RlhfError)
    async def fail(request: Request, error: RlhfError) -> JSONResponse:
        return _failure(error, 422 if isinstance(error, ConfigError) else 409)

    server = EngineServer(engine, about, modules)
    for path, answer in {
        "/v1/completions": server.complete,
        "/engine/pause": server.pause,
        "/engine/begin_weight_update": server.begin,
        "/engine/receive_weights": server.receive,
        "/engine/finish_weight_update": server.finish,
        "/engine/{call}": server.control,
    }.items():
        app.add_api_route(path, answer, methods=["POST"], response_model=None)
    for path, answer in {
        "/health": server.health,
        "/v1/models": server.models,
        "/version": server.version,
        "/metrics": server.metrics,
    }.items():
        app.add_api_route(path, answer, methods=["GET"], response_model=None)
    app.add_api_route("/sessions/{name:path}", server.session, methods=["GET", "DELETE"], response_model=None)
    return app


def _failure(error: Exception, status: int) -> JSONResponse:
    return JSONResponse({"kind": type(error).__name__, "detail": str(error)}, status_code=status)


async def _json(request: Request, kind: type[Any]) -> Any:
    return await read_json(request, kind, advice="send a shorter prompt")


class _Arrival:
    """A bucket on its way in: its first line is kept, and the buffer behind it is written to shared memory.

    Engines open the memory by its path in /proc. The kernel frees it when the last of them has unmapped it.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("rlhf-bucket"), "wb")
        self._head = bytearray()
        self._has_head = False

    def take(self, chunk: bytes) -> None:
        """Add the next bytes of the body. Raises HTTPException for a first line that does not end."""
        if not self._has_head:
            line, newline, chunk = chunk.partition(b"\n")
            self._head += line
            self._has_head = bool(newline)
            if len(self._head) > MAX_HEAD_BYTES:
                raise HTTPException(413, f"the first line of a bucket is longer than {MAX_HEAD_BYTES} bytes")
        self._file.write(chunk)

    def bucket(self, check: Callable[[Update], None]) -> WeightBucket:
        """Return the bucket, whose version `check` accepts. Raises HTTPException for bytes that are no bucket."""
        head = parse(BucketHead, self._head)
        check(head)
        self._file.flush()
        handle = (f"/proc/{os.getpid()}/fd/{self._file.fileno()}", next(_numbers))
        slots = tuple(TensorSlot(*slot) for slot in head.tensors)
        bucket = WeightBucket("shared_memory", slots, handle, head.checksum)
        if bucket.used_bytes != self._file.tell():
            message = f"a bucket of {bucket.used_bytes} bytes arrived with {self._file.tell()} bytes"
            raise WeightSyncError(message, hint="send the whole buffer, up to the end of its last weight")
        return bucket

    def close(self) -> None:
        """Give the memory back, unless an engine holds it."""
        self._file.close()


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    """Return a completion in vLLM's form; `policy_versions` are the version and the number of tokens of each span."""
    return {
        "index": index,
        "token_ids": completion.token_ids.tolist(),
        "logprobs": {"token_logprobs": completion.logprobs.tolist()},
        "finish_reason": completion.finish_reason,
        "num_cached_tokens": completion.num_cached_tokens,
        "policy_versions": [[span.policy_version, len(span.token_ids)] for span in completion.spans],
    }
