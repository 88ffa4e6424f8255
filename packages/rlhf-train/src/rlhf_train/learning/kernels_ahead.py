"""Processes that compile the kernels of a step while a trainer loads its models and compiles their layers.

What Triton and FlashAttention 4 compile is kept on the disk, where the trainer finds it. Compiled by the trainer after
its layers, it would take as long again. The processes run the passes of a step on models of one layer, which run the
kernels of the trainer's models without their memory and time.
"""

import json
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from rlhf_data.errors import ConfigError
from rlhf_data.own_code import is_trusted, trusted
from rlhf_data.pretrained import located_model
from rlhf_models.attention.packed import PACKED_ATTENTION, choose_attention
from rlhf_models.backbone import last_hidden_state
from rlhf_models.loading import load_config
from rlhf_rollout.host import free_port
from rlhf_train.learning.learning_spec import LearningSpec
from rlhf_train.learning.rehearsal import Rehearsed, made_up_step, run_passes, share_beside_engines
from rlhf_train.learning.worker import TrainWorker
from rlhf_train.run.models import load_model, without_dropout
from rlhf_train.specs import ModelSpec

PARTS = ("attention", "passes")  # see `run_part`
MEMORY_SHARE = 0.03  # of the GPU: what PyTorch may take of it in each process
_MIN_CORES = 8  # on fewer, the processes would slow the trainer and the engines down
_LEAST_ROOM = 0.5  # of the GPU's memory, beside engines that start meanwhile; see `MEMORY_SHARE`
_CHECK_S = 1.0
_MAX_PASS_TOKENS = 4096

logger = logging.getLogger(__name__)


@contextmanager
def compiled_ahead(models: Mapping[str, ModelSpec], job: LearningSpec, rank: int) -> Iterator[None]:
    """Compile kernels beside what a `with` block does, if there is time for it. What is left at its end is ended.

    If that is not possible, the trainer compiles them itself.
    """
    with ExitStack() as ends:
        if is_worth_it(models, job, rank):
            try:
                folder = ends.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
                for part in PARTS:
                    ends.enter_context(_process(part, models, job, folder))
            except (OSError, pickle.PicklingError, AttributeError, TypeError) as error:
                logger.info("no kernels are compiled beside the start of the trainer: %s", error)
        yield


def is_worth_it(models: Mapping[str, ModelSpec], job: LearningSpec, rank: int) -> bool:
    """Return whether `rank` is the first of its rank set on its node, has layers to compile, and has cores and memory
    to spare."""
    if job.plan.device == "cpu" or len(os.sched_getaffinity(0)) < _MIN_CORES:
        return False
    role, spec = next(iter(models.items()))
    nodes = [place.node for place in job.plan.trainers_of(role).places]
    is_first = nodes.index(nodes[rank]) == rank
    has_room = share_beside_engines(job.plan, job.engine, role, rank) >= _LEAST_ROOM
    return is_first and has_room and spec.packing and spec.may_compile_ahead


@contextmanager
def _process(part: str, models: Mapping[str, ModelSpec], job: LearningSpec, folder: str) -> Iterator[None]:
    """Run `main` in another process for the time of a `with` block, with its files in `folder`."""
    with tempfile.TemporaryFile() as given:
        pickle.dump((part, dict(models), job, os.getpid()), given)
        given.seek(0)
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": folder}
        command = [sys.executable, "-P", "-m", "rlhf_train.learning.kernels_ahead"]  # -P: without the working directory
        silent = subprocess.DEVNULL
        child = subprocess.Popen(command, stdin=given, stdout=silent, stderr=silent, env=environ)
    with child:  # waits for its end
        try:
            yield
        finally:
            child.kill()


def main() -> None:
    """Run what standard input says, as long as the process lives that asked for it."""
    part, models, job, parent = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE)
    with tempfile.TemporaryDirectory() as folder:
        run_part(part, models, job, Path(folder))


def _end_with(parent: int) -> None:
    """End this process when its parent has ended, which may have been killed."""
    while os.getppid() == parent:
        time.sleep(_CHECK_S)
    os._exit(1)


def run_part(
    part: Literal["attention", "passes"], models: Mapping[str, ModelSpec], job: LearningSpec, folder: Path
) -> None:
    """Run a part of the passes of a step, on few tokens.

    Args:
        part: "attention" is the layers of trained models, forward and backward. "passes" is all passes, but with the
            attention of torch, for which nothing is compiled.
        models: of the trainer, by role.
        job: the run.
        folder: an empty one, for the models of one layer.

    Raises:
        ConfigError: a model is not in a folder of this machine, or its config does not say how many layers it has.
    """
    paths = dict.fromkeys(spec.path for spec in models.values())
    folders = {path: str(one_layer(path, folder / str(number))) for number, path in enumerate(paths)}
    shallow = {path: trusted(there, is_trusted(path)) for path, there in folders.items()}
    options: dict[str, Any] = {"torch_compile": "off"}
    if part == "passes" and all(_has_packed_attention(path) for path in paths):
        options["attn_implementation"] = PACKED_ATTENTION
    # An average runs as the actor does.
    own = {role: spec for role, spec in models.items() if not spec.is_average}
    specs = {role: replace(spec, path=shallow[spec.path], **options) for role, spec in own.items()}
    worker = OneLayerWorker(
        specs,
        job.algorithm,
        temperature=job.sampling.temperature,
        rank=0,
        num_ranks=1,
        master=("127.0.0.1", free_port()),
        device=job.plan.device,
        seed=job.seed,
    )
    if part == "passes":
        run_passes(worker, list(specs), job, most_tokens=_MAX_PASS_TOKENS)
    else:
        worker.run_layers(job)


def _has_packed_attention(path: str) -> bool:
    """Return whether a model is packed by PACKED_ATTENTION: one with soft caps or sinks has an attention of its own."""
    return choose_attention(load_config(path), "auto", packing=True) == PACKED_ATTENTION


def one_layer(path: str, folder: Path) -> Path:
    """Make `folder` that of a model with the first layer of the model in the folder `path`; return it."""
    source = Path(located_model(path)[0])
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) if source.is_dir() else {}
    if "num_hidden_layers" not in config:
        raise ConfigError(f"{path} is no folder of a model whose config has num_hidden_layers")
    config["num_hidden_layers"] = 1
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:1]
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class OneLayerWorker(TrainWorker):
    """A rank alone with its models, which trains them without DeepSpeed and drops the gradients."""

    def _load(self, role: str, spec: ModelSpec, device: str, **options: Any) -> None:
        if spec.optimizer is None:
            super()._load(role, spec, device, **options)
            return
        self._balances[role] = None
        self.engines[role] = Rehearsed(without_dropout(load_model(role, spec)).to(self._device))

    def run_layers(self, job: LearningSpec) -> None:
        """Run the layers of each trained model on a made-up step, forward and backward."""
        columns, plan = made_up_step(job, most_tokens=_MAX_PASS_TOKENS)
        self.load_rollouts(columns, plan)
        for role, engine in self.engines.items():
            model = engine.module
            layers = model.model.base_model
            trained = [weight for weight in layers.parameters() if weight.requires_grad]
            for rows in plan.mini_batches[0].micro_batches:
                hidden = last_hidden_state(layers, self._batch(role, rows))
                torch.autograd.grad(hidden.sum(), trained, allow_unused=True)


if __name__ == "__main__":
    with suppress(ConfigError, torch.OutOfMemoryError):  # the trainer then compiles by itself
        main()
