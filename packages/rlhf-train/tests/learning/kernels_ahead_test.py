"""Passes on models of one layer, and the processes that run them beside a trainer's start."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from rlhf_data.errors import ConfigError
from rlhf_models.loading import load_actor
from rlhf_models.lora import LoraSpec
from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.learning import kernels_ahead
from rlhf_train.learning.kernels_ahead import compiled_ahead, is_worth_it
from rlhf_train.specs import ModelSpec, OptimizerSpec
from trainer_testing import tiny_job

ROLES = ("actor", "critic")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "actor": str(tiny_model_dir(folder / "actor")),
        "critic": str(tiny_reward_model_dir(folder / "critic")),
        "reference": str(tiny_model_dir(folder / "reference", seed=1)),
    }


@pytest.fixture
def job(paths, tmp_path):
    frozen = ModelSpec(path=paths["reference"], zero_stage=0, packing=True, torch_compile="auto")
    optimizer = OptimizerSpec(learning_rate=1e-2, scheduler="constant")
    models = {role: dataclasses.replace(frozen, path=paths[role], optimizer=optimizer) for role in ROLES}
    return tiny_job(paths["actor"], tmp_path, models=models | {"reference": frozen})


def test_one_layer_is_the_first_layer_of_the_model_with_all_other_weights(paths, tmp_path):
    found = load_actor(kernels_ahead.one_layer(paths["actor"], tmp_path / "one"), dtype="float32").state_dict()
    whole = load_actor(paths["actor"], dtype="float32").state_dict()
    assert set(found) == {name for name in whole if "layers." not in name or "layers.0." in name}
    assert len(found) < len(whole)
    assert all(torch.equal(weight, whole[name]) for name, weight in found.items())


def test_one_layer_keeps_the_kind_of_the_first_layer_alone(paths, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"num_hidden_layers": 2, "layer_types": ["full", "sliding"], "a": 1}')
    config = json.loads((kernels_ahead.one_layer(str(source), tmp_path / "one") / "config.json").read_text())
    assert config == {"num_hidden_layers": 1, "layer_types": ["full"], "a": 1}
    (source / "config.json").write_text('{"text_config": {"num_hidden_layers": 2}}')
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        kernels_ahead.one_layer(str(source), tmp_path / "two")


class Noting(kernels_ahead.OneLayerWorker):
    """Notes each pass: its role, whether it is for a gradient, and the lengths of its sequences."""

    made: ClassVar[list[kernels_ahead.OneLayerWorker]] = []

    def __init__(self, *args, **kwargs):
        self.passes = []
        super().__init__(*args, **kwargs)
        Noting.made.append(self)
        models = {role: engine.module for role, engine in self.engines.items()} | self._frozen
        for role, model in models.items():
            if isinstance(model, torch.nn.Module):
                backbone = model.model.base_model
                backbone.register_forward_pre_hook(
                    lambda module, args, words, role=role: self.passes.append(
                        (role, torch.is_grad_enabled(), words["input_ids"].shape[1], len(module.layers))
                    ),
                    with_kwargs=True,
                )


@pytest.fixture
def noted(monkeypatch):
    monkeypatch.setattr(kernels_ahead, "OneLayerWorker", Noting)
    monkeypatch.setattr(Noting, "made", [])
    monkeypatch.setattr(kernels_ahead, "_MAX_PASS_TOKENS", 128)  # two rollouts of 64 tokens
    return Noting.made


def test_passes_run_every_model_of_the_step_with_one_layer_and_the_attention_of_torch(job, tmp_path, noted):
    kernels_ahead.run_part("passes", job.models, job, tmp_path / "models")
    [worker] = noted
    assert worker.passes == [
        *(("actor", True, 128, 1), ("actor", True, 127, 1)),
        *(("critic", True, 128, 1), ("critic", True, 127, 1)),
        *((role, False, 255, 1) for role in ("actor", "critic", "reference")),
    ]
    for engine in worker.engines.values():
        assert engine.module.model.config._attn_implementation == "rlhf_packed"
        assert all(weight.grad is None for weight in engine.module.parameters())


def test_attention_runs_the_layers_of_trained_models_forward_and_backward(job, tmp_path, noted, monkeypatch):
    wanted = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kwargs: wanted.append(grad(*args, **kwargs)))
    kernels_ahead.run_part("attention", job.models, job, tmp_path / "models")
    [worker] = noted
    assert worker.passes == [(role, True, length, 1) for role in ROLES for length in (128, 127)]
    assert worker._specs["actor"].attn_implementation == "auto"  # as in the trainer
    assert len(wanted) == 4
    names = [name for name, _ in worker.engines["actor"].module.model.base_model.named_parameters()]
    used = [name for name, part in zip(names, wanted[0], strict=True) if part.abs().sum() > 0]
    assert used == ["layers.0.self_attn.v_proj.bias"]  # all tokens are the padding, whose embedding is zero


def test_adapters_are_trained_on_one_layer_and_serve_as_their_own_reference(job, tmp_path, noted):
    pytest.importorskip("peft")
    actor = dataclasses.replace(job.models["actor"], lora=LoraSpec(rank=2))
    models = job.models | {"actor": actor, "reference": dataclasses.replace(actor, lora=None, optimizer=None)}
    kernels_ahead.run_part("passes", models, job, tmp_path / "models")
    [worker] = noted
    assert [role for role, has_grad, *_ in worker.passes if not has_grad] == ["actor", "critic", "actor"]
    assert any("lora_A" in name for name, _ in worker.engines["actor"].module.named_parameters())


def test_a_teacher_that_is_the_actors_average_runs_as_the_actor_does(job, tmp_path, noted):
    frozen = job.models["reference"]
    average = dataclasses.replace(frozen, is_average=True)
    models = {"actor": job.models["actor"], "teacher": average, "teacher 2": frozen}
    algorithm = make_algorithm("reinforce", kl_coef=0.0, teacher_coef=0.5)
    plan = dataclasses.replace(job.plan, trainers=(dataclasses.replace(job.plan.trainers[0], roles=tuple(models)),))
    job = dataclasses.replace(job, models=models, algorithm=algorithm, ema_beta=0.9, plan=plan)
    kernels_ahead.run_part("passes", models, job, tmp_path / "models")
    [worker] = noted
    assert [role for role, has_grad, *_ in worker.passes if not has_grad] == ["actor", "teacher 2"]


def on_gpus(job, *nodes, **engine):
    """The job as if it ran on GPUs, with the ranks of all models on these nodes and an engine beside."""
    engine = dataclasses.replace(job.engine, **{"gpu_memory_utilization": 0.3, "enable_sleep": False} | engine)
    processes = SimpleNamespace(places=[SimpleNamespace(node=node, cards=[0]) for node in nodes])
    plan = SimpleNamespace(device="cuda", trainers_of=lambda role: processes, engines=SimpleNamespace(cards=[0]))
    return SimpleNamespace(models=job.models, plan=plan, engine=engine)


def test_it_is_worth_it_once_per_node_for_layers_that_are_compiled_where_there_is_room(job, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    placed = on_gpus(job, 0, 0, 1, 1)
    assert [is_worth_it(job.models, placed, rank) for rank in range(4)] == [True, False, True, False]
    for changes in ({"packing": False}, {"torch_compile": "off"}, {"zero_stage": 3}):
        models = {role: dataclasses.replace(spec, **changes) for role, spec in job.models.items()}
        assert not is_worth_it(models, placed, 0)
    crowded = {"gpu_memory_utilization": 0.5}
    assert not is_worth_it(job.models, on_gpus(job, 0, **crowded), 0)
    assert is_worth_it(job.models, on_gpus(job, 0, **crowded, enable_sleep=True), 0)  # the engine starts later
    assert not is_worth_it(job.models, job, 0)  # on a CPU
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(7))
    assert not is_worth_it(job.models, placed, 0)


def test_each_part_has_a_process_that_gets_the_models_and_the_job_and_ends_with_the_block(job, monkeypatch):
    monkeypatch.setattr(kernels_ahead, "is_worth_it", lambda *args: True)
    started = []
    start = subprocess.Popen

    def note(command, *, stdin, **options):
        started.append((command, pickle.load(stdin), options["env"]))
        Path(options["env"]["TMPDIR"], "left").touch()  # by a process that is killed
        return start([sys.executable, "-c", "import time; time.sleep(1000)"])

    processes = []
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: processes.append(note(*a, **k)) or processes[-1])
    with pytest.raises(ZeroDivisionError), compiled_ahead({"actor": job.models["actor"]}, job, 0):
        1 / sum(process.poll() is not None for process in processes)
    assert [process.returncode for process in processes] == [-9, -9]
    [folder] = {environ["TMPDIR"] for _, _, environ in started}
    assert not Path(folder).exists()
    for part, (command, given, environ) in zip(("attention", "passes"), started, strict=True):
        assert command == [sys.executable, "-P", "-m", "rlhf_train.learning.kernels_ahead"]
        assert given[:2] == (part, {"actor": job.models["actor"]}) and given[3] == os.getpid()
        assert given[2].sampling == job.sampling
        assert set(filter(None, sys.path)) == set(environ["PYTHONPATH"].split(os.pathsep))


def test_a_process_that_cannot_start_is_none_and_ends_those_that_did(job, monkeypatch, caplog):
    monkeypatch.setattr(kernels_ahead, "is_worth_it", lambda *args: True)
    start, processes = subprocess.Popen, []

    def start_one(command, **options):
        if processes:
            raise OSError("no more processes")
        processes.append(start([sys.executable, "-c", "import time; time.sleep(1000)"]))
        return processes[0]

    monkeypatch.setattr(subprocess, "Popen", start_one)
    done = []
    with caplog.at_level("INFO"), compiled_ahead(job.models, job, 0):
        done.append("the trainer started")
    assert done and processes[0].poll() == -9
    assert "no more processes" in caplog.text


PROGRAM = """
import torch
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.learning import kernels_ahead

torch.cuda.set_per_process_memory_fraction = lambda share: None
run = kernels_ahead.run_passes
kernels_ahead.run_passes = lambda worker, roles, *rest, **options: (run(worker, roles, *rest, **options), print(*roles))
kernels_ahead.main()
"""


def start_program(given, parent):
    """Start the program with these arguments; what it prints comes back."""
    with tempfile.TemporaryFile() as file:
        pickle.dump((*given, parent), file)
        file.seek(0)
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=file, env=environ, **pipes)


def test_the_program_runs_the_part_that_its_input_names(job):
    with start_program(("passes", job.models, job), os.getpid()) as program:
        out, err = program.communicate(timeout=300)
    assert (program.returncode, out.split()) == (0, list(job.models)), err


def test_the_program_ends_when_the_process_that_started_it_has_ended(job):
    with start_program(("passes", job.models, job), os.getpid() + 1) as program:  # not the parent that it finds
        out, _ = program.communicate(timeout=300)
    assert (program.returncode, out) == (1, "")
