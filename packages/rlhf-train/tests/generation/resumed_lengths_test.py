"""Lengths of what is trained are those that were asked for, however often the trainer dies and continues; simulated."""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest

from rlhf_data.records import Prompt, Verdict, VerdictKind
from rlhf_rollout.agents.single_turn import SingleTurn
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.engines.spec import EngineSpec
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter
from rlhf_train.generation.service import GenerationService
from rlhf_train.generation.stream import SampleStream
from rlhf_train.run.ledger import Ledger
from rlhf_train.run.saved.state import read_state, write_state
from simulated import simulate

LONGEST = 40
NUM_BATCHES = 60
BATCH_SIZE = 16
SPEC = EngineSpec(model="fake", request_timeout_s=1e6, control_timeout_s=1e6, max_model_len=1024)


class Scores:
    async def score(self, prompt, rollouts):
        return [Verdict(VerdictKind.OK, 1.0) for _ in rollouts]


class Trainer:
    """A process that generates while it learns. Answers have a token per second, 1 to `LONGEST`, all as likely."""

    def __init__(self, rng, num_samples, staleness, state=None):
        self.rng = rng
        self.job = SimpleNamespace(
            prompts=tuple(Prompt(f"p{number}", np.array([number + 1]), "p") for number in range(50)),
            prompts_digest="",
            batch=SimpleNamespace(rollout_batch_size=BATCH_SIZE),
            sampling=SamplingParams(num_samples=num_samples, max_tokens=LONGEST + 10),
            seed=1,
            max_staleness=staleness,
            max_in_flight=999,
            dynamic_sampling=None,
            difficulty=None,
            reuse=None,
        )
        self.engine = FakeEngine(SPEC, script=self.write, token_latency_s=1.0)
        self.ledger = Ledger()
        workflow = SingleTurn(EngineRouter([self.engine]), lambda token_ids: "")
        stream = SampleStream(BATCH_SIZE, NUM_BATCHES, staleness)
        self.service = GenerationService(self.job, workflow, Scores(), stream, lambda *parts: None)
        if state is not None:
            self.ledger.restore(state["ledger"])
            self.service.restore(state["rollouts"])
            self.engine.policy_version = state["version"]

    def write(self, tokens, seed):
        num_written = len(tokens) - 1
        return [7] * (int(self.rng.integers(num_written + 1, LONGEST + 1)) - num_written - 1) + [0]

    async def step(self, train_s):
        """Return the rollouts that a step trains."""
        drawn = await self.service.next_batch()
        rollouts = [rollout for group in drawn.kept for rollout in group.rollouts]
        self.ledger.add(requested=drawn.num_requested, trained=len(rollouts))
        self.ledger.check(outstanding=self.service.num_outstanding)
        await asyncio.sleep(train_s)
        self.engine.policy_version += 1
        self.service.release(self.engine.policy_version)
        return rollouts

    def checkpoint(self):
        parts = {"ledger": self.ledger.state(), "rollouts": self.service.state()}
        with TemporaryDirectory() as folder:
            write_state(Path(folder), {"version": self.engine.policy_version, **parts})
            return read_state(Path(folder))


async def run(num_samples, staleness, deaths):
    """Return what a run trains whose process dies right after a checkpoint, with probability `deaths` a step."""
    rng = np.random.default_rng(7)
    trainer = Trainer(rng, num_samples, staleness)
    trained = []
    num_deaths = 0
    for _ in range(NUM_BATCHES):
        trained += await trainer.step(train_s=rng.uniform(4, 12))
        if rng.random() < deaths:
            state = trainer.checkpoint()
            await trainer.service.close()
            trainer = Trainer(rng, num_samples, staleness, state)
            num_deaths += 1
    return trained, num_deaths


@pytest.mark.parametrize(("num_samples", "staleness", "deaths"), [(4, 2, 0.5), (1, 2, 1.0), (1, 0, 0.5)])
def test_lengths_of_what_is_trained_are_those_that_were_asked_for(num_samples, staleness, deaths):
    trained, num_deaths = simulate(run(num_samples, staleness, deaths))
    lengths = np.array([rollout.num_response_tokens for rollout in trained])
    assert len(lengths) == NUM_BATCHES * BATCH_SIZE * num_samples
    assert num_deaths > 0
    found = np.searchsorted(np.sort(lengths), np.arange(1, LONGEST + 1), side="right") / len(lengths)
    distance = np.abs(found - np.arange(1, LONGEST + 1) / LONGEST).max()
    # A sample of that size is farther away (Kolmogorov-Smirnov) in one of a hundred cases.
    assert distance < 1.63 / np.sqrt(len(lengths)), f"mean length {lengths.mean():.1f} of {(LONGEST + 1) / 2}"
