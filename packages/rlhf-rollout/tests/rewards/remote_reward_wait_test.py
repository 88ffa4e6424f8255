"""How long a remote reward keeps a sample waiting for others to share its request."""

import asyncio
import json

import httpx
import pytest

from record_testing import make_prompt, make_rollout
from rlhf_rollout.rewards.remote import RemoteReward
from simulated import simulate


@pytest.mark.parametrize(("options", "num_requests"), [({"max_wait_s": 30.0}, 1), ({}, 2)])
def test_remote_reward_waits_for_others_as_long_as_told(options, num_requests):
    bodies = []

    def answer(request):
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"rewards": [1.0] * len(bodies[-1]["query"])})

    async def run():
        reward = RemoteReward(["http://host/r"], batch_size=2, transport=httpx.MockTransport(answer), **options)
        prompt = make_prompt("q=")
        one = asyncio.create_task(reward.score(prompt, [make_rollout(prompt, "1")]))
        # By default the first is not kept waiting: it has its answer before a second one comes.
        await asyncio.wait([one], timeout=0.3 if options else 0.9)
        assert one.done() == (not options)
        await reward.score(prompt, [make_rollout(prompt, "2")])
        await one
        await reward.close()

    simulate(run())
    assert len(bodies) == num_requests
