"""Turns the options of the commands into what they run with: engines, tokenizers, sampling and rewards."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_data.chat.tokens import Tokenizer
from rlhf_data.errors import ConfigError, installs
from rlhf_data.images.reader import ImageReader
from rlhf_data.keys import check_extra_keys, check_section_keys, unread_tools
from rlhf_data.options.checks import check_stays
from rlhf_data.options.sections import TemplateVariableSection
from rlhf_data.own_code import is_trusted
from rlhf_data.pretrained import ids_without_token, load_tokenizer, located, masked_ids_notice, set_chat_template
from rlhf_data.rows.sources import Rows, may_be_on_hub, open_sources, parse_probs, split_sources
from rlhf_data.stored_weights import check_tied_head
from rlhf_data.testing import ByteTokenizer
from rlhf_rollout.commands.configs import WITH_MODEL, OneEngineSection
from rlhf_rollout.commands.reward_section import RewardSection
from rlhf_rollout.commands.sections import SHARE_ALONE, EngineModelSection, PromptSourceSection
from rlhf_rollout.commands.terminal import TERMINAL
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.engines.model_files import read_config, resolve_model_dir
from rlhf_rollout.engines.vllm.speculation import check_own_layers, draft_model_dir
from rlhf_rollout.protocols import RewardFunction
from rlhf_rollout.rewards.mix import build_reward
from rlhf_rollout.rewards.model import LocalScorer, ModelReward
from rlhf_rollout.rewards.sources import CallOptions, RewardSource, model_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """The engine that generates.

    Attributes:
        kind: one of `rlhf_rollout.engines.ENGINE_KINDS`.
        spec: how the engine is built.
        tokenizer: folder or hub name; None for bytes, the tokens of engine "fake" without a model.
    """

    kind: str
    spec: EngineSpec
    tokenizer: str | None

    def check_model(self) -> None:
        """Raise ConfigError for a model that does not exist, and as `check_tied_head`."""
        if self.kind in WITH_MODEL:
            check_tied_head(located(self.spec.model)[0])

    def check_draft_model(self, tokenizer: Tokenizer | None) -> None:
        """Raise ConfigError for a draft model that does not exist, or has other tokens than the policy's `tokenizer`;
        likewise for a policy that lacks layers by which it shall draft.

        Without a tokenizer, only the numbers of tokens are compared. EngineError if a download fails.
        """
        if self.spec.draft_model is not None:
            draft_model_dir(self.spec.draft_model, self._config(), tokenizer)
        if self.spec.speculative == "mtp":
            check_own_layers(resolve_model_dir(self.spec.model))

    def masked_spec(self, tokenizer: Tokenizer, reader: ImageReader | None = None) -> EngineSpec:
        """Return `spec` of an engine that samples only ids with a token, and notice if some have none.

        With a `reader` it takes images, and samples no token that stands for one. Engines without a model of their own
        mask none.
        """
        if self.kind not in WITH_MODEL:
            return self.spec
        num_ids = int(self._config()["vocab_size"])
        masked = ids_without_token(tokenizer, num_ids)
        if notice := masked_ids_notice(masked, num_ids):
            TERMINAL.say(f"notice: {notice}")
        if reader is not None:
            return replace(self.spec, images=True, masked_ids=reader.masked_ids(masked))
        return replace(self.spec, masked_ids=masked)

    def _config(self) -> dict[str, Any]:
        return read_config(resolve_model_dir(self.spec.model), may_run=is_trusted(self.spec.model))

    def load_tokenizer(self, data: TemplateVariableSection) -> Tokenizer:
        """Return the tokenizer, whose chat template has the variables of `data`.

        Raises ConfigError when it cannot be loaded, the model does not exist, or its template does not read a variable,
        and as `check_draft_model`.
        """
        self.check_model()
        tokenizer = ByteTokenizer() if self.tokenizer is None else load_tokenizer(self.tokenizer)
        self.check_draft_model(tokenizer)
        set_chat_template(tokenizer, variables=data.chat_template_kwargs)
        return tokenizer


@dataclass(frozen=True, slots=True)
class RewardJob:
    """The reward that scores.

    Attributes:
        options: the options of rewards; they may name no source.
        dtype: data type of reward models.
        max_length: tokens of the longest sequence, as for `LocalScorer`.
        reader: of the images that reward models read; None for text alone.
    """

    options: RewardSection
    dtype: Literal["float32", "bfloat16"]
    max_length: int | None = None
    reader: ImageReader | None = None

    @property
    def sources(self) -> tuple[RewardSource, ...]:
        """The sources whose weighted rewards are added."""
        return self.options.sources()

    @property
    def models(self) -> tuple[str, ...]:
        """Folders or hub names of the reward models, in order."""
        return model_paths(self.sources)

    def check_models(self) -> None:
        """Raise ConfigError for a reward model that does not exist."""
        for path in self.models:
            located(path, with_weights=False)

    def load_tokenizer(self, name: str | None) -> Tokenizer:
        """Return the tokenizer `name`, or the first reward model's if `name` is None.

        Without both it is a tokenizer of bytes, because functions and servers receive text and no tokens. Raises
        ConfigError for a reward model that does not exist.
        """
        self.check_models()
        if name is None and not self.models:
            return ByteTokenizer()
        return load_tokenizer(name or self.models[0])

    def open(self, tokenizer: Tokenizer, stack: AsyncExitStack, calls: CallOptions | None = None) -> RewardFunction:
        """Return the reward function; `stack` closes it. `calls` takes the place of what the options say.

        Raises ConfigError for a reward model that cannot be loaded or whose tokenizer differs from `tokenizer`.
        """
        models = []
        calls = calls or self.options.calls()
        for number, path in enumerate(self.models):
            # Each loads for seconds to minutes, and the first one imports torch as well.
            TERMINAL.progress.show("loading the reward models", done=number, total=len(self.models))
            scorer = self._scorer(path, tokenizer)
            stack.callback(scorer.close)
            models.append(ModelReward([scorer], calls))
        with TERMINAL.progress.doing("starting the rewards"):
            reward = build_reward(self.sources, calls, models=models)
        stack.push_async_callback(reward.close)
        return reward

    def _scorer(self, path: str, tokenizer: Tokenizer) -> LocalScorer:
        try:
            import torch

            from rlhf_models.loading import check_same_tokenizer, load_config
        except ImportError as error:
            raise ConfigError("reward models need rlhf-models", hint=installs("rlhf-rollout[models]")) from error
        if isinstance(tokenizer, ByteTokenizer):
            raise ConfigError("a reward model reads tokens, and no tokenizer is named", hint="give --tokenizer")
        check_same_tokenizer(path, tokenizer)
        if self.reader is not None:
            self.reader.check_same(path, load_config(path))
        scorer = LocalScorer(
            path,
            dtype=self.dtype,
            max_length=self.max_length,
            device="cuda" if torch.cuda.is_available() else "cpu",
            batch_size=self.options.reward_batch_size,
            normalize=self.options.normalize_reward,
            images=self.reader is not None,
        )
        if self.options.normalize_reward and not scorer.has_moments:
            TERMINAL.say(f"notice: --normalize_reward has no effect: no moments are stored with {path}")
        return scorer


def make_engine(
    model: EngineModelSection,
    engine: OneEngineSection,
    max_model_len: int,
    *,
    memory_share: float = SHARE_ALONE,
    **options: Any,
) -> EngineJob:
    """Return the engine for prompts and responses of at most `max_model_len` tokens together.

    `memory_share` is that of a GPU, unless an option sets it; `options` are further fields of `EngineSpec`.
    """
    tokenizer = model.tokenizer or model.pretrain
    spec = engine.spec(
        model.pretrain or "fake",
        max_model_len,
        memory_share,
        tokenizer=tokenizer if engine.engine == "fake" else model.tokenizer,
        dtype=model.dtype,
        base_url=engine.base_url if engine.engine == "http" else None,
        **options,
    )
    return EngineJob(kind=engine.engine, spec=spec, tokenizer=tokenizer)


def open_prompts(data: PromptSourceSection, seed: int, extra_keys: Sequence[str] = ()) -> Rows:
    """Return the rows of --prompt_data; `seed` is that of --prompt_data_probs, and `extra_keys` those of --extra_keys.

    Raises DataError for a source that cannot be opened, or whose first row lacks a key.
    """
    probs = parse_probs("prompt_data_probs", data.prompt_data_probs)
    options = {"probs": probs, "seed": seed, "split": data.prompt_split, "max_samples": data.max_samples}
    rows = open_sources(data.prompt_data, preset=data.preset_data, **options)
    names = ("input_key", "label_key", "tools_key")
    check_section_keys(data, rows, [name for name in names if hasattr(data, name)])
    check_extra_keys(rows, extra_keys)
    for notice in unread_tools([rows], data):
        TERMINAL.say(f"notice: {notice}")
    return rows


def is_data_here(flag: str, sources: str) -> bool:
    """Return whether a dry run can open all of a list of sources; a notice tells of those that may be on the hub."""
    absent = [name for name in split_sources(sources) if may_be_on_hub(name)]
    for name in absent:
        TERMINAL.say(f"not looked at: --{flag} {name}: a dry run does not load data from the hub")
    return not absent


def check_new_file(path: Path, *, replace: bool, hint: str) -> None:
    """Raise ConfigError when a file exists that must not be replaced, or when no file can be written at its place."""
    check_stays(path, "--output_path")
    if path.exists() and not replace:
        raise ConfigError(f"{path} exists", hint=hint)
    draft = _draft(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.touch()
        draft.unlink()
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror or error}"
        raise ConfigError(message, hint="give another --output_path") from None
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint="name a file in it")


def _draft(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write a JSONL file, completely or not at all; return the number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    count = 0
    try:
        with draft.open("w", encoding="utf-8", errors="backslashreplace") as file:  # as `RolloutWriter`
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
                count += 1
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return count
