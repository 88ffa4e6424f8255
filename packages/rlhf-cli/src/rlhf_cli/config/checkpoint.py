"""Options of checkpoints, from which an interrupted run continues."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlhf_cli.config.paths import CONFIG_FILE, user_path
from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import check_has_metric, without_effect
from rlhf_data.options.declare import Section, flag
from rlhf_train.run.checkpoint import CheckpointSpec

_GIB = 1 << 30
_SAVED = ["max_ckpt_num", "max_ckpt_mem", "save_hf_ckpt"]
_OF_HELD_OUT = ["eval_steps", "eval_temperature", "eval_n_samples_per_prompt", "source_key"]
_BETTER_WHEN_LOW = ("truncated", "response_tokens", "failed")


def resumed_config(values: Mapping[str, Any], option: str = "resume") -> Path | None:
    """Return the options of the run in the folder that an option names; None if it is not among `values`.

    Raises ConfigError if that is not the folder of a run.
    """
    if values.get(option) is None:
        return None
    path = user_path(values[option]) / CONFIG_FILE
    if not path.is_file():
        what = "has no config.toml, so it is no folder of a run" if path.parent.is_dir() else "does not exist"
        hint = "name the folder of a run: its --save_path, or rlhf-output/COMMAND-DATE-TIME"
        raise ConfigError(f"--{option}: {path.parent} {what}", hint=hint)
    return path


class CheckpointSection(Section, title="checkpoints"):
    """When the state of a run is saved, and where a run continues."""

    save_steps: int = flag(
        -1,
        "steps, or updates of runs on fixed examples, between checkpoints; -1 saves one only when the run ends early",
    )
    ckpt_path: str | None = flag(None, "folder of the run's checkpoints; None: `checkpoints` in the run's folder")
    max_ckpt_num: int = flag(3, "newest checkpoints to keep; the best by --best_metric_key is kept besides", ge=1)
    max_ckpt_mem: float = flag(1e8, "largest size of all checkpoints together in GiB; the newest is always kept", gt=0)
    save_hf_ckpt: bool = flag(False, "put the model as a Hugging Face folder, `hf`, into each checkpoint")
    disable_ds_ckpt: bool = flag(
        False, "do not save the state of training; with --save_hf_ckpt a checkpoint holds the model only"
    )
    load_checkpoint: bool = flag(
        False,
        "continue from the newest whole checkpoint, if there is one: in --ckpt_path or --save_path, without both of the"
        " newest run of this command in ./rlhf-output that has one",
    )
    resume: str | None = flag(
        None, "folder of a run to continue with the options that it had; further flags override them"
    )

    @property
    def continues(self) -> bool:
        """Whether the run's folder may hold a run, which goes on."""
        return self.load_checkpoint or self.resume is not None

    def spec(self) -> CheckpointSpec:
        """Return these options as the trainer takes them."""
        return CheckpointSpec(
            folder=self.ckpt_path or "",
            every=max(self.save_steps, 0),
            max_num=self.max_ckpt_num,
            max_bytes=self.max_ckpt_mem * _GIB,
            full=not self.disable_ds_ckpt,
            hf_model=self.save_hf_ckpt,
            resume=self.continues,
        )

    def check(self, given: Collection[str], save_path: str | None) -> list[str]:
        """Return a notice for each option that has no effect. Raises ConfigError for options that contradict."""
        if self.resume is not None and "save_path" in given and save_path != self.resume:
            message = f"--resume {self.resume} continues in that folder, and --save_path is {save_path}"
            raise ConfigError(message, hint="drop --save_path")
        if self.save_steps > 0 and self.disable_ds_ckpt and not self.save_hf_ckpt:
            message = f"--save_steps {self.save_steps} with --disable_ds_ckpt would save nothing"
            raise ConfigError(message, hint="drop --disable_ds_ckpt, or add --save_hf_ckpt")
        if self.continues and self.disable_ds_ckpt:
            raise ConfigError("--disable_ds_ckpt saves nothing to continue from", hint="drop --disable_ds_ckpt")
        return without_effect(given, (self.save_steps < 1, _SAVED, "--save_steps is off"))


class EvaluationSection(Section, title="evaluation"):
    """When to evaluate, and which weights to keep."""

    eval_steps: int = flag(
        -1,
        "evaluate after every Nth step of ppo, or after every Nth update of the other commands; -1: only before the"
        " first and after the last",
        ge=-1,
    )
    best_metric_key: str | None = flag(
        None,
        "also save the model with the best value of this metric, such as eval/pass@1 (ppo, the highest is best) or"
        " eval/loss; None: save the last model only",
    )


class PpoEvaluationSection(EvaluationSection):
    """Adds how responses to held-out prompts are drawn."""

    eval_temperature: float = flag(0.6, "sampling temperature of evaluation; 0: greedy", ge=0)
    eval_n_samples_per_prompt: int = flag(1, "responses per held-out prompt", ge=1)

    def check(self, given: Collection[str], eval_data: str | None) -> list[str]:
        """Return notices for options without effect, and for a metric whose best value is not its highest.

        Raises ConfigError for options that contradict.
        """
        best = self.best_metric_key
        notices = check_has_metric("eval_data", eval_data, best, self.eval_steps)
        if eval_data is None:
            return without_effect(given, (True, _OF_HELD_OUT, "there is no --eval_data"))
        if self.eval_temperature == 0 and self.eval_n_samples_per_prompt > 1:
            message = f"--eval_n_samples_per_prompt is {self.eval_n_samples_per_prompt} at --eval_temperature 0"
            raise ConfigError(f"{message}: greedy responses are all the same", hint="use 1 sample, or a temperature")
        if best is not None and best.rpartition("/")[2] in _BETTER_WHEN_LOW:
            notices.append(f"--best_metric_key {best} keeps the highest value, though lower is usually better")
        return notices
