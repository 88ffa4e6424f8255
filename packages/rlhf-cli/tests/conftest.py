"""What the tests of the commands share."""

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder with the models `policy`, `judge` and `second`; the latter two give scores."""
    from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir

    folder = tmp_path_factory.mktemp("models")
    tiny_model_dir(folder / "policy")
    tiny_reward_model_dir(folder / "judge")
    tiny_reward_model_dir(folder / "second", seed=2, mean=0.5, std=0.0)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The user's folder, with three files of two prompts each, and a reward function."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    for name in ("prompts", "math", "code"):
        rows = [{"input": f"{name} {n}?", "set": f"{name} {n}"} for n in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = "def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0] * len(queries)}\n"
    (tmp_path / "reward.py").write_text(reward)
    return tmp_path


@pytest.fixture
def planner(tmp_path):
    """A function that returns a planner for so many GPUs, of so many GiB, with a scratch folder of its own."""
    from rlhf_cli.commands.plan import Planner, PlanSection

    def make(gpus: int, gib: float | None = None) -> Planner:
        folder = tmp_path / f"scratch-{gpus}-{gib}"
        folder.mkdir()
        return Planner(PlanSection(gpus=gpus, gpu_memory_gb=gib), folder)

    return make
