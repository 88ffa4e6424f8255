"""OpenRLHF's flags, old and new, and what each one means here, as read from the table `flags.txt`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from rlhf_data.errors import ConfigError, FeatureError
from rlhf_data.options.flags import UNASKED, Foreign, Values, absent, is_on, mapped, moot, renamed, sets

OFFLINE = ("sft", "rm", "dpo", "kto", "prm", "kd")
INFERENCE = ("generate", "score", "serve_rm", "chat")
# The table's names for several commands at once.
COMMANDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "offline": OFFLINE,
        "training": ("ppo", *OFFLINE),
        "inference": INFERENCE,
        "all": ("ppo", *OFFLINE, *INFERENCE, "lora_combiner"),
    }
)

# Values that flags set and `adapt` turns into options.
_TOTAL = "prompt and response"  # tokens of a prompt and its response together
_GUEST = "openrlhf"  # whether the command line was written for OpenRLHF
_BY_TOKENS = "dynamic batch"  # whether passes hold a number of tokens
_PASS = "tokens per pass"
_ITERATION = "slice of the rows"  # number of a slice of as many rows as `_SLICE` says
_SLICE = "rows of a slice"
_SLICE_SIZE = "2048"  # OpenRLHF's default
_RESPONSE = 1024  # tokens per response if only the length of both is given


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        names: spellings of one flag, or of several with the same meaning here, without `--`.
        commands: the commands that accept it.
        kind: the text before the colon, such as "option" or "not available".
        text: the text after it.
        hint: what to do instead, or "".
        unless: words after a flag "not available" that switch the feature off, so that there is no error.
    """

    names: tuple[str, ...]
    commands: tuple[str, ...]
    kind: str
    text: str
    hint: str = ""
    unless: tuple[str, ...] = ()

    @property
    def meaning(self) -> Foreign:
        """The meaning of the flag, for the command line."""
        if self.kind == "option":
            return renamed(self.text)
        if self.kind == "option of all models":
            return _reading(self.text, lambda words: words[0] if len(words) == 1 else words)
        if self.kind == "no effect":
            return moot(self.text)
        if self.kind == "not available":
            return absent(self.text, hint=self.hint or None, unless=(*UNASKED, *self.unless))
        return _SPECIAL[self.names[0]]


@cache
def table() -> tuple[Row, ...]:
    """Return all lines of the table."""
    text = resources.files("rlhf_cli.openrlhf").joinpath("flags.txt").read_text(encoding="utf-8")
    return tuple(_row(line) for line in text.splitlines() if line and not line.startswith("#"))


def _row(line: str) -> Row:
    names, commands, meaning, *rest = (part.strip() for part in line.split("|"))
    kind, _, text = meaning.partition(": ")
    hint, unless = (*rest, "", "")[:2]
    found = tuple(one for word in commands.split() for one in COMMANDS.get(word, (word,)))
    return Row(tuple(names.split()), found, kind, text, hint, tuple(unless.split()))


@cache
def flags_of(command: str) -> Mapping[str, Foreign]:
    """Return OpenRLHF's flags for a command of `rlhf`, by name without `--`."""
    return {name: row.meaning for row in table() if command in row.commands for name in row.names}


def adapt(values: Values) -> Values:
    """Return values of options for the values of flags. Resolves flags whose meaning depends on each other.

    OpenRLHF's newest flag limits prompt and response together. Here each has a limit: the prompt may have as many
    tokens as the response leaves.
    """
    values = dict(values)
    if values.pop(_GUEST, None) and not values.keys() & {"pretrain", "prompt_data", "config", "preset", "resume"}:
        # Without a model and prompts, `rlhf ppo` runs the built-in task. A command line for OpenRLHF never means that.
        values["pretrain"] = "None"
    tokens = values.pop(_PASS, "16192")
    if values.pop(_BY_TOKENS, None):
        values.setdefault("micro_batch_tokens", tokens)
    size = int(values.pop(_SLICE, _SLICE_SIZE))
    if _ITERATION in values:
        values |= {"skip_samples": str(int(values.pop(_ITERATION)) * size), "max_samples": str(size)}
    if _TOTAL not in values:
        return values
    # Without --generate_max_len, the response may have half of the tokens, but not more than the usual limit.
    total = int(values.pop(_TOTAL))
    response = values.setdefault("generate_max_len", str(min(_RESPONSE, total // 2)))
    if "prompt_max_len" not in values and str(response).isdecimal():
        if int(response) >= total:
            message = f"prompt and response have {total} tokens together, and --generate_max_len {response} takes all"
            raise ConfigError(message, hint="raise the length of both, or lower --generate_max_len")
        values["prompt_max_len"] = str(total - int(response))
    return values


def _reading(option: str, read: Callable[[list[str]], object]) -> Foreign:
    """Return a flag that sets one option. `read` makes its value from the words after the flag."""
    return Foreign(options=(option,), read=lambda flag, words: ({option: read(list(words))}, ""))


def _whole_number(name: str) -> Callable[[str, Sequence[str]], tuple[Values, str]]:
    """Return the reader of a flag whose whole number becomes the value `name`."""

    def read(flag: str, words: Sequence[str]) -> tuple[Values, str]:
        if len(words) != 1 or not words[0].isdecimal():
            raise ConfigError(f"{flag} is {' '.join(words) or 'empty'}; it must be a whole number")
        return {name: words[0]}, ""

    return read


def _greedy(flag: str, words: Sequence[str]) -> tuple[Values, str]:
    return ({"temperature": "0"} if is_on(flag, words) else {}), ""


def _ring(flag: str, words: Sequence[str]) -> tuple[Values, str]:
    values = {"sequence_parallel_size": " ".join(words)}
    if list(words) == ["1"]:
        return values, ""
    return values, f"{flag}: processes exchange attention heads (DeepSpeed-Ulysses), with the results of ring attention"


def _but_for(word: str, feature: str, hint: str, otherwise: Foreign) -> Foreign:
    """Return the flag `otherwise`, except that the value `word` asks for a feature that is not available."""

    def read(flag: str, words: Sequence[str]) -> tuple[Values, str]:
        if list(words) == [word]:
            raise FeatureError(f"not available: {feature} ({flag} {word})", hint=hint)
        assert otherwise.read is not None
        return otherwise.read(flag, words)

    return Foreign(options=otherwise.options, read=read)


_KEEPS_WEIGHTS = (
    "masking responses by their geometric mean and keeping the weights of their tokens",
    "for bounds 0.5 5: --is_correction_level token --is_correction_threshold 0 1e9 --is_reject geometric"
    " --is_reject_threshold 0.5 5",
)
_TOKEN_LEVEL = {"is_correction_level": "token"}
_LEVELS = mapped({"off": {"is_correction_level": "off"}, "token": _TOKEN_LEVEL})
_TYPES = mapped(
    {
        "tis": _TOKEN_LEVEL | {"is_correction_mode": "truncate"},
        "icepop": _TOKEN_LEVEL | {"is_correction_mode": "mask"},
    }
)

# By first spelling, the flags whose meaning does not fit into the table.
_SPECIAL: Mapping[str, Foreign] = MappingProxyType(
    {
        "max_len": Foreign(options=("prompt_max_len", "generate_max_len"), read=_whole_number(_TOTAL)),
        "iter": Foreign(options=("skip_samples", "max_samples"), read=_whole_number(_ITERATION)),
        "rollout_batch_size": Foreign(options=("max_samples",), read=_whole_number(_SLICE)),
        "use_kl_estimator_k3": sets(kl_estimator="k3"),
        "use_dynamic_batch": Foreign(
            options=("micro_batch_tokens",),
            read=lambda flag, words: ({_BY_TOKENS: "true"} if is_on(flag, words) else {}, ""),
        ),
        "train_max_tokens_per_gpu": Foreign(
            options=("micro_batch_tokens",), read=lambda flag, words: ({_PASS: " ".join(words)}, "")
        ),
        "vllm_sync_backend": mapped(
            {name: {"vllm_sync_backend": name.replace("gloo", "host")} for name in ("nccl", "gloo", "host")}
        ),
        "ring_head_stride": Foreign(read=lambda flag, words: ({}, "")),
        "ring_attn_size": Foreign(options=("sequence_parallel_size",), read=_ring),
        "greedy_sampling": Foreign(options=("temperature",), read=_greedy),
        "algo.advantage.estimator": _but_for(
            "flash_reinforce",
            "FlashREINFORCE",
            "use --advantage_estimator reinforce",
            _reading("advantage_estimator", " ".join),
        ),
        "partial_rollout": sets(at_update="keep"),
        "enable_vllm_is_correction": sets(**_TOKEN_LEVEL),
        "vllm_is_correction_type": _but_for("seq-mask-tis", *_KEEPS_WEIGHTS, _TYPES),
        "algo.advantage.is_correction_level": _but_for("seq", *_KEEPS_WEIGHTS, _LEVELS),
        "algo.advantage.is_correction_mode": mapped(
            {"mask": {"is_correction_mode": "mask"}, "clip": {"is_correction_mode": "truncate"}}
        ),
        "vllm_is_truncated_threshold": _reading(
            "is_correction_threshold", lambda words: ["0", *words] if len(words) == 1 else words
        ),
        "ckpt.best_metric_key": _reading(
            "best_metric_key", lambda words: "None" if words in ([], [""], ["none"]) else words[0]
        ),
        "ds.param_dtype": _but_for(
            "fp16", "float16", "use --bf16", mapped({"bf16": {"bf16": "true"}, "fp32": {"bf16": "false"}})
        ),
        "local_rank": Foreign(read=lambda flag, words: ({}, "")),
        "openrlhf": Foreign(read=lambda flag, words: ({_GUEST: "true"}, "")),
    }
)
