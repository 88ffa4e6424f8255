"""Fixtures that make a run whose engine and ranks are in this process."""

import dataclasses

import numpy as np
import pytest


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """The folder of a tiny model."""
    from rlhf_models.testing import tiny_model_dir

    return str(tiny_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make_run(tmp_path, model_path, monkeypatch):
    """Return a function that makes a run of sixteen prompts per step, eight of them even, four samples each."""
    from online_fakes import FakeRanks, Listener, Run, World
    from rlhf_train.generation.run_spec import RewardSpec
    from rlhf_train.generation.scoring import make_reward
    from rlhf_train.online import assemble
    from rlhf_train.run.recorder import Recorder
    from rlhf_train.run.timeline import Timeline
    from trainer_testing import tiny_job

    for module in ("forwards", "learner", "ranks"):
        monkeypatch.setattr(f"rlhf_train.learning.{module}.wait", lambda references, **_: list(references))
    runs = []

    def make(reward=None, zero_stage=0, enable_sleep=False, trace=None, **changes):
        job = tiny_job(model_path, tmp_path, eval_prompts=())
        models = {role: dataclasses.replace(model, zero_stage=zero_stage) for role, model in job.models.items()}
        prompts = tuple(
            dataclasses.replace(prompt, token_ids=np.array([index, 1])) for index, prompt in enumerate(job.prompts)
        )
        batch = dataclasses.replace(job.batch, rollout_batch_size=16)
        engine = dataclasses.replace(job.engine, enable_sleep=enable_sleep)
        fields = {"models": models, "engine": engine, "prompts": prompts, "batch": batch, "num_steps": 3}
        job = dataclasses.replace(job, **{**fields, **changes})
        world, listener = World(), Listener()
        recorder = Recorder(job.save_path, "", record_format=job.record_format)
        if isinstance(reward, RewardSpec):
            job = dataclasses.replace(job, reward=reward)
            reward = None
        spec = dataclasses.replace(job.reward, sources=()) if job.replay else job.reward
        reward = reward or make_reward(spec, [], recorder.folder / "reward.log")
        controller = assemble(job, [world], [FakeRanks(world)], reward, recorder, listener, Timeline(trace=trace))
        runs.append(Run(job, world, listener, recorder, controller))
        return runs[-1]

    yield make
    for run in runs:
        run.controller.rollouts.close()
        run.recorder.close()
