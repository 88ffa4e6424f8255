"""Placement plans: who lives where, and what is refused."""

import pytest

from rlhf_data.errors import ConfigError
from rlhf_train.online.placement import PlacementRequest, plan_placement

PPO = {"actor": 1, "critic": 1, "reference": 1}


def test_on_cpus_all_models_share_one_group_beside_the_engine():
    plan = plan_placement(PlacementRequest(ranks=PPO), 0)
    assert plan.device == "cpu" and plan.colocated and plan.bundles == (0,)
    assert [(group.roles, group.num_ranks) for group in plan.groups] == [(("actor", "critic", "reference"), 1)]
    assert plan.engines.num_ranks == 1


def test_apart_gives_every_model_its_own_gpus():
    request = PlacementRequest(ranks={"actor": 2, "critic": 1, "reference": 1}, num_engines=2, tensor_parallel_size=2)
    plan = plan_placement(request, 8)
    assert plan.bundles == (1, 1, 1, 1, 2, 2) and not plan.colocated and not plan.notes
    assert [group.bundles for group in plan.groups] == [(0, 1), (2,), (3,)]
    assert plan.engines.bundles == (4, 5) and plan.engines.gpus_a_rank == 2
    assert plan.group_of("critic").name == "critic"


def test_colocate_actor_ref_puts_both_in_the_same_processes():
    plan = plan_placement(PlacementRequest(ranks=PPO, colocate_actor_ref=True), 3)
    assert plan.group_of("actor") is plan.group_of("reference")
    assert plan.bundles == (1, 1, 1)


def test_colocate_all_models_shares_every_gpu_with_an_engine():
    request = PlacementRequest(ranks=dict.fromkeys(PPO, 4), num_engines=4, colocate_all_models=True)
    plan = plan_placement(request, 8)
    assert plan.bundles == (1,) * 4 and plan.colocated
    assert plan.groups[0].bundles == plan.engines.bundles == (0, 1, 2, 3)


def test_too_few_gpus_for_models_apart_shares_and_says_so():
    plan = plan_placement(PlacementRequest(ranks=PPO), 1)
    assert plan.colocated and "need 4 GPUs and there are 1" in plan.notes[0]
    assert "note:" in plan.describe()


def test_reward_models_on_cpus_share_the_machine_and_without_them_there_are_none():
    plan = plan_placement(PlacementRequest(ranks=PPO, reward_ranks=2), 0)
    assert plan.scorers.bundles == (0, 0) and plan.bundles == (0,)
    assert [plan.gpu_share(group, 0) for group in plan.all_groups] == [0.0, 0.0, 0.0]
    assert "reward   2 x reward (CPU) in bundle(s) 0, 0" in plan.describe()
    assert plan_placement(PlacementRequest(ranks=PPO), 0).scorers is None


def test_reward_models_apart_get_gpus_of_their_own():
    plan = plan_placement(PlacementRequest(ranks=PPO, reward_ranks=2, tensor_parallel_size=2), 7)
    assert plan.bundles == (1, 1, 1, 2, 1, 1) and not plan.notes
    assert plan.scorers.bundles == (4, 5)
    # Each process has its bundle alone: whole GPUs.
    assert [plan.gpu_share(group, 0) for group in plan.all_groups] == [1.0, 1.0, 1.0, 2.0, 1.0]


def test_reward_models_with_the_critic_take_no_gpus_of_their_own():
    ranks = {"actor": 1, "critic": 2, "reference": 1}
    request = PlacementRequest(ranks=ranks, reward_ranks=2, colocate_critic_reward=True)
    plan = plan_placement(request, 5)
    assert plan.bundles == (1,) * 5 and not plan.colocated and not plan.shares_gpus
    assert plan.scorers.bundles == plan.group_of("critic").bundles == (1, 2)
    assert plan.gpu_share(plan.scorers, 1) == plan.gpu_share(plan.group_of("critic"), 1) == 0.45
    assert plan.gpu_share(plan.group_of("actor"), 0) == plan.gpu_share(plan.engines, 0) == 1.0


def test_reward_models_without_a_critic_to_live_with_get_gpus_of_their_own():
    request = PlacementRequest(ranks={"actor": 1}, reward_ranks=1, colocate_critic_reward=True)
    plan = plan_placement(request, 3)
    assert plan.scorers.bundles == (2,) and plan.bundles == (1, 1, 1)


def test_colocated_reward_models_divide_every_gpu_with_engine_and_trainer():
    request = PlacementRequest(ranks=dict.fromkeys(PPO, 2), num_engines=2, reward_ranks=2, colocate_all_models=True)
    plan = plan_placement(request, 8)
    assert plan.bundles == (1, 1)
    assert plan.scorers.bundles == plan.engines.bundles == plan.groups[0].bundles == (0, 1)
    # 0.9 of a GPU for three processes, and below 1 together.
    assert [plan.gpu_share(group, 1) for group in plan.all_groups] == pytest.approx([0.3] * 3)


def test_too_few_gpus_for_reward_models_apart_shares_and_counts_them():
    plan = plan_placement(PlacementRequest(ranks=PPO, reward_ranks=1), 4)
    assert plan.colocated and "need 5 GPUs and there are 4" in plan.notes[0]
    assert plan.scorers.bundles == (0,)
    critic = PlacementRequest(ranks=PPO, reward_ranks=1, colocate_critic_reward=True)
    assert not plan_placement(critic, 4).colocated


@pytest.mark.parametrize(
    ("request_", "num_gpus", "message"),
    [
        (PlacementRequest(ranks={"actor": 2, "critic": 1}, num_engines=2, colocate_all_models=True), 8, "equally many"),
        (PlacementRequest(ranks={"actor": 2}, num_engines=1, colocate_all_models=True), 8, "--vllm_num_engines 2"),
        (PlacementRequest(ranks={"actor": 4}, num_engines=4, colocate_all_models=True), 2, "4 GPUs asked, 2"),
        (PlacementRequest(ranks={"actor": 0}), 2, "at least 1"),
        (
            PlacementRequest(ranks={"actor": 1, "reference": 2}, colocate_actor_ref=True),
            8,
            "the actor has 1, the reference 2",
        ),
        (PlacementRequest(ranks={"actor": 1}, reward_ranks=-1), 8, "-1 processes"),
        (
            PlacementRequest(ranks=PPO, reward_ranks=2, colocate_critic_reward=True),
            8,
            r"the critic has 1, they have 2\n\nhint: .*--reward_num_nodes",
        ),
        (
            PlacementRequest(ranks={"actor": 1}, reward_ranks=2, colocate_all_models=True),
            8,
            r"actor has 1, \{'reward': 2\}",
        ),
    ],
)
def test_plans_that_cannot_be_are_refused_with_a_hint(request_, num_gpus, message):
    with pytest.raises(ConfigError, match=message):
        plan_placement(request_, num_gpus)
