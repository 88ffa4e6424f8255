"""The smallest run of `rlhf ppo` on this machine: an engine generates, a trainer updates, weights are synced."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_cli.doctor.finding import FAULT, NOTICE, OK, Finding, of_message
from rlhf_rollout.host import local_gpus

_TITLE = "trial run"
_LIMIT_S = 300.0
_LONG_S = 60.0
_NUM_SAMPLES = 8
# Two prompts per update, and no critic and no reference model.
_FLAGS = (
    *("--train_steps", "1", "--rollout_batch_size", "4", "--n_samples_per_prompt", "2", "--train_batch_size", "8"),
    *("--micro_train_batch_size", "8", "--micro_rollout_batch_size", "8", "--generate_max_len", "8"),
    *("--advantage_estimator", "group_norm", "--init_kl_coef", "0", "--eval_data", "None", "--record", "false"),
)
# Nothing is compiled or captured: that takes longer than the rest.
_ON_GPU = (
    *("--colocate_all_models", "--enforce_eager", "--torch_compile", "off"),
    *("--vllm_gpu_memory_utilization", "0.1"),
)


def trial_run(start: Callable[..., Any] = subprocess.run) -> Finding:
    """Return whether a step of the built-in model goes through on this machine, and the seconds that it took."""
    with tempfile.TemporaryDirectory(prefix="rlhf-doctor-", ignore_cleanup_errors=True) as home:
        folder = Path(home) / "run"
        words = [*_FLAGS, *(_ON_GPU if local_gpus() else ()), "--save_path", str(folder)]
        command = [sys.executable, "-m", "rlhf_cli.main", "ppo", *words]
        hint = f"rlhf ppo {' '.join(words[:-2])} --save_path NEW_FOLDER, and read log.txt there"
        started = time.monotonic()
        try:
            done = start(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, cwd=home)
        except subprocess.TimeoutExpired:
            return Finding(_TITLE, FAULT, f"no end within {_LIMIT_S:g} s", "`rlhf ppo` does not work here", hint)
        seconds = time.monotonic() - started
        if done.returncode:
            said = done.stderr.rpartition("error: ")[2].strip() or f"it ended with status {done.returncode}"
            finding = of_message(_TITLE, said, "`rlhf ppo` does not work here")
            return Finding(_TITLE, FAULT, finding.found[-500:], finding.costs, finding.hint or hint)
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = {name: value for line in lines for name, value in json.loads(line).items()}
    trained = metrics.get("samples/trained")
    synced = metrics.get("sync/size_bytes", 0)
    if trained != _NUM_SAMPLES or not synced:
        found = f"{trained} of {_NUM_SAMPLES} samples were trained on, and {synced} bytes of weights synced"
        return Finding(_TITLE, FAULT, found, "`rlhf ppo` does not work here", hint)
    text = f"{trained} samples, an update and a sync of {synced / 1e6:.1f} MB of weights: {seconds:.0f} s"
    if seconds > _LONG_S:
        busy = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        costs = f"{_LONG_S:.0f} s suffice on two cores that nothing else uses; the load average is {busy}"
        return Finding(_TITLE, NOTICE, text, costs, "end other programs, and try again")
    return Finding(_TITLE, OK, text)
