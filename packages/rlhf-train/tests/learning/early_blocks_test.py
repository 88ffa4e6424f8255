"""What a block of rollout groups holds, and which models run on it; the ranks note what they are sent."""

import dataclasses

import numpy as np
import pytest

from rlhf_data.records import (
    Episode,
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Span,
    SpanSource,
    Verdict,
    VerdictKind,
)
from rlhf_train.learning.forwards import BlockForwards
from rlhf_train.learning.ranks import RankSet
from trainer_testing import tiny_job, with_routes


@pytest.fixture
def job(tmp_path):
    """A run whose blocks have two groups of four rollouts."""
    job = tiny_job("model", tmp_path, early_forwards=True)
    return dataclasses.replace(job, batch=dataclasses.replace(job.batch, micro_rollout_batch_size=8))


def rollouts_of(group_id: str, prompt: list[int], lengths: range) -> list[Rollout]:
    """Rollouts with responses of these lengths."""
    verdict = Verdict(VerdictKind.OK, 1.0)
    return [
        Rollout(
            f"{group_id}/{index}",
            group_id,
            (Span(SpanSource.PROMPT, prompt), Span(SpanSource.POLICY, [3] * n, [-1.0] * n, policy_version=0)),
            FinishReason.STOP,
            verdict=verdict,
        )
        for index, n in enumerate(lengths)
    ]


def new_block(*, routed: bool = False) -> list[RolloutGroup]:
    """Two prompts of three tokens, and responses of 1, 3, 5, 7 and of 2, 4, 6, 8 tokens."""
    block = []
    for number in range(2):
        group_id = f"step1/{number:05d}"
        rollouts = rollouts_of(group_id, [7 + number, 8, 9], range(1 + number, 9, 2))
        if routed:  # the first of all gets none
            rollouts = with_routes([rollouts[0], *rollouts])[1:]
        episodes = tuple(Episode(rollout.rollout_id, group_id, (rollout,)) for rollout in rollouts)
        block.append(RolloutGroup(group_id, Prompt(f"p{number}", np.array([7 + number, 8, 9]), "p"), episodes))
    return block


def sent_by(job, block, *sets):
    """Return what is sent of a block to sets of ranks that have these roles each."""
    sent = []
    ranks = []
    for roles in sets:
        ranks.append(RankSet(roles, range(1)))
        ranks[-1].start_on = lambda rank, method, *arguments: sent.append(arguments) or (None, None)
    forwards = BlockForwards(job, ranks)
    for group in block:
        forwards.settle(group.group_id, group)
    return sent


@pytest.mark.parametrize("is_shared", [False, True])
def test_rollouts_that_share_a_prompt_run_together(job, is_shared):
    models = {
        role: dataclasses.replace(spec, packing=True, share_prompts=is_shared) for role, spec in job.models.items()
    }
    [(_, _, columns, plan)] = sent_by(dataclasses.replace(job, models=models), new_block(), ("actor",))
    lengths = columns.lengths.tolist()
    if is_shared:  # in an order that the seed gives
        assert sorted([sorted(lengths[:4]), sorted(lengths[4:])]) == [[4, 6, 8, 10], [5, 7, 9, 11]]
    else:
        assert lengths == [11, 10, 9, 8, 7, 6, 5, 4]
    assert plan.forward_batches == (tuple(range(8)),)


def test_models_whose_columns_have_no_use_do_not_run(job):
    plain = dataclasses.replace(job.algorithm, old_logprobs="rollout")
    job = dataclasses.replace(job, algorithm=plain)
    sent = sent_by(job, new_block(), ("actor", "critic"), ("reference",))
    assert [part[:2] for part in sent] == [(["critic"], ["values"]), (["reference"], ["ref_logprobs"])]
    sent = sent_by(job, new_block(), ("critic", "reference"), ("actor",))  # which gets no block
    assert [roles for roles, *_ in sent] == [["critic", "reference"]]


def test_experts_that_engines_chose_go_with_the_actor_alone(job):
    models = job.models | {"actor": dataclasses.replace(job.models["actor"], routing_replay=True)}
    replayed = dataclasses.replace(job, models=models)
    sent = sent_by(replayed, new_block(routed=True), ("actor", "critic"), ("reference",))
    assert [columns.routes is not None for _, _, columns, _ in sent] == [True, False]
    sent = sent_by(job, new_block(routed=True), ("actor",), ("reference", "critic"))
    assert [columns.routes is not None for _, _, columns, _ in sent] == [False, False]
