"""Prompts drawn until enough groups are kept: how many, which ones in whatever order they finish, and the accounts."""

import asyncio
import itertools
import random

import numpy as np
import pytest

from record_testing import make_prompt
from rlhf_data.errors import ConfigError, EngineError
from rlhf_data.records import FinishReason
from rlhf_data.testing import EOS_ID
from rlhf_rollout.agents import SingleTurn
from rlhf_rollout.generator import GroupResult, PromptSupply, generate_groups
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.router import EngineRouter


class ShuffledEngine:
    """Takes a random while for each prompt, another one for each `shuffle`; fails the prompts that end in `fails`."""

    def __init__(self, shuffle=0, *, fails=""):
        self.random = random.Random(shuffle)
        self.fails = fails

    async def generate(self, token_ids, sampling, *, timeout_s=None):
        await asyncio.sleep(self.random.uniform(0.001, 0.02))
        if chr(token_ids[-1]) in self.fails:
            raise EngineError("told to fail")
        completion = Completion.single(np.array([7, EOS_ID]), np.array([-0.5, -0.25]), FinishReason.STOP, 0)
        return [completion] * sampling.num_samples


def workflow_of(engine):
    return SingleTurn(EngineRouter([engine]), str)


def numbered_prompts(count=10**9):
    return (make_prompt(str(number), prompt_id=f"p{number}") for number in range(count))


def supply_of(target, max_drawn, *, kept):
    """A supply of the prompts p0, p1, ..., of which those with a number that ends in a digit of `kept` are kept."""
    prompts = numbered_prompts()
    return PromptSupply(lambda: next(prompts), target, max_drawn, lambda group: group.prompt.prompt_id[-1] in kept)


def run_supply(supply, engine, *, max_in_flight=3, order=None):
    """Return the numbers of all groups by what became of them; the order in which they finish goes to `order`."""
    order = [] if order is None else order
    outcome = {"kept": [], "rejected": [], "failed": []}

    def settle(result):
        kept = supply.settle(result)
        outcome["failed" if result.group is None else "kept" if kept else "rejected"].append(result.group_id)

    async def drain():
        stream = generate_groups(
            supply, workflow_of(engine), SamplingParams(num_samples=2), None, max_in_flight=max_in_flight,
            group_id_prefix="s",
            settle=settle,
        )  # fmt: skip
        order.extend([result.group_id async for result in stream])

    asyncio.run(drain())
    assert sorted(order) == sorted(itertools.chain(*outcome.values()))
    return {what: [int(group_id.removeprefix("s/")) for group_id in sorted(ids)] for what, ids in outcome.items()}


def test_prompt_supply_draws_until_enough_groups_are_kept():
    supply = supply_of(3, 100, kept="258")
    outcome = run_supply(supply, ShuffledEngine())
    # p2, p5 and p8 are the first three to be kept, so nine are drawn.
    assert outcome == {"kept": [2, 5, 8], "rejected": [0, 1, 3, 4, 6, 7], "failed": []}
    assert (supply.num_drawn, supply.num_kept, supply.num_rejected, supply.num_failed) == (9, 3, 6, 0)


def test_prompt_supply_same_groups_whatever_order_they_finish_in():
    outcomes, orders = [], set()
    for shuffle in range(8):
        order = []
        supply = supply_of(6, 100, kept="13579")
        engine = ShuffledEngine(shuffle, fails="4")
        outcomes.append(run_supply(supply, engine, max_in_flight=1 + shuffle % 4, order=order))
        orders.add(tuple(order))
    # Odd ones are kept, the sixth of them is 11; p4 fails twice.
    assert outcomes[0] == {"kept": [1, 3, 5, 7, 9, 11], "rejected": [0, 2, 6, 8, 10], "failed": [4]}
    assert outcomes == [outcomes[0]] * 8
    assert len(orders) > 1


def test_prompt_supply_keeping_everything_draws_no_more_than_its_target():
    supply = supply_of(5, 50, kept="0123456789")
    assert run_supply(supply, ShuffledEngine(0), max_in_flight=50)["kept"] == [0, 1, 2, 3, 4]
    assert supply.num_drawn == 5


def test_prompt_supply_keeping_nothing_ends_at_its_cap():
    supply = supply_of(2, 7, kept="")
    assert run_supply(supply, ShuffledEngine())["rejected"] == list(range(7))
    assert (supply.num_drawn, supply.num_kept) == (7, 0)


def test_prompt_supply_failed_groups_are_replaced_and_counted():
    supply = supply_of(2, 10, kept="0123456789")
    assert run_supply(supply, ShuffledEngine(0, fails="01")) == {"kept": [2, 3], "rejected": [], "failed": [0, 1]}
    assert (supply.num_drawn, supply.num_kept, supply.num_rejected, supply.num_failed) == (4, 2, 0, 2)


def test_prompt_supply_ends_with_the_prompts():
    prompts = numbered_prompts(3)
    supply = PromptSupply(lambda: next(prompts), 10, 10, lambda group: True)
    assert run_supply(supply, ShuffledEngine())["kept"] == [0, 1, 2]
    assert supply.num_drawn == 3


def test_prompt_supply_has_more_only_after_a_rejection():
    supply = supply_of(1, 10, kept="1")
    first = next(supply)
    assert list(supply) == []  # one under way, one wanted
    assert supply.settle(GroupResult("s/0", first, None, "failed")) is False
    assert next(supply).prompt_id == "p1"
    assert list(supply) == []


@pytest.mark.parametrize(("target", "max_drawn"), [(0, 5), (6, 5), (-1, -1)])
def test_prompt_supply_impossible_numbers_are_refused(target, max_drawn):
    with pytest.raises(ConfigError, match=r"1 <= target <= max_drawn must hold"):
        supply_of(target, max_drawn, kept="")


def test_generate_groups_settles_a_result_before_it_is_yielded_and_before_more_is_asked():
    events = []

    def prompts():
        for prompt in numbered_prompts(4):
            events.append(f"asked {prompt.prompt_id}")
            yield prompt

    async def drain():
        stream = generate_groups(
            prompts(), workflow_of(ShuffledEngine()), SamplingParams(), None, max_in_flight=1, group_id_prefix="s",
            settle=lambda result: events.append(f"settled {result.prompt.prompt_id}"),
        )  # fmt: skip
        async for result in stream:
            events.append(f"yielded {result.prompt.prompt_id}")

    asyncio.run(drain())
    assert events[:5] == ["asked p0", "asked p1", "settled p0", "yielded p0", "asked p2"]
    assert sorted(events[5:]) == sorted(
        ["asked p3", *(f"{what} p{n}" for n in (1, 2, 3) for what in ("settled", "yielded"))]
    )
