"""vLLM in this process: one engine core, stepped by a thread, with tokens in and tokens and log-probs out."""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlhf_data.errors import ConfigError, EngineError, RlhfError, WeightSyncError
from rlhf_data.images.reader import open_image_reader
from rlhf_data.own_code import is_trusted, trusted
from rlhf_data.stored_weights import check_tied_head
from rlhf_rollout.engines.adapter_files import check_adapters
from rlhf_rollout.engines.model_files import end_token_ids, read_config, resolve_model_dir
from rlhf_rollout.engines.requests import DROPPED, check_images, check_request, deadline
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.engines.stopping import decoder
from rlhf_rollout.engines.vllm.core import build_core, check_visible_gpus, prepare_environment, start_hint
from rlhf_rollout.engines.vllm.images import features
from rlhf_rollout.engines.vllm.internals import adapter_request, adapter_requests, check_vllm
from rlhf_rollout.engines.vllm.memory import piece_sizes
from rlhf_rollout.engines.vllm.own_classes import shortest_prompt
from rlhf_rollout.engines.vllm.speculation import check_own_layers, check_sampling, draft_model_dir
from rlhf_rollout.protocols import Completion, Draft, EngineHealth, PauseMode, SamplingParams, check_pause_mode
from rlhf_rollout.weights.bucket import WeightBucket
from rlhf_rollout.weights.senders import Senders, merged

_CPU_GATHER_S = 0.02  # see `StepLoop`; requests that are sent together arrive so far apart on a busy machine


class VllmEngine:
    """The generation engine. Concurrent `generate` calls share a batch; new weights arrive between engine steps."""

    def __init__(self, spec: EngineSpec) -> None:
        model_dir = resolve_model_dir(spec.model)
        check_tied_head(model_dir)  # commands look at folders, and not at what a hub name stands for
        config = read_config(model_dir, may_run=is_trusted(spec.model))
        ranks = [stored.rank for stored in check_adapters(spec.lora_modules, model_dir)]
        self._on_gpu = prepare_environment(has_pieces=bool(piece_sizes(spec, config)))
        if spec.weight_transfer == "ipc" and not self._on_gpu:
            raise ConfigError("weight_transfer ipc needs a GPU", hint="use weight_transfer shared_memory")
        if spec.draft_model:
            spec = replace(spec, draft_model=str(draft_model_dir(spec.draft_model, config)))
        if spec.speculative == "mtp":
            check_own_layers(model_dir)
        if spec.tensor_parallel_size > 1:
            check_visible_gpus(spec.tensor_parallel_size)
        if spec.seed is None:
            spec = replace(spec, seed=secrets.randbits(31))
        tokenizer_dir = resolve_model_dir(spec.tokenizer) if spec.tokenizer else model_dir
        self._spec = spec
        self._tokenizer_dir = trusted(str(tokenizer_dir), is_trusted(spec.tokenizer or spec.model))
        self._vocab_size = int(config["vocab_size"])
        self._shortest_prompt = shortest_prompt(config)
        self._reader = open_image_reader(model_dir) if spec.images else None
        self._updating: int | None = None
        self._incomplete: str | None = None
        self._asleep = False
        self._paused = False
        self._senders = Senders(spec.tensor_parallel_size if spec.weight_transfer == "ipc" else 1)
        try:
            # Imports vLLM.
            check_vllm(
                on_gpu=self._on_gpu,
                routes=spec.return_routes,
                images=spec.images,
                adapters=bool(spec.adapter_rank or ranks),
            )
            from rlhf_rollout.engines.vllm.loop import StepLoop

            self._loop = StepLoop(
                lambda: build_core(spec, model_dir, config, on_gpu=self._on_gpu, lora_rank=max(ranks, default=0)),
                end_token_ids=end_token_ids(model_dir, tokenizer_dir),
                seed=spec.seed,
                seed_every_row=not self._on_gpu,
                gather_s=0.0 if self._on_gpu else _CPU_GATHER_S,
                adapters=adapter_requests(spec),
                drafts=spec.has_drafts,
            )
        except RlhfError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM does not start with {spec.model}: {error}", hint=start_hint(error)) from error

    async def generate(
        self,
        token_ids: np.ndarray,
        sampling: SamplingParams,
        *,
        timeout_s: float | None = None,
        drafts: Sequence[Draft] | None = None,
        images: Sequence[str] = (),
    ) -> list[Completion]:
        """See `RolloutEngine.generate`. Raises EngineError also while the engine sleeps or lacks weights."""
        check_images(images, self._spec)
        limits = {"max_model_len": self._spec.max_model_len, "vocab_size": self._vocab_size}
        check_request(token_ids, sampling, adapters=[module.name for module in self._spec.lora_modules], **limits)
        if self._spec.has_drafts:
            check_sampling(sampling)
        if len(token_ids) < self._shortest_prompt:
            message = "vLLM answers a prompt of one token with what layers of linear attention kept of another request"
            raise EngineError(message, hint="use prompts of two tokens or more, such as those of a chat template")
        timeout_s = self._spec.request_timeout_s if timeout_s is None else timeout_s
        decode = await asyncio.to_thread(decoder, self._tokenizer_dir) if sampling.stop else None
        found = None
        if images:
            found = await asyncio.to_thread(features, self._reader, token_ids, images)
        job = self._loop.submit(np.asarray(token_ids).tolist(), sampling, decode, drafts, found)
        try:
            async with deadline(timeout_s, "a generation request", progress=self._loop.progress):
                return await asyncio.wrap_future(job.future)
        except (asyncio.CancelledError, EngineError):
            self._loop.abort(job)
            raise

    async def pause(self, mode: PauseMode) -> int:
        """See `RolloutEngine.pause`.

        After "keep" and a weight update the sequences in flight are prefilled again, unless `keep_kv` is set.
        """
        check_pause_mode(mode)
        counted = self._loop.call(lambda core: self._loop.num_running, drain=False)
        await self._call("pause", lambda core: self._pause(core, mode), drain=mode == "drain")
        self._loop.progress.pause()
        return counted.result()

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._loop.progress.resume()
        await self._call("resume", self._resume)

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`. The stepping thread answers, so a hanging step shows as a missing answer."""
        return await self._call("health", lambda core: self._health(), timeout_s=self._spec.health_timeout_s)

    async def begin_weight_update(self, policy_version: int) -> None:
        """See `RolloutEngine.begin_weight_update`. Raises WeightSyncError while the engine sleeps."""

        async def begin(versions: list[int]) -> None:
            await self._call("begin_weight_update", lambda core: self._begin(core, versions[0]), drain=True)

        await self._senders.join(policy_version, begin)

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """Load one bucket; the sender may reuse its buffer once this returns.

        Raises WeightSyncError when no update has begun or the bucket does not fit the model, and EngineError when it
        did not arrive or a worker is gone. This ends the update; requests are refused until one is complete.
        """

        async def receive(buckets: list[WeightBucket]) -> None:
            await self._call("receive_weights", lambda core: self._receive(core, merged(buckets)))

        await self._senders.join(bucket, receive)

    async def finish_weight_update(self) -> None:
        """See `RolloutEngine.finish_weight_update`.

        Raises WeightSyncError when weights are missing; the engine then refuses requests until an update is complete.
        """
        await self._senders.join(None, lambda parts: self._call("finish_weight_update", self._finish))

    async def sleep(self, keep_weights: bool = True) -> None:
        """Move the weights to host memory, or drop them, and drop the KV cache.

        On a CPU the engine only stops and drops cached prefixes. Raises EngineError when it was built without
        `enable_sleep`, or requests are in flight.
        """
        if not self._spec.enable_sleep:
            raise EngineError("this engine cannot sleep", hint="build it with EngineSpec(enable_sleep=True)")
        await self._call("sleep", lambda core: self._fall_asleep(core, keep_weights))

    async def wake_up(self) -> None:
        """See `RolloutEngine.wake_up`."""
        await self._call("wake_up", self._wake_up)

    async def close(self) -> None:
        """End the stepping thread and free the model. Requests in flight fail."""
        await asyncio.to_thread(self._loop.close)

    async def _call(
        self, name: str, function: Callable[[Any], Any], *, drain: bool = False, timeout_s: float | None = None
    ) -> Any:
        """Run `function(core)` on the stepping thread, with `drain` once the requests in flight have finished.

        Raises EngineError when it took longer than `timeout_s`, by default the deadline of a control call. The function
        still runs when the thread comes to it, except with `drain`: it would hold requests back for a caller that is
        gone.
        """
        is_given_up = False

        def run(core: Any) -> Any:
            return None if is_given_up and drain else function(core)

        if timeout_s is None:
            timeout_s = self._spec.control_timeout_s + (self._spec.request_timeout_s if drain else 0.0)
        async with deadline(timeout_s, f"`{name}`", progress=self._loop.progress if drain else None):
            try:
                return await asyncio.wrap_future(self._loop.call(run, drain=drain))
            except asyncio.CancelledError:  # also of a deadline that passes
                is_given_up = True
                raise

    # -- on the stepping thread, which alone changes the engine's state ------------------------------------------------

    def _pause(self, core: Any, mode: PauseMode) -> None:
        self._paused = True
        self._loop.holding = True
        if mode == "keep":
            self._loop.freeze(core)
        elif mode == "restart":
            self._loop.restart(core)

    def _resume(self, core: Any) -> None:
        self._paused = False
        if self._updating is None:  # otherwise the end of the update lets requests go on
            self._loop.unfreeze(core)

    def _health(self) -> EngineHealth:
        return EngineHealth(
            policy_version=self._loop.policy_version,
            num_in_flight=self._loop.num_in_flight,
            is_paused=self._loop.holding,
            is_asleep=self._asleep,
        )

    def _begin(self, core: Any, policy_version: int) -> None:
        if self._spec.lora_modules:
            message = "an engine with ``lora_modules`` keeps the weights that its adapters were trained on"
            raise WeightSyncError(message, hint="send weights to an engine without them")
        if self._asleep:
            raise WeightSyncError("the engine sleeps", hint="await wake_up() before a weight update")
        self._loop.holding = True
        was_updating = self._updating is not None
        self._updating = policy_version
        try:
            if was_updating:
                # The sender of an earlier update is gone: close the layers that it left open, then open them again.
                self._incomplete = "an update was begun and never finished"
                core.collective_rpc("finish_weight_update")
            core.collective_rpc("start_weight_update")
        except Exception as error:
            self._end_update(core, f"an update could not begin: {error}")
            raise EngineError(f"vLLM could not begin a weight update: {error}") from error
        self._loop.refusal = None  # from here on requests wait for the update instead of being refused

    def _receive(self, core: Any, bucket: WeightBucket) -> None:
        self._check_updating()
        try:
            errors = core.collective_rpc("rlhf_receive_weights", kwargs={"bucket": bucket})
        except Exception as error:  # what happens to a worker that lives is in its answer
            self._end_update(core, f"the last update failed: {error}")
            raise EngineError(f"vLLM could not load a bucket of weights: {error}") from error
        # Weights that do not fit end the run, so they matter more than a worker that failed.
        errors = sorted(itertools.chain(*errors), key=lambda error: not isinstance(error, WeightSyncError))
        if errors:
            try:
                core.collective_rpc("rlhf_abandon_weight_update")
            finally:
                self._end_update(core, str(errors[0]).partition("\n")[0])
            raise errors[0]

    def _finish(self, core: Any) -> None:
        version = self._check_updating()
        try:
            core.collective_rpc("finish_weight_update")
            if self._spec.adapter_rank and not any(core.collective_rpc("rlhf_missing_weights")):
                core.add_lora(adapter_request(is_new=True))
            missing = sorted({name for names in core.collective_rpc("rlhf_missing_weights") for name in names})
            kept = sorted({name for names in core.collective_rpc("rlhf_kept_layers") for name in names})
        except WeightSyncError as error:
            self._end_update(core, str(error).partition("\n")[0])
            raise
        except Exception as error:
            self._end_update(core, f"the last update failed: {error}")
            raise EngineError(f"vLLM could not put the new weights in force: {error}") from error
        if missing:
            self._end_update(core, f"{len(missing)} did not arrive in the last update ({_some(missing)})")
            raise WeightSyncError(f"weights missing: {self._incomplete}", hint="send every weight in each update")
        if kept:
            self._end_update(
                core, f"vLLM kept the old weights of {len(kept)} layers ({_some(kept)}), though all arrived"
            )
            hint = "vLLM's class of this model loads them in a way that updates do not follow: use a model of another"
            raise WeightSyncError(str(self._incomplete), hint=f"{hint} family, such as those in docs/models.md")
        self._loop.advance(version)
        self._end_update(core, None)
        if self._incomplete:
            raise EngineError(f"vLLM could not put the new weights in force: {self._incomplete}")

    def _end_update(self, core: Any, incomplete: str | None) -> None:
        """End a weight update and let requests go on; they are refused if `incomplete` tells what is wrong."""
        self._updating = None
        try:
            if self._spec.images:
                core.reset_encoder_cache()  # what the old weights have read of images
            caches = self._spec.enable_prefix_caching
            # Frozen sequences are prefilled again when they go on.
            forgotten = self._spec.keep_kv or core.reset_prefix_cache(self._loop.num_running > 0) or not caches
        except Exception:
            forgotten = False
        if not forgotten:
            incomplete = incomplete or "vLLM kept prefixes that the old weights computed"
        self._incomplete = incomplete
        if not self._paused:
            self._loop.unfreeze(core)
        self._admit(core)

    def _fall_asleep(self, core: Any, keep_weights: bool) -> None:
        if self._asleep:
            return
        if self._loop.num_in_flight:
            raise EngineError(f"the engine cannot sleep with {self._loop.num_in_flight} sequences in flight")
        if self._updating is not None:  # whose end would let requests into a sleeping core
            raise EngineError("the engine cannot sleep during a weight update", hint="finish the update first")
        self._loop.settle(core)
        core.reset_prefix_cache()
        self._asleep = True
        self._loop.refuse(core, "the engine sleeps", "await wake_up() before generate()")
        # No update brings the weights under an adapter.
        keep_weights = keep_weights or bool(self._spec.adapter_rank or self._spec.lora_modules)
        if not keep_weights:
            self._incomplete = DROPPED
        level = 0
        if self._on_gpu:  # vLLM's level 1 moves what the model holds to host memory, 2 keeps its buffers alone
            drafts = self._spec.draft_model or self._spec.speculative == "mtp"  # with weights that no update brings
            has_others = drafts or any(core.collective_rpc("rlhf_holds_more_than_weights"))
            level = 1 if keep_weights or has_others else 2
        core.sleep(level)

    def _wake_up(self, core: Any) -> None:
        if not self._asleep:
            return
        core.wake_up(None if self._on_gpu else ["scheduling"])
        self._asleep = False
        self._admit(core)

    def _admit(self, core: Any) -> None:
        """Take requests again, unless weights are incomplete."""
        self._loop.refusal = None
        if self._incomplete:
            message = f"the engine's weights are incomplete: {self._incomplete}"
            self._loop.refuse(core, message, "send a complete weight update")

    def _check_updating(self) -> int:
        if self._updating is None:
            raise WeightSyncError("no weight update has begun")
        return self._updating


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
