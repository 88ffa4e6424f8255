"""The last lines of a run: final metrics, what was saved, and how to load it."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from rlhf_cli.console.views import Console
from rlhf_data.own_code import code_files
from rlhf_data.stored_weights import read_json

_PARTS = {
    "startup": "starting",
    "first_evaluation": "first evaluation",
    "steps": "steps",
    "final_save": "saving",
    "remainder": "rest",
}
_HELD_OUT = {"accuracy": 3, "loss": 4, "margin": 4}  # decimals


def show_results(
    console: Console,
    folder: str,
    artifacts: Mapping[str, str],
    metrics: Mapping[str, float],
    *,
    loader: str = "AutoModelForCausalLM.from_pretrained",
) -> None:
    """Write the last lines of a run: final metrics, and the paths of everything that it wrote.

    Args:
        console: where to write.
        folder: the folder of the run.
        artifacts: by name, paths in the folder.
        metrics: final metrics.
        loader: see `loading_line`.
    """
    console.done()
    console.result("\nDone", "bold green")
    lines: list[tuple[str, str]] = []
    for name, decimals in _HELD_OUT.items():
        before, after = (metrics.get(f"eval/{name}_{when}") for when in ("before", "after"))
        if before is not None and after is not None:
            lines.append((f"held-out {name}", f"{before:.{decimals}f} -> {after:.{decimals}f}"))
    if "time/total" in metrics:
        parts = {title: metrics.get(f"time/{name}") for name, title in _PARTS.items()}
        said = ", ".join(f"{title} {value:.1f}" for title, value in parts.items() if value is not None)
        lines.append(("seconds", f"{metrics['time/total']:.1f}" + (f": {said}" if said else "")))
    if peak := metrics.get("memory/trainer_peak_bytes"):
        lines.append(("trainer memory", f"{peak / 2**30:.2f} GiB at most on one GPU"))
    lines.append(("folder", folder))
    lines += [(name, str(Path(folder) / path)) for name, path in artifacts.items()]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        console.row([(f"  {name.ljust(width)}  ", "dim"), (value, "")])
    if "tensorboard" in artifacts:
        console.row([("  to look at it: ", "dim"), (f"tensorboard --logdir {shlex.quote(folder)}", "")])
    if "final model" in artifacts:
        model = Path(folder) / artifacts["final model"]
        console.row([("  to load it:    ", "dim"), (loading_line(model, loader), "")])


def loading_line(model: Path, loader: str) -> str:
    """Return the Python expression that loads a model which a run saved.

    Args:
        model: its folder.
        loader: name of the function that loads it, unless the head is in a file that plain transformers does not read.
    """
    from rlhf_models.checkpoint.files import VALUE_HEAD_FILE

    has_code = any(code_files(read_json(model / "config.json")))
    name = repr(str(model))
    if (model / VALUE_HEAD_FILE).is_file():
        name = f"rlhf_data.own_code.TrustedModel({name})" if has_code else name
        return f"rlhf_models.loading.load_reward_model({name}, dtype='float32')"
    return f"{loader}({name}{', trust_remote_code=True' if has_code else ''})"
