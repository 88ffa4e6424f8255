"""An engine without a model, for tests and fault injection: what it writes is scripted."""

import asyncio
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from rlhf_data.errors import EngineError, WeightSyncError
from rlhf_data.records import FinishReason
from rlhf_rollout.engines.gate import GatedEngine
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.weight_sync.bucket import WeightBucket, verify_checksum
from rlhf_rollout.weight_sync.shared_memory import map_segment

Script = Callable[[Sequence[int], int], Sequence[int]]

VOCAB_SIZE = 256


def pseudo_random_script(prompt: Sequence[int], sample_seed: int) -> list[int]:
    """Return 1 to 32 tokens in [1, 256), always the same for the same prompt and seed, with the stop token 0 behind."""
    rng = np.random.default_rng([sample_seed, *prompt])
    return [*rng.integers(1, VOCAB_SIZE, size=int(rng.integers(1, 33))).tolist(), 0]


class FakeEngine(GatedEngine):
    """Answers from a script. Token 0 ends a completion; every log-prob is log(1/256), that of a uniform choice.

    Args:
        script: the tokens that follow a prompt, for each sample; the second argument differs between samples, and
            between requests unless they carry a seed; it is 0 when greedy.
        max_model_len: prompt and completion together, in tokens.
        enable_sleep: allow `sleep`.
        latency_s: of each request.
        fail_after: so many requests succeed; those after it raise EngineError.
    """

    def __init__(
        self,
        script: Script = pseudo_random_script,
        *,
        max_model_len: int = 2048,
        enable_sleep: bool = False,
        latency_s: float = 0.0,
        fail_after: int | None = None,
    ) -> None:
        super().__init__(max_model_len=max_model_len, vocab_size=VOCAB_SIZE, enable_sleep=enable_sleep)
        self._script = script
        self._latency_s = latency_s
        self._fail_after = fail_after
        self._num_requests = 0
        self._arriving: dict[str, int] = {}
        self.num_updates = 0
        self.weight_checksums: dict[str, int] = {}

    async def _complete(self, token_ids: np.ndarray, sampling: SamplingParams) -> list[Completion]:
        number, self._num_requests = self._num_requests, self._num_requests + 1
        await asyncio.sleep(self._latency_s)
        if self._fail_after is not None and number >= self._fail_after:
            raise EngineError(f"the fake engine was told to fail after {self._fail_after} requests")
        prompt = [int(token) for token in token_ids]
        base = 0 if sampling.temperature == 0 else (number if sampling.seed is None else sampling.seed) * 1009
        return [self._write(prompt, base + index, sampling) for index in range(sampling.num_samples)]

    def _write(self, prompt: list[int], sample_seed: int, sampling: SamplingParams) -> Completion:
        ends = {0, *sampling.stop_token_ids}
        tokens: list[int] = []
        reason = FinishReason.LENGTH
        for token in self._script(prompt, sample_seed):
            if token in ends and len(tokens) + 1 <= sampling.min_tokens:
                token = VOCAB_SIZE - 1
            tokens.append(int(token))
            if token in ends:
                reason = FinishReason.STOP
            if token in ends or len(tokens) == sampling.max_tokens:
                break
        while reason is FinishReason.LENGTH and len(tokens) < sampling.max_tokens:
            tokens.append(VOCAB_SIZE - 1)
        return Completion(tokens, np.full(len(tokens), -np.log(VOCAB_SIZE)), reason, self.policy_version)

    async def begin_weight_update(self, policy_version: int) -> None:
        """See `RolloutEngine.begin_weight_update`."""
        await super().begin_weight_update(policy_version)
        self._arriving = {}

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """Remember the CRC-32 of each weight; only shared memory can be read without a GPU."""
        self._check_updating()
        if bucket.medium != "shared_memory":
            raise WeightSyncError(f"the fake engine reads shared_memory buckets, not {bucket.medium}")
        buffer = map_segment(bucket.handle)
        verify_checksum(buffer, bucket)
        for spec in bucket.tensors:
            self._arriving[spec.name] = zlib.crc32(buffer[spec.offset_bytes : spec.offset_bytes + spec.size_bytes])

    async def finish_weight_update(self) -> None:
        """Count the update and take its version over."""
        self._check_updating()
        self.weight_checksums = self._arriving
        self.num_updates += 1
        self._end_update()
