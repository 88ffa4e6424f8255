"""The process of one engine of `generation.py`, and where its steps and its GPU kernels spend their time."""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rlhf_rollout.engines.spec import VLLM_PATCHES, EngineSpec
from rlhf_rollout.protocols import SamplingParams

_SAMPLE_S = 0.002  # between two looks at the number of steps
_NUM_ANSWERS = 16  # that are told
_KERNEL_STEPS = 16  # steps whose GPU kernels are timed


class Watch:
    """Measures where the stepping thread of an engine spends its time."""

    def __init__(self, engine: Any, core: Any) -> None:
        self._loop = engine._loop
        self.seconds: Counter[str] = Counter()
        self.steps = 0
        inner = core.engine_core
        self._time(core, "get_output", "core")
        self._time(inner.scheduler, "schedule", "schedule")
        self._time(inner.scheduler, "update_from_output", "update")
        self._time(inner.model_executor, "execute_model", "launch")
        self._time(inner.model_executor, "sample_tokens", "sample")
        self._time(self._loop, "_take_outputs", "take_outputs")

    def _time(self, owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start
                self.steps += part == "core"

        setattr(owner, name, timed)

    def reset(self) -> None:
        """Begin a round."""
        self.seconds.clear()
        self.steps = 0

    def milliseconds_per_step(self) -> dict[str, float]:
        """Return the parts of a step; "wait" is the core's time outside the others: for the GPU, and for its output."""
        parts = dict(self.seconds)
        parts["wait"] = parts.pop("core", 0.0) - sum(parts.get(name, 0.0) for name in ("schedule", "launch", "sample"))
        parts["wait"] -= parts.get("update", 0.0)
        return {name: 1e3 * value / max(self.steps, 1) for name, value in sorted(parts.items())}

    def kernels(self, ended: threading.Event, num_steps: int) -> dict[str, Any]:
        """Return the time of the GPU kernels of some steps in the middle of a round of `num_steps`."""
        while not ended.is_set() and self.steps <= num_steps / 2:
            time.sleep(_SAMPLE_S)
        try:
            return self._kernels(ended)
        except Exception as error:
            return {"error": str(error)}

    def _kernels(self, ended: threading.Event, top: int = 15) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity, profile

        profiler = profile(activities=[ProfilerActivity.CUDA])
        # CUDA's current device belongs to the stepping thread.
        self._loop.call(lambda core: profiler.start(), drain=False).result()
        first = self.steps
        while not ended.is_set() and self.steps < first + _KERNEL_STEPS:
            time.sleep(_SAMPLE_S)
        last = self._loop.call(lambda core: (profiler.stop(), self.steps)[1], drain=False).result()
        each: Counter[str] = Counter()
        for event in profiler.key_averages():  # variants of a kernel have names that differ at their ends
            each[event.key[:100]] += 1e-3 * event.self_device_time_total / max(last - first, 1)
        shown = dict(each.most_common(top))
        return {"milliseconds_per_step": each.total(), "steps": last - first, "milliseconds": shown}


def engine_process(pipe: Connection, spec: EngineSpec, sampling: SamplingParams, settings: dict[str, Any]) -> None:
    """Build an engine and generate what the pipe asks for, until it is None."""
    os.environ.update({key: str(value) for key, value in settings.items() if key.isupper()})
    try:
        start = time.perf_counter()
        from rlhf_rollout.engines.model_files import read_config, resolve_model_dir
        from rlhf_rollout.engines.vllm import core
        from rlhf_rollout.engines.vllm import engine as module
        from rlhf_rollout.engines.vllm.memory import piece_sizes

        skipped = tuple(name for name in VLLM_PATCHES if not settings.pop(name, True))
        spec = replace(spec, skip_patches=skipped)
        sizes = piece_sizes(spec, read_config(resolve_model_dir(spec.model)))
        core.prepare_environment(has_pieces=bool(sizes))  # before vLLM is imported
        from rlhf_rollout.engines.vllm import names

        plain = names.EngineArgs
        others = {key: value for key, value in settings.items() if not key.isupper()}
        names.EngineArgs = lambda **given: plain(**(given | others))
        engine = module.VllmEngine(spec)
        watch = engine._loop.call(lambda core: Watch(engine, core), drain=False).result()
        pipe.send(("ready", time.perf_counter() - start))
        with asyncio.Runner() as runner:
            while (task := pipe.recv()) is not None:
                engine._loop.call(lambda core: core.reset_prefix_cache(), drain=True).result()
                watch.reset()
                pipe.send(("prepared", None))
                pipe.recv()
                pipe.send(("done", runner.run(_generate(engine, watch, sampling, **task))))
            runner.run(engine.close())
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


async def _generate(
    engine: Any,
    watch: Watch,
    sampling: SamplingParams,
    prompts: Sequence[np.ndarray],
    lengths: np.ndarray,
    *,
    profiled_steps: int,
) -> dict[str, Any]:
    ended = threading.Event()
    looking = None
    if profiled_steps:
        looking = asyncio.ensure_future(asyncio.to_thread(watch.kernels, ended, profiled_steps))
    calls = []
    for prompt, of_prompt in zip(prompts, lengths.tolist(), strict=True):
        if len(set(of_prompt)) == 1:
            calls.append(engine.generate(prompt, replace(sampling, max_tokens=of_prompt[0])))
        else:
            one = replace(sampling, num_samples=1)
            calls += [engine.generate(prompt, replace(one, max_tokens=length)) for length in of_prompt]
    groups = await asyncio.gather(*calls)
    ended.set()
    return {
        "drafts": np.sum([each.drafts for group in groups for each in group], 0).tolist(),
        "answers": [
            (prompt, group[0].token_ids, group[0].logprobs)
            for prompt, group in zip(prompts[:_NUM_ANSWERS], groups, strict=False)
        ],
        "tokens": sum(len(span.token_ids) for group in groups for each in group for span in each.spans),
        "steps": watch.steps,
        "milliseconds_per_step": watch.milliseconds_per_step(),
        "profile": {"kernels": await looking} if looking else None,
    }
