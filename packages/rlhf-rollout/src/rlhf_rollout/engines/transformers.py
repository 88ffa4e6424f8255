"""The reference engine: plain transformers, one request at a time, for parity tests and machines without vLLM."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlhf_data.errors import ConfigError, EngineError, RlhfError, WeightSyncError, installs
from rlhf_data.images.reader import open_image_reader
from rlhf_data.own_code import is_trusted, trusted
from rlhf_data.pretrained import clear_errors
from rlhf_data.records import FinishReason
from rlhf_rollout.engines.gate import GatedEngine
from rlhf_rollout.engines.model_files import end_token_ids, resolve_model_dir
from rlhf_rollout.engines.requests import rest_of, sample_seeds
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.engines.stopping import StopWatch, decoder
from rlhf_rollout.protocols import Completion, Draft, SamplingParams
from rlhf_rollout.weights.bucket import WeightBucket, check_tensor
from rlhf_rollout.weights.reader import BucketReader


class TransformersEngine(GatedEngine):
    """Samples token by token from the model's logits. Requests run one after another."""

    def __init__(self, spec: EngineSpec) -> None:
        try:
            from rlhf_models.attention.frequencies import pin_frequencies
            from rlhf_models.images import language_model_class
            from rlhf_models.loading import load_config
        except ImportError as error:
            raise EngineError("transformers is not installed", hint=installs("rlhf-rollout[models]")) from error
        if spec.weight_transfer == "ipc" and not torch.cuda.is_available():
            raise ConfigError("weight_transfer ipc needs a GPU", hint="use weight_transfer shared_memory")
        if spec.tensor_parallel_size > 1:
            gpus = spec.tensor_parallel_size
            raise ConfigError(f"tensor_parallel_size is {gpus}; engine transformers runs on one device")
        model_dir = resolve_model_dir(spec.model)
        tokenizer_dir = resolve_model_dir(spec.tokenizer) if spec.tokenizer else model_dir
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        with clear_errors("model", spec.model):
            self._model: Any = language_model_class(load_config(spec.model)).from_pretrained(
                model_dir, dtype=getattr(torch, spec.dtype), trust_remote_code=is_trusted(spec.model)
            )
        pin_frequencies(self._model, spec.max_model_len)
        self._model.to(self._device).eval().requires_grad_(False)
        self._tokenizer_dir = trusted(str(tokenizer_dir), is_trusted(spec.tokenizer or spec.model))
        self._end_token_ids = end_token_ids(model_dir, tokenizer_dir)
        self._seeds = np.random.default_rng(spec.seed)
        self._reader = BucketReader(spec.weight_transfer, self._device)
        self._shapes = {name: tuple(weight.shape) for name, weight in self._weights().items()}
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._images = open_image_reader(model_dir) if spec.images else None
        super().__init__(spec, vocab_size=self._model.config.get_text_config().vocab_size)

    async def _complete(
        self, token_ids: np.ndarray, sampling: SamplingParams, drafts: Sequence[Draft], images: Sequence[str] = ()
    ) -> list[Completion]:
        return await asyncio.to_thread(self._generate, token_ids, sampling, drafts, images)

    @torch.inference_mode()
    def _generate(
        self, token_ids: np.ndarray, sampling: SamplingParams, drafts: Sequence[Draft], images: Sequence[str]
    ) -> list[Completion]:
        arrays = {}
        if images:
            assert self._images is not None  # `check_images` has passed
            arrays = self._images.arrays(images)
        with self._lock:
            seed = sampling.seed if sampling.seed is not None else int(self._seeds.integers(1 << 62))
            seeds = sample_seeds(seed, sampling.num_samples)
            if not images and not any(draft.token_ids for draft in drafts):
                self._write(token_ids, sampling, seeds, drafts)
            for draft, seed in zip(drafts, seeds, strict=True):
                if draft.finish_reason is None:  # each has its own prompt from here on, or its images
                    rest = rest_of(sampling, len(draft.token_ids), seed)
                    self._write(np.append(token_ids, draft.token_ids), rest, [rest.seed], [draft], arrays)
            return [draft.completion(len(token_ids)) for draft in drafts]

    def _write(
        self,
        token_ids: np.ndarray,
        sampling: SamplingParams,
        seeds: list[int],
        drafts: Sequence[Draft],
        arrays: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write drafts that begin after the same tokens [P], each with its seed; one if it has `arrays` of images."""
        generators = [torch.Generator(self._device).manual_seed(seed) for seed in seeds]
        ends = torch.tensor([*self._end_token_ids, *sampling.stop_token_ids], device=self._device, dtype=torch.long)
        # The first pass reads the prompt; each later one reads the tokens just drawn, and the cache.
        step_ids = torch.as_tensor(np.asarray(token_ids), dtype=torch.long, device=self._device)
        step_ids = step_ids.expand(len(drafts), -1)
        seen_ids = step_ids
        cache: Any = None
        more = self._first_arguments(token_ids, arrays)
        watches: list[StopWatch | None] = [None] * len(drafts)
        if sampling.stop:
            watches = [StopWatch(sampling, decoder(self._tokenizer_dir), draft.token_ids) for draft in drafts]
        for draft in drafts:
            draft.go_on(self.policy_version)
        for number in range(sampling.max_tokens):
            output = self._model(input_ids=step_ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **more)
            cache = getattr(
                output, "past_key_values", None
            )  # Mamba's has another name: each pass reads all tokens then
            if arrays:  # an image takes fewer positions than it has tokens
                last = more["position_ids"]
                more = {"position_ids": (last.amax() + 1).expand_as(last[..., -1:])}
            elif cache is not None:  # one whose first layer is no attention does not know how many tokens it has
                more = {"position_ids": seen_ids.new_full((len(seen_ids), 1), seen_ids.shape[1])}
            logits = output.logits[:, -1].float()
            for ids in self._spec.masked_ids:
                logits[:, ids.start : ids.stop] = -torch.inf
            if number < sampling.min_tokens:
                logits[:, ends] = -torch.inf
            chosen, chosen_logprobs = _sample(logits, seen_ids, sampling, generators)
            seen_ids = torch.cat([seen_ids, chosen[:, None]], 1)
            self._progress.advance()
            drawn = [column.tolist() for column in (chosen, chosen_logprobs, torch.isin(chosen, ends))]
            for draft, watch, token, logprob, is_end in zip(drafts, watches, *drawn, strict=True):
                if draft.finish_reason is None:  # the others are computed further, without effect
                    draft.token_ids.append(token)
                    draft.logprobs.append(logprob)
                    has_stopped = watch is not None and watch.completes(token)
                    draft.finish_reason = FinishReason.STOP if is_end or has_stopped else None
            if all(draft.finish_reason for draft in drafts):
                return
            step_ids = seen_ids if cache is None else chosen[:, None]
        for draft in drafts:
            draft.finish_reason = draft.finish_reason or FinishReason.LENGTH

    def _first_arguments(self, token_ids: np.ndarray, arrays: Mapping[str, np.ndarray] | None) -> dict[str, Any]:
        """Return the arguments of the pass that reads a prompt with images, beside its tokens; none without images."""
        if not arrays:
            return {}
        from rlhf_models.batch import TokenBatch
        from rlhf_models.images import image_arguments

        batch = TokenBatch.padded([token_ids], 0, self._device).with_images(arrays)
        positions, images = image_arguments(self._model.model, batch)
        return {"position_ids": positions, **images}

    async def _drain(self) -> None:
        await super()._drain()
        # A cancelled request leaves the gate at once, but its thread still uses the model: wait for its lock.
        await asyncio.to_thread(self._wait_for_thread)

    def _wait_for_thread(self) -> None:
        # Taken and released in one thread: a caller that gives up while it waits must not leave the lock taken.
        with self._lock:
            pass

    async def begin_weight_update(self, policy_version: int) -> None:
        """See `RolloutEngine.begin_weight_update`."""
        await super().begin_weight_update(policy_version)
        self._received = set()

    async def receive_weights(self, bucket: WeightBucket) -> None:
        """Copy the bucket's weights into the model."""
        self._check_updating()
        try:
            for slot in bucket.tensors:
                check_tensor(slot, self._shapes.get(slot.name), self._shapes)
            weights = self._weights()
            for name, tensor in self._reader.read(bucket):
                weights[name].data.copy_(tensor)
                self._received.add(name)
        except RlhfError as error:
            self._reader.end_update()
            self._end_update(str(error).partition("\n")[0])
            raise

    async def finish_weight_update(self) -> None:
        """See `RolloutEngine.finish_weight_update`. Raises WeightSyncError when weights are missing."""
        self._check_updating()
        self._reader.end_update()
        missing = sorted(set(self._shapes) - self._received)
        if missing:
            self._end_update(f"{len(missing)} did not arrive in the last update ({', '.join(missing[:5])})")
            raise WeightSyncError(f"weights missing: {self._incomplete}", hint="send every weight in each update")
        self._end_update()

    async def sleep(self, keep_weights: bool = True) -> None:
        """Move the weights to host memory, also those that need not be kept."""
        await super().sleep(keep_weights)
        self._model.to("cpu")

    async def wake_up(self) -> None:
        """Move the weights back to the device."""
        self._model.to(self._device)
        await super().wake_up()

    async def close(self) -> None:
        """Free the model."""
        await super().close()
        self._reader.close()
        self._model = None

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters and the persistent buffers, which move with the model to other tensors."""
        stored = self._model.state_dict()
        buffers = {name: buffer for name, buffer in self._model.named_buffers() if name in stored}
        return dict(self._model.named_parameters()) | buffers


def _sample(
    logits: torch.Tensor, seen_ids: torch.Tensor, sampling: SamplingParams, generators: list[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        logits: [n, V] float32.
        seen_ids: [n, T] int64, the tokens so far, for the repetition penalty.
        sampling: temperature 0 takes the most likely token.
        generators: one random generator per row.

    Returns:
        Token ids [n] int64, and their log-probs [n] float32, nats, under the distribution they were drawn from.
    """
    from transformers import generation

    # In vLLM's order: the nucleus is taken of what the other filters leave.
    warpers = generation.LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        warpers.append(generation.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature > 0:
        warpers.append(generation.TemperatureLogitsWarper(sampling.temperature))
        if sampling.min_p > 0:
            warpers.append(generation.MinPLogitsWarper(sampling.min_p))
        if sampling.top_k > 0:
            warpers.append(generation.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            warpers.append(generation.TopPLogitsWarper(sampling.top_p))
    logprobs = warpers(seen_ids, logits).log_softmax(-1)
    if sampling.temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        probs = logprobs.exp()
        tokens = torch.cat(
            [torch.multinomial(row, 1, generator=generator) for row, generator in zip(probs, generators, strict=True)]
        )
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
