"""Placement plans: who lives where, and what is refused."""

from dataclasses import replace

import pytest

from rlhf_data.errors import ConfigError
from rlhf_train.online.placement import PlacementRequest, gpus_needed, plan_placement

PPO = {"actor": 1, "critic": 1, "reference": 1}


def test_on_cpus_all_models_share_one_group_beside_the_engine():
    plan = plan_placement(PlacementRequest(ranks=PPO), 0)
    assert plan.device == "cpu" and plan.colocated and plan.bundles == (0,)
    assert [(group.roles, group.num_ranks) for group in plan.trainers] == [(("actor", "critic", "reference"), 1)]
    assert plan.engines.num_ranks == 1


def test_apart_gives_every_model_its_own_gpus():
    request = PlacementRequest(ranks={"actor": 2, "critic": 1, "reference": 1}, num_engines=2, tensor_parallel_size=2)
    plan = plan_placement(request, 8)
    assert plan.bundles == (1, 1, 1, 1, 2, 2) and not plan.colocated and not plan.notes
    assert [group.bundles for group in plan.trainers] == [(0, 1), (2,), (3,)]
    assert plan.engines.bundles == (4, 5) and plan.engines.gpus_per_rank == 2
    assert plan.trainers_of("critic").name == "critic"


def test_teacher_has_gpus_of_its_own_unless_it_shares():
    plan = plan_placement(PlacementRequest(ranks={"actor": 1, "reference": 1, "teacher": 2}), 5)
    assert plan.trainers_of("teacher").bundles == (2, 3) and plan.bundles == (1,) * 5
    together = plan_placement(PlacementRequest(ranks={"actor": 2, "teacher": 0}), 3)
    assert together.trainers_of("actor") is together.trainers_of("teacher")


def test_colocate_actor_ref_puts_both_in_the_same_processes():
    plan = plan_placement(PlacementRequest(ranks=PPO, colocate_actor_ref=True), 3)
    assert plan.trainers_of("actor") is plan.trainers_of("reference")
    assert plan.bundles == (1, 1, 1)


def test_colocate_all_models_shares_every_gpu_with_an_engine():
    request = PlacementRequest(ranks=dict.fromkeys(PPO, 4), num_engines=4, colocate_all_models=True)
    plan = plan_placement(request, 8)
    assert plan.bundles == (1,) * 4 and plan.colocated
    assert plan.trainers[0].bundles == plan.engines.bundles == (0, 1, 2, 3)


def test_single_gpu_is_shared_by_models_of_one_process_each_and_the_plan_says_so():
    plan = plan_placement(PlacementRequest(ranks=PPO, reward_ranks=1), 1)
    assert plan.colocated and plan.bundles == (1,) and not plan.unavailable
    assert plan.notes == ("models apart need 5 GPUs and there is 1: all models share it",)
    assert plan.describe().endswith("  note: models apart need 5 GPUs and there is 1: all models share it")


def test_models_apart_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(ConfigError) as caught:
        plan_placement(PlacementRequest(ranks=PPO, reward_ranks=1), 2)
    message, _, hint = str(caught.value).partition("\n\nhint: ")
    numbers = "actor 1, critic 1, reference 1, engines 1, reward 1"
    assert message == f"models apart need 5 GPUs ({numbers}), and there are 2"
    assert hint == "--colocate_all_models --actor_num_gpus_per_node 2 --vllm_num_engines 2 shares all 2 GPUs"
    ranks = dict.fromkeys(PPO, 4)
    with pytest.raises(ConfigError, match="add --colocate_all_models, with which all models share 4 GPUs"):
        plan_placement(PlacementRequest(ranks=ranks, num_engines=4), 8)
    # Sharing would need tensor parallelism on shared GPUs: no hint asks for less than what was asked for.
    with pytest.raises(ConfigError) as caught:
        plan_placement(PlacementRequest(ranks=ranks, num_engines=2, tensor_parallel_size=2), 8)
    assert str(caught.value).endswith("hint: run where there are 16 GPUs")
    with pytest.raises(ConfigError, match=r"need 2 GPUs .* there are 1"):
        plan_placement(PlacementRequest(ranks={"actor": 2}, num_engines=2, colocate_all_models=True), 1)


def test_gpus_needed_are_those_of_the_layout_that_was_asked_for():
    assert gpus_needed(PlacementRequest(ranks=PPO, num_engines=2, tensor_parallel_size=4, reward_ranks=3)) == 14
    shared = PlacementRequest(ranks=dict.fromkeys(PPO, 8), num_engines=4, tensor_parallel_size=2, reward_ranks=8)
    assert gpus_needed(replace(shared, colocate_all_models=True)) == 8
    assert gpus_needed(shared) == 40


def test_zero_processes_live_with_the_actor():
    plan = plan_placement(PlacementRequest(ranks={"actor": 2, "critic": 0, "reference": 0}, reward_ranks=0), 3)
    assert [(group.name, group.roles, group.bundles) for group in plan.trainers] == [
        ("actor+critic+reference", ("actor", "critic", "reference"), (0, 1))
    ]
    assert plan.scorers.bundles == (0, 1) and plan.engines.bundles == (2,)
    shared = PlacementRequest(
        ranks={"actor": 2, "critic": 0, "reference": 2}, num_engines=2, reward_ranks=0, colocate_all_models=True
    )
    plan = plan_placement(shared, 2)
    assert plan.trainers[0].roles == ("actor", "critic", "reference") and len(plan.trainers) == 1
    assert plan.scorers.bundles == plan.engines.bundles == (0, 1) and not plan.unavailable
    on_cpu = plan_placement(PlacementRequest(ranks={"actor": 2}, reward_ranks=0), 0)
    assert on_cpu.scorers.num_ranks == 2
    critic = PlacementRequest(ranks={"actor": 1, "critic": 2}, reward_ranks=0, colocate_critic_reward=True)
    assert plan_placement(critic, 4).scorers.bundles == (1, 2)


@pytest.mark.parametrize(
    ("request_", "engines", "features"),
    [
        (
            PlacementRequest(ranks={"actor": 8}, num_engines=4, tensor_parallel_size=2, colocate_all_models=True),
            (0, 2, 4, 6),
            ["tensor-parallel engines on GPUs that they share with training (4 x 2 GPUs)"],
        ),
        (
            PlacementRequest(ranks={"actor": 4}, num_engines=2, colocate_all_models=True),
            (0, 1),
            ["2 engine(s) on the GPUs of 4 training process(es)"],
        ),
        (
            PlacementRequest(ranks={"actor": 2}, num_engines=4, colocate_all_models=True, gpus_per_node=8),
            (0, 1, 2, 3),
            ["4 engine(s) on the GPUs of 2 training process(es)"],
        ),
        (
            PlacementRequest(ranks={"actor": 2, "critic": 1}, reward_ranks=1, num_engines=2, colocate_all_models=True),
            (0, 1),
            ["models with unequal numbers of processes on shared GPUs (actor 2, critic 1, reward 1)"],
        ),
        (
            PlacementRequest(ranks={"actor": 8, "critic": 8}, num_engines=2, tensor_parallel_size=4, gpus_per_node=8),
            (16, 17),
            ["a run on more than one node (24 GPUs, 8 per node)"],
        ),
        (
            PlacementRequest(ranks={"actor": 2}, num_engines=2, num_nodes=2, colocate_all_models=True),
            (0, 1),
            ["a run on more than one node (2 GPUs, 2 nodes)"],
        ),
    ],
)
def test_layouts_that_a_run_cannot_do_are_planned_and_named(request_, engines, features):
    plan = plan_placement(request_, 64)
    assert plan.engines.bundles == engines
    assert list(plan.unavailable) == features


def test_description_numbers_the_gpus_of_every_process():
    request = PlacementRequest(
        ranks={"actor": 4, "critic": 4}, num_engines=2, tensor_parallel_size=2, reward_ranks=2, colocate_all_models=True
    )
    assert plan_placement(request, 8).describe().splitlines() == [
        "4 GPU(s)",
        "  train    4 x actor + critic, GPU 0-3",
        "  engines  2 x vLLM, GPU 0-1, 2-3",
        "  reward   2 x reward, GPU 0-1",
    ]
    apart = replace(request, colocate_all_models=False, colocate_critic_reward=True, reward_ranks=4)
    assert plan_placement(apart, 12).describe().splitlines() == [
        "12 GPU(s)",
        "  actor    4 x actor, GPU 0-3",
        "  critic   4 x critic, GPU 4-7",
        "  engines  2 x vLLM, GPU 8-9, 10-11",
        "  reward   4 x reward, GPU 4-7",
    ]


def test_reward_models_on_cpus_share_the_machine_and_without_them_there_are_none():
    plan = plan_placement(PlacementRequest(ranks=PPO, reward_ranks=2), 0)
    assert plan.scorers.bundles == (0, 0) and plan.bundles == (0,)
    assert [plan.gpu_share(group, 0) for group in plan.all_processes] == [0.0, 0.0, 0.0]
    assert "  reward   2 x reward, CPU" in plan.describe()
    assert plan_placement(PlacementRequest(ranks=PPO), 0).scorers is None


def test_reward_models_apart_get_gpus_of_their_own():
    plan = plan_placement(PlacementRequest(ranks=PPO, reward_ranks=2, tensor_parallel_size=2), 7)
    assert plan.bundles == (1, 1, 1, 2, 1, 1) and not plan.notes
    assert plan.scorers.bundles == (4, 5)
    # Each process has its bundle alone: whole GPUs.
    assert [plan.gpu_share(group, 0) for group in plan.all_processes] == [1.0, 1.0, 1.0, 2.0, 1.0]


def test_reward_models_with_the_critic_take_no_gpus_of_their_own():
    ranks = {"actor": 1, "critic": 2, "reference": 1}
    request = PlacementRequest(ranks=ranks, reward_ranks=2, colocate_critic_reward=True)
    plan = plan_placement(request, 5)
    assert plan.bundles == (1,) * 5 and not plan.colocated and not plan.shares_gpus
    assert plan.scorers.bundles == plan.trainers_of("critic").bundles == (1, 2)
    assert plan.gpu_share(plan.scorers, 1) == plan.gpu_share(plan.trainers_of("critic"), 1) == 0.45
    assert plan.gpu_share(plan.trainers_of("actor"), 0) == plan.gpu_share(plan.engines, 0) == 1.0


def test_reward_models_without_a_critic_to_live_with_get_gpus_of_their_own():
    request = PlacementRequest(ranks={"actor": 1}, reward_ranks=1, colocate_critic_reward=True)
    plan = plan_placement(request, 3)
    assert plan.scorers.bundles == (2,) and plan.bundles == (1, 1, 1)


def test_colocated_reward_models_divide_every_gpu_with_engine_and_trainer():
    request = PlacementRequest(ranks=dict.fromkeys(PPO, 2), num_engines=2, reward_ranks=2, colocate_all_models=True)
    plan = plan_placement(request, 8)
    assert plan.bundles == (1, 1)
    assert plan.scorers.bundles == plan.engines.bundles == plan.trainers[0].bundles == (0, 1)
    # 0.9 of a GPU for three processes, and below 1 together.
    assert [plan.gpu_share(group, 1) for group in plan.all_processes] == pytest.approx([0.3] * 3)


@pytest.mark.parametrize(
    ("request_", "num_gpus", "message"),
    [
        (PlacementRequest(ranks={"actor": 4}, num_engines=4, colocate_all_models=True), 2, "need 4 GPUs .* are 2"),
        (
            PlacementRequest(ranks={"actor": 1, "reference": 2}, colocate_actor_ref=True),
            8,
            "the actor has 1, the reference 2",
        ),
        (
            PlacementRequest(ranks=PPO, reward_ranks=2, colocate_critic_reward=True),
            8,
            r"the critic has 1, the reward models 2\n\nhint: .*--reward_num_nodes",
        ),
    ],
)
def test_plans_that_cannot_be_are_refused_with_a_hint(request_, num_gpus, message):
    with pytest.raises(ConfigError, match=message):
        plan_placement(request_, num_gpus)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"ranks": {"actor": 0}}, "actor asks for 0 processes; at least 1"),
        ({"ranks": {"actor": 1}, "num_engines": -1}, "vllm_num_engines asks for -1 processes; at least 0"),
        ({"ranks": {"actor": 1, "critic": -1}}, "critic asks for -1 processes; at least 0"),
        ({"ranks": {"actor": 1}, "reward_ranks": -1}, "reward asks for -1 processes; at least 0"),
    ],
)
def test_requests_for_no_process_are_refused(request_, message):
    with pytest.raises(ConfigError, match=message):
        PlacementRequest(**request_)
