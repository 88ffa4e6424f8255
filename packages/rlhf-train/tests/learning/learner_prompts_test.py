"""Prompts that responses share, from the rollouts of a step to a rank's batches."""

import dataclasses
import itertools

import numpy as np
import pytest

from online_fakes import LoggedRanks
from rlhf_data.records import Span, SpanSource
from rlhf_train.learning.columns import RolloutColumns
from rlhf_train.learning.experience import Experience
from rlhf_train.learning.learner import Learner
from trainer_testing import random_rollouts, tiny_job


def rollouts_of_three_prompts():
    """Twelve rollouts, of prompts with 3, 4 and 5 tokens in turn."""
    prompts = [Span(SpanSource.PROMPT, np.arange(length, 2 * length)) for length in (3, 4, 5)]
    return [
        dataclasses.replace(rollout, spans=(prompts[index % 3], *rollout.spans[1:]))
        for index, rollout in enumerate(random_rollouts(12, vocab_size=50))
    ]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.usefixtures("results_stand_for_references")
def test_rollouts_of_a_prompt_stay_together_if_they_share_it(tmp_path, is_shared):
    job = tiny_job("model", tmp_path)
    models = {
        role: dataclasses.replace(spec, packing=True, share_prompts=is_shared) for role, spec in job.models.items()
    }
    ranks = LoggedRanks([], "actor", "critic", "reference")
    rollouts = rollouts_of_three_prompts()
    Learner(dataclasses.replace(job, models=models), [ranks]).deal(rollouts, step=1)
    ((columns, plan, _),) = ranks.shards
    lengths = [len(rollouts[row].spans[0].token_ids) for row in plan.rows]
    changes = sum(one != other for one, other in itertools.pairwise(lengths))
    if is_shared:
        # Two prompts at most change within a mini-batch; the border of mini-batches may cut a prompt.
        assert changes <= 2 + len(plan.mini_batches)
    else:
        assert changes > 2 + len(plan.mini_batches)
    assert Experience(columns).prompt_lengths == lengths


def test_prompt_lengths_end_before_the_first_token_of_the_policy():
    rollouts = random_rollouts(12, vocab_size=50)
    empty = dataclasses.replace(rollouts[0], spans=rollouts[0].spans[:1])
    told = Span(SpanSource.ENVIRONMENT, np.array([7, 8]))
    rollouts[3] = dataclasses.replace(rollouts[3], spans=(rollouts[3].spans[0], told, *rollouts[3].spans[1:]))
    experience = Experience(RolloutColumns.of([*rollouts, empty], [0.0] * 13))
    expected = [len(rollout.spans[0].token_ids) + 2 * (rollout is rollouts[3]) for rollout in rollouts]
    for rollout, length in zip([*rollouts, empty], [*expected, empty.num_tokens], strict=True):
        assert rollout.tokens_before_policy.tolist() == rollout.token_ids[:length].tolist()
    assert experience.prompt_lengths == [*expected, empty.num_tokens]
    experience.restrict(experience.loss_mask & False)  # dropped tokens do not move the end of a prompt
    assert experience.prompt_lengths == [*expected, empty.num_tokens]
    assert Experience(RolloutColumns.of([], [])).prompt_lengths == []
