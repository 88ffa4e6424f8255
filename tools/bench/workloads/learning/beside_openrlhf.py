"""Held-out accuracy by seconds of `rlhf ppo` and of OpenRLHF's train_ppo_ray, on one GPU and one after the other.

    python tools/bench/run.py beside_openrlhf --model SmolLM2-135M-Instruct --out beside_openrlhf.json

Both train one model by GRPO on the task and with the sizes of `beside_trl`. OpenRLHF runs as its README advises for one
GPU: engine and trainer share it (`--train.colocate_all`), with FlashAttention-2 on packed sequences and prefix caching.
Neither of the two sleeps, since the GPU has room for both. The engine has 128 slots, which is vLLM's number for it. No
flag of OpenRLHF changes that.

OpenRLHF computes --openrlhf_batch sequences per pass and not its micro-batches by tokens
(`--train.dynamic_batch_enable`). Those tell DeepSpeed of one pass per update and make several. At ZeRO stage 2,
DeepSpeed 0.19.6 and 0.19.8 then keep the gradient of the last pass alone. DeepSpeed knows the number of equal passes,
and adds their gradients up in float32, as it does for `rlhf ppo`.

OpenRLHF evaluates by itself every --eval_steps: its engine answers the same held-out prompts greedily, and the rules of
examples/instructions.py decide which answers are right. It does not evaluate the model before training.
`train_accuracy` is the share of a step's sampled answers that are right: the first is that of the model before
training, in both programs. `step_seconds` are the seconds of a step that OpenRLHF logs (generation, experience,
training, weights), without evaluations. `wall_seconds` are those between its lines of log: they have what else happens
between two steps.

Both get the same tokens of prompts, the same texts of answers and the same rewards for them. Both weigh all responses
alike in the loss, whatever their length, and keep AdamW's betas, weight decay, limit of gradients and constant rate.
These differences have no flag:

- OpenRLHF divides a group's rewards by the deviation of a sample of 8, this project by that of 8 in all. Advantages
  there are 0.94 of those here, which AdamW's updates do not depend on.
- Its training rewards are six times those of the example: whole numbers, so that groups of equal rewards have no
  deviation by rounding, which it would divide by. Advantages do not change.
- It computes the log-probs before the update by a pass of its own. `rlhf ppo` takes those of the update.
- It lets no answer be empty.

OpenRLHF must be installed or on PYTHONPATH, which it is not by this project. A copy with two changes runs, which the
report lists as `changes`: DeepSpeed takes PyTorch's fused AdamW in place of its own, which it would compile first, and
`openrlhf_parts/flash_attention.py` takes the place of flash-attn. Further flags are those of `rlhf ppo`, and with
`--only openrlhf` those of OpenRLHF.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from rlhf_rollout.host import local_gpus
from runner import MORE_FLAGS, OWN_CLUSTER, UsageError, progress, read_lines
from workloads.learning import beside_trl
from workloads.learning.openrlhf_parts.reward import HELD_OUT

FLAGS = {
    **{name: beside_trl.FLAGS[name] for name in ("model", "seeds", "prompts", "steps", "eval_steps", "held_out")},
    "only": {"choices": ("rlhf", "openrlhf"), "help": "run this one alone"},
    "openrlhf_seconds": (400.0, "of steps and evaluations, after which OpenRLHF ends with the curve so far"),
    "openrlhf_batch": (128, "sequences per pass of OpenRLHF"),
    "openrlhf_memory": (0.3, "share of the GPU for OpenRLHF's engine"),
    "flags": MORE_FLAGS,
}
_PARTS = Path(__file__).parent / "openrlhf_parts"
_SETTINGS = (
    "--actor.num_nodes 1 --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --train.colocate_all"
    " --vllm.num_engines 1 --vllm.tensor_parallel_size 1 --vllm.enable_prefix_caching --vllm.sync_backend nccl"
    " --ds.zero_stage 2 --ds.param_dtype bf16 --ds.grad_accum_dtype fp32"
    " --ds.attn_implementation flash_attention_2 --ds.packing_samples"
    " --data.input_key input --data.label_key label --data.apply_chat_template --data.max_len 256"
    " --algo.advantage.estimator group_norm --algo.kl.init_coef 0 --actor.lr_scheduler constant"
    " --actor.loss_agg_mode seq-mean-token-mean"
    " --eval.temperature 0 --eval.n_samples_per_prompt 1 --ckpt.best_metric_key none --ckpt.disable_ds"
)
# Of files in the package: a text and what takes its place.
_CHANGES = {
    "utils/deepspeed/deepspeed.py": (
        '"type": "AdamW",\n                "params": {\n',
        '"type": "AdamW",\n                "params": {"torch_adam": True, "fused": True,\n',
    ),
}
_FLASH_ATTN = {
    "flash_attn/bert_padding.py": (
        "from einops import rearrange\nfrom flash_attn import index_first_axis, pad_input, unpad_input\n"
    ),
    "flash_attn/utils/distributed.py": "from flash_attn import all_gather\n",
    "flash_attn/ops/triton/cross_entropy.py": "from flash_attn import cross_entropy_loss\n",
    # transformers asks for the version, and for the package of a module.
    "flash_attn-2.8.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n",
    "flash_attn-2.8.3.dist-info/top_level.txt": "flash_attn\n",
}
_STEP = re.compile(r"Global step (\d+): (\{.*\})")
_EVALUATION = re.compile(r"global_step (\d+), eval_metrics: (\{.*\})")
_NUMBER = re.compile(r"'([\w/]+)': (?:[\w.]+\()?(-?[\d.]+(?:e[-+]?\d+)?)")


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run both for every seed."""
    return beside_trl.beside(options, folder, "openrlhf", run_openrlhf)


def run_openrlhf(options: Namespace, seed: int, train: Path, held_out: Path, folder: Path) -> dict[str, Any]:
    """Return the curve of OpenRLHF."""
    if not local_gpus():
        raise UsageError("OpenRLHF runs on GPUs only, and there is none")
    write_packages(folder / "site")
    marked = folder / "held_out.jsonl"
    mark_held_out(held_out, marked)
    flags = flags_of(options, seed, train, marked, folder)
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, **OWN_CLUSTER, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    began = time.time()
    command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # Not in this folder, where `kernels` would be taken for a package of that name.
    with subprocess.Popen(command, env=environ, cwd=folder, **pipes) as process:
        try:
            found = read_log(_shown(process.stdout.fileno()), options, began)
        except EOFError:
            raise subprocess.CalledProcessError(process.wait(), "OpenRLHF") from None
        finally:
            _end(process)  # else it saves the model, which nobody reads
    return found | {
        "seconds_total": time.time() - began,
        "version": importlib.metadata.version("openrlhf"),
        "flags": " ".join(flags).replace(str(folder.parent), "FOLDER"),
        "changes": {**_CHANGES, "flash-attn": "openrlhf_parts/flash_attention.py in its place"},
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started, which hold memory of the GPU."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(process.pid)
        started = [first, *first.children(recursive=True)]
        process.stdout.close()
        process.terminate()
        for left in psutil.wait_procs(started, 30)[1]:
            left.kill()


def flags_of(options: Namespace, seed: int, train: Path, held_out: Path, folder: Path) -> list[str]:
    """Return the flags of OpenRLHF's command. None is for the number of steps, so it gets the prompts of so many."""
    prompts = options.prompts * options.steps
    responses = options.prompts * beside_trl.SAMPLES
    batch = min(options.openrlhf_batch, responses)
    if prompts > (there := len(read_lines(train))):
        raise UsageError(f"{options.steps} steps take {prompts} prompts, and there are {there}")
    values = {
        "actor.model_name_or_path": options.model.resolve(),
        "actor.adam.lr": beside_trl.LEARNING_RATE,
        "data.prompt_dataset": train,
        "data.max_samples": prompts,
        "eval.dataset": held_out,
        "eval.steps": options.eval_steps,
        "reward.remote_url": _PARTS / "reward.py",
        "rollout.batch_size": options.prompts,
        "rollout.n_samples_per_prompt": beside_trl.SAMPLES,
        "rollout.micro_batch_size": batch,
        "rollout.max_new_tokens": beside_trl.TOKENS,
        "train.batch_size": responses,
        "train.micro_batch_size": batch,
        "train.seed": seed,
        "vllm.gpu_memory_utilization": options.openrlhf_memory,
        "ckpt.output_dir": folder / "model",
        "ckpt.path": folder / "checkpoints",
    }
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*_SETTINGS.split(), *words, *(options.flags if options.only == "openrlhf" else [])]


def write_packages(site: Path) -> None:
    """Write what comes first on OpenRLHF's PYTHONPATH: its changed copy, and the stand-in for flash-attn."""
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or spec.origin is None:
        raise UsageError("OpenRLHF is not installed. hint: pip install --no-deps openrlhf==0.11.2 torchdata pylatexenc")
    shutil.copytree(Path(spec.origin).parent, site / "openrlhf")
    for name, (before, after) in _CHANGES.items():
        text = (site / "openrlhf" / name).read_text(encoding="utf-8")
        if text.count(before) != 1:
            raise UsageError(f"this OpenRLHF has another {name}. hint: install openrlhf==0.11.2")
        (site / "openrlhf" / name).write_text(text.replace(before, after), encoding="utf-8")
    for name, text in {**_FLASH_ATTN, "flash_attn/__init__.py": (_PARTS / "flash_attention.py").read_text()}.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")


def mark_held_out(rows: Path, marked: Path) -> None:
    """Copy the held-out prompts with labels that tell the reward what they are."""
    with marked.open("w", encoding="utf-8") as file:
        for row in read_lines(rows):
            label = json.dumps(json.loads(row["label"]) | {HELD_OUT: True})
            file.write(json.dumps(row | {"label": label}) + "\n")


def _shown(pipe: int) -> Iterator[str]:
    """Yield the lines that come through a pipe and copy them to stderr; yield "" after each second without any."""
    rest = b""
    while True:
        if not select.select([pipe], [], [], 1.0)[0]:
            yield ""
            continue
        if not (part := os.read(pipe, 1 << 16)):
            return
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace")
            sys.stderr.write(text + "\n")
            yield text


def read_log(lines: Iterable[str], options: Namespace, began: float) -> dict[str, Any]:
    """Return the curve and the seconds of steps that OpenRLHF's log tells.

    Args:
        lines: of the log, as they come. They are read up to the last evaluation, or to the limit of seconds.
        options: the benchmark's.
        began: when OpenRLHF was started.

    Raises:
        EOFError: the log ends before.
    """
    lists = ("curve", "step_seconds", "wall_seconds", "response_tokens", "train_accuracy")
    found: dict[str, Any] = {name: [] for name in lists}
    phases: list[Mapping[str, float]] = []
    first = last = began
    for line in lines:
        if step := _STEP.search(line):
            numbers = _numbers(step[2])
            seconds = numbers["timing/step_total"]
            if not phases:
                first = last = time.time() - seconds
                found["seconds_startup"] = first - began
            found["step_seconds"].append(seconds)
            found["wall_seconds"].append(time.time() - last)
            found["response_tokens"].append(numbers["rollout/response_length_mean"])
            found["train_accuracy"].append(numbers["score"])
            phases.append({name: value for name, value in numbers.items() if name.startswith("timing/")})
            last = time.time()
        elif evaluation := _EVALUATION.search(line):
            step, seconds = int(evaluation[1]), sum(found["step_seconds"])
            accuracy = _numbers(evaluation[2])["eval_default_pass1"]
            found["curve"].append({"step": step, "seconds": seconds, "accuracy": accuracy})
            progress({"openrlhf": found["curve"][-1]})
            last = time.time()
        made_all = bool(found["curve"]) and found["curve"][-1]["step"] + options.eval_steps > options.steps
        if phases and (made_all or time.time() - first > options.openrlhf_seconds):
            return found | {"median": {name: median(each[name] for each in phases) for name in phases[0]}}
    raise EOFError


def _numbers(text: str) -> Mapping[str, float]:
    """Return the numbers in a dict that was printed, by their names."""
    return {name: float(value) for name, value in _NUMBER.findall(text)}
