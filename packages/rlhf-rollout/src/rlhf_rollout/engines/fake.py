"""An engine without a model, for tests and fault injection: a script decides what it writes."""

import asyncio
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_data.records import FinishReason
from rlhf_rollout.engines.gate import Gate, GatedEngine
from rlhf_rollout.engines.requests import rest_of
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.engines.stopping import StopWatch, decoder
from rlhf_rollout.protocols import PAUSE_MODES, Completion, Draft, PauseMode, SamplingParams
from rlhf_rollout.weights.bucket import WeightBucket, read_in_two_tries, verify_checksum
from rlhf_rollout.weights.shared_memory import map_segment

Script = Callable[[Sequence[int], int], Sequence[int]]
Pace = Callable[[Sequence[int], int], float]

VOCAB_SIZE = 256
_SPEC = EngineSpec(model="fake")


def pseudo_random_script(prompt: Sequence[int], sample_seed: int) -> list[int]:
    """Return 1 to 32 tokens in [1, 256) and the stop token 0, always the same for the same prompt and seed."""
    rng = np.random.default_rng([sample_seed, *prompt])
    return [*rng.integers(1, VOCAB_SIZE, size=int(rng.integers(1, 33))).tolist(), 0]


class FakeEngine(GatedEngine):
    """Answers from a script. Token 0 ends a completion; every log-prob is log(1/256), that of a uniform choice.

    Args:
        spec: the engine's settings. The model is not read.
        script: returns the tokens that follow a prompt, or a prompt and what another engine wrote of the sample. Its
            second argument, the seed of a sample, differs between samples, and between requests without a seed; it is
            0 for greedy requests.
        latency_s: pause before the first token of each request.
        token_latency_s: pause before each token; the samples of a request are written concurrently. A function returns
            it for a prompt and the seed of a sample, as `script` gets them.
        fail_after: number of requests that succeed; later ones raise EngineError. None lets all succeed.
    """

    pause_modes = PAUSE_MODES

    def __init__(
        self,
        spec: EngineSpec = _SPEC,
        *,
        script: Script = pseudo_random_script,
        latency_s: float = 0.0,
        token_latency_s: float | Pace = 0.0,
        fail_after: int | None = None,
    ) -> None:
        # Prompts hold bytes, or any ids of the tokenizer that the settings name.
        super().__init__(spec, vocab_size=VOCAB_SIZE if spec.tokenizer is None else None)
        self._script = script
        self._latency_s = latency_s
        self._token_latency_s = token_latency_s
        self._fail_after = fail_after
        self._num_requests = 0
        self._writing = Gate()  # closed while requests in flight are frozen
        self._arriving: dict[str, int] = {}
        self.num_updates = 0
        self.weight_checksums: dict[str, int] = {}

    async def pause(self, mode: PauseMode) -> int:
        """See `RolloutEngine.pause`."""
        if mode in ("keep", "restart"):  # another one is refused below, and must not freeze anything
            self._writing.close()
        return await super().pause(mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await super().resume()
        self._go_on()

    def _go_on(self) -> None:
        if not self._gate.is_closed:
            self._writing.open()

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        await super().close()
        self._writing.open()

    async def _complete(
        self, token_ids: np.ndarray, sampling: SamplingParams, drafts: Sequence[Draft]
    ) -> list[Completion]:
        number = self._num_requests
        self._num_requests += 1
        await asyncio.sleep(self._latency_s)
        if self._fail_after is not None and number >= self._fail_after:
            raise EngineError(f"the fake engine was told to fail after {self._fail_after} requests")
        prompt = token_ids.tolist()
        base = 0
        if sampling.temperature > 0:
            # Wide apart, so that the samples of two requests have different seeds.
            base = (number if sampling.seed is None else sampling.seed) * 1009
        unfinished = [(index, draft) for index, draft in enumerate(drafts) if draft.finish_reason is None]
        await asyncio.gather(*[self._write(prompt, base + index, sampling, draft) for index, draft in unfinished])
        return [draft.completion(len(prompt)) for draft in drafts]

    async def _write(self, prompt: list[int], sample_seed: int, sampling: SamplingParams, draft: Draft) -> None:
        """Finish a draft whose tokens carry the policy version that was in force when each was written."""
        rest = rest_of(sampling, len(draft.token_ids), sample_seed)
        latency_s = self._token_latency_s
        if callable(latency_s):
            latency_s = latency_s(prompt, sample_seed)
        has_stopped = False
        for token, is_last in self._tokens(self._script([*prompt, *draft.token_ids], rest.seed), rest, draft):
            if latency_s:
                await asyncio.sleep(latency_s)
            await self._writing.opened()
            self._check_usable()
            draft.go_on(self.policy_version)
            draft.token_ids.append(token)
            draft.logprobs.append(-np.log(VOCAB_SIZE))
            self._progress.advance()
            has_stopped = is_last
        draft.finish_reason = FinishReason.STOP if has_stopped else FinishReason.LENGTH

    def _tokens(self, script: Sequence[int], sampling: SamplingParams, draft: Draft) -> Iterator[tuple[int, bool]]:
        """Yield the script's tokens up to `max_tokens`, and whether each ends the completion; 255 fills a short one up.

        Token 255 also replaces end tokens among the first `min_tokens`. `sampling` is that of the rest of the draft.
        """
        ends = {0, *sampling.stop_token_ids}
        filler = VOCAB_SIZE - 1
        watch = None
        if sampling.stop:
            has_model = self._spec.model != _SPEC.model
            decode = decoder(self._spec.tokenizer or (self._spec.model if has_model else None))
            watch = StopWatch(sampling, decode, draft.token_ids)
        padded = itertools.chain(script, itertools.repeat(filler))
        for number, token in enumerate(itertools.islice(padded, sampling.max_tokens), 1):
            if token in ends and number <= sampling.min_tokens:
                token = filler
            is_last = token in ends or (watch is not None and watch.completes(int(token)))
            yield int(token), is_last
            if is_last:
                return

    async def begin_weight_update(self, policy_version: int) -> None:
        """See `RolloutEngine.begin_weight_update`."""
        await super().begin_weight_update(policy_version)
        self._arriving = {}

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """Remember the CRC-32 of each weight; only shared memory can be read without a GPU."""
        self._check_updating()
        if bucket.medium != "shared_memory":
            raise WeightSyncError(f"the fake engine reads shared_memory buckets, not {bucket.medium}")

        def read() -> np.ndarray:
            buffer = map_segment(bucket.handle)
            verify_checksum(buffer, bucket)
            return buffer

        buffer = read_in_two_tries(read)
        for slot in bucket.tensors:
            self._arriving[slot.name] = zlib.crc32(buffer[slot.place])

    async def finish_weight_update(self) -> None:
        """Count the update and put its version in force."""
        self._check_updating()
        self.weight_checksums = self._arriving
        self.num_updates += 1
        self._end_update()
        self._go_on()
