"""Placement plans: who lives where, and what is refused."""

from dataclasses import replace

import pytest

from rlhf_data.errors import ConfigError
from rlhf_train.cluster.placement import PlacementRequest, plan_anywhere, plan_placement
from rlhf_train.cluster.places import Place, PlacementPlan, ProcessPlan

PPO = {"actor": 1, "critic": 1, "reference": 1}
EIGHT = dict.fromkeys(PPO, 8)
SIXTEEN = dict.fromkeys(PPO, 16)


def gpus(placed) -> list[tuple[int, ...]]:
    """The GPUs of each process, all on the first node."""
    assert {place.node for place in placed.places} <= {0}
    return [place.gpus for place in placed.places]


def test_on_cpus_all_models_share_one_group_beside_the_engine():
    plan = plan_placement(PlacementRequest(ranks=PPO), [0])
    assert plan.device == "cpu" and plan.colocated and plan.nodes == (0,)
    assert [(group.roles, group.places) for group in plan.trainers] == [(("actor", "critic", "reference"), (Place(),))]
    assert plan.engines.num_ranks == 1 and plan.engine_waves == [[0]]
    assert plan_placement(PlacementRequest(ranks=PPO, num_engines=3), []).engine_waves == [[0, 1, 2]]


def test_nodes_without_gpus_take_an_equal_part_of_the_processes_each():
    request = PlacementRequest(ranks={"actor": 4}, num_nodes={"actor": 2}, num_engines=2, reward_ranks=1)
    plan = plan_placement(request, [0, 0, 0])
    assert plan.nodes == (0, 0)
    assert [place.node for place in plan.trainers[0].places] == [0, 0, 1, 1]
    assert [place.node for place in plan.engines.places] == [0, 1] and plan.scorers.places == (Place(),)
    assert plan.describe().splitlines() == [
        "no GPU, everything shares the CPUs of 2 nodes",
        "  train    4 x actor, node 0, 0, 1, 1",
        "  engines  2 x vLLM, node 0, 1",
        "  reward   1 x reward, node 0",
    ]
    alone = plan_placement(request, [0])
    assert alone.nodes == (0,) and alone.trainers[0].num_ranks == 4
    assert (plan.weight_transfer, alone.weight_transfer) == ("tcp", "shared_memory")


@pytest.mark.parametrize(
    ("cluster", "options", "medium"),
    [
        ([2, 2], {}, "nccl"),
        ([4], {}, "shared_memory"),
        ([1, 1], {"colocate_all_models": True, "num_engines": 2}, "ipc"),
        ([0, 0], {"num_nodes": {"actor": 2}}, "tcp"),
    ],
)
def test_weights_go_from_gpu_to_gpu_between_nodes_if_engines_have_their_own(cluster, options, medium):
    plan = plan_placement(PlacementRequest(**{"ranks": {"actor": 2}, "num_engines": 2, **options}), cluster)
    assert plan.weight_transfer == medium


def test_weights_go_by_tcp_between_nodes_if_two_engines_or_an_engine_and_a_trainer_share_a_gpu():
    trainers = (ProcessPlan("train", ("actor",), (Place(0, (0,)), Place(1, (0,)))),)
    for gpus_of_engines, medium in (([1, 1], "tcp"), ([0, 1], "tcp"), ([1, 2], "nccl")):
        places = tuple(Place(1, (gpu,)) for gpu in gpus_of_engines)
        plan = PlacementPlan("cuda", (3, 3), trainers, ProcessPlan("engines", (), places), colocated=False)
        assert plan.weight_transfer == medium


def test_apart_gives_every_model_its_own_gpus():
    request = PlacementRequest(ranks={"actor": 2, "critic": 1, "reference": 1}, num_engines=2, tensor_parallel_size=2)
    plan = plan_placement(request, [8])
    assert plan.nodes == (8,) and not plan.colocated and not plan.notes
    assert [gpus(group) for group in plan.trainers] == [[(0,), (1,)], [(2,)], [(3,)]]
    assert gpus(plan.engines) == [(4, 5), (6, 7)] and plan.engine_waves == [[0, 1]]
    assert plan.trainers_of("critic").name == "critic"


def test_teacher_has_gpus_of_its_own_unless_it_shares():
    plan = plan_placement(PlacementRequest(ranks={"actor": 1, "reference": 1, "teacher": 2}), [5])
    assert gpus(plan.trainers_of("teacher")) == [(2,), (3,)] and plan.nodes == (5,)
    together = plan_placement(PlacementRequest(ranks={"actor": 2, "teacher": 0}), [3])
    assert together.trainers_of("actor") is together.trainers_of("teacher")


def test_colocated_models_of_one_size_share_processes_and_others_share_gpus():
    plan = plan_placement(PlacementRequest(ranks=PPO, colocate_actor_ref=True), [3])
    assert plan.trainers_of("actor") is plan.trainers_of("reference") and plan.num_gpus == 3
    plan = plan_placement(PlacementRequest(ranks={"actor": 1, "reference": 2}, colocate_actor_ref=True), [3])
    assert [gpus(group) for group in plan.trainers] == [[(0,)], [(0,), (1,)]] and gpus(plan.engines) == [(2,)]
    request = PlacementRequest(ranks={"actor": 1, "critic": 2}, reward_ranks=1, colocate_critic_reward=True)
    plan = plan_placement(request, [4])
    assert gpus(plan.trainers_of("critic")) == [(1,), (2,)] and gpus(plan.scorers) == [(1,)]
    assert gpus(plan_placement(replace(request, reward_ranks=3), [5]).scorers) == [(1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("ranks", "engines", "size", "expected", "waves"),
    [
        (8, 4, 2, [(0, 1), (2, 3), (4, 5), (6, 7)], [[0, 1, 2, 3]]),
        (4, 4, 1, [(0,), (1,), (2,), (3,)], [[0, 1, 2, 3]]),
        (4, 2, 1, [(0,), (1,)], [[0, 1]]),
        (1, 1, 1, [(0,)], [[0]]),
        (1, 2, 1, [(0,)] * 2, [[0], [1]]),
        (1, 3, 1, [(0,)] * 3, [[0], [1], [2]]),
        (2, 4, 1, [(0,), (1,)] * 2, [[0, 1], [2, 3]]),
        (2, 3, 2, [(0, 1)] * 3, [[0], [1], [2]]),
        # The third of these engines waits for both others.
        (3, 3, 2, [(0, 1), (0, 2), (1, 2)], [[0], [1], [2]]),
    ],
)
def test_engines_spread_over_the_gpus_of_the_policy(ranks, engines, size, expected, waves):
    request = PlacementRequest(
        ranks={"actor": ranks}, num_engines=engines, tensor_parallel_size=size, colocate_all_models=True
    )
    plan = plan_placement(request, [8])
    assert (gpus(plan.engines), plan.engine_waves) == (expected, waves)
    assert plan.shares_gpus and plan.nodes == (ranks,)


SEEDS = {
    # The lines with shared GPUs, on 8.
    "8B": (
        PlacementRequest(ranks=EIGHT, reward_ranks=8, num_engines=4, tensor_parallel_size=2, colocate_all_models=True),
        [8],
        8,
    ),
    # 70B with engines, policy and critic 1:1:1, on 48 GPUs; reward and reference have half of the policy's GPUs.
    "70B shared": (
        PlacementRequest(
            ranks=SIXTEEN | {"reference": 8}, reward_ranks=8, num_engines=4, tensor_parallel_size=4,
            colocate_all_models=True,
        ),
        [16] * 3,
        16,
    ),
    "70B apart": (PlacementRequest(ranks=SIXTEEN, num_engines=4, tensor_parallel_size=4), [16] * 4, 64),
    "70B on nodes": (PlacementRequest(ranks=EIGHT, reward_ranks=8, num_engines=2, tensor_parallel_size=4), [8] * 5, 40),
    "70B on two nodes each": (
        PlacementRequest(
            ranks=SIXTEEN, reward_ranks=16, num_nodes=dict.fromkeys([*PPO, "reward"], 2), num_engines=4,
            tensor_parallel_size=4,
        ),
        [8] * 10,
        80,
    ),
    "two nodes shared": (
        PlacementRequest(
            ranks={"actor": 16, "critic": 0, "reference": 0}, reward_ranks=0, num_nodes={"actor": 2}, num_engines=4,
            tensor_parallel_size=4, colocate_all_models=True,
        ),
        [8] * 2,
        16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEDS)
def test_layouts_of_the_guides_have_a_place_for_every_process(name):
    request, nodes, num_gpus = SEEDS[name]
    plan = plan_placement(request, nodes)
    assert plan.num_gpus == num_gpus and not plan.notes
    assert all(used <= there for used, there in zip(plan.nodes, nodes, strict=False))
    for role, count in request.ranks.items():
        placed = plan.trainers_of(role)
        assert placed.num_ranks == len(set(placed.cards)) == (count or request.ranks["actor"])
        asked = request.num_nodes.get(role if count else "actor", 1)
        assert len({place.node for place in placed.places}) == asked
    assert {len(place.gpus) for place in plan.engines.places} == {request.tensor_parallel_size}
    assert len(set(plan.engines.cards)) == request.num_engines * request.tensor_parallel_size
    users = [set(group.cards) for group in plan.all_processes]
    apart = all(one.isdisjoint(other) for one in users for other in users if one is not other)
    assert apart == (not request.colocate_all_models)


def test_a_layout_without_its_nodes_spans_more_of_them_and_the_plan_says_so():
    plan = plan_placement(SEEDS["70B shared"][0], [8] * 6)
    assert plan.nodes == (8, 8)
    assert plan.notes == (
        "actor spans 2 nodes of 8 GPUs: the largest node has 8",
        "critic spans 2 nodes of 8 GPUs: the largest node has 8",
    )
    assert [place.node for place in plan.engines.places] == [0, 0, 1, 1]
    # 7 processes divide into nodes of 1 only.
    assert plan_placement(PlacementRequest(ranks={"actor": 7}, num_engines=0), [4] * 7).nodes == (1,) * 7


def test_nodes_without_a_process_are_not_in_the_plan():
    plan = plan_placement(PlacementRequest(ranks={"actor": 4, "critic": 2}, num_engines=0), [0, 2, 4])
    assert plan.nodes == (2, 4)
    assert [place.node for placed in plan.trainers for place in placed.places] == [1] * 4 + [0] * 2


def test_single_gpu_is_shared_by_models_of_one_process_each_and_the_plan_says_so():
    plan = plan_placement(PlacementRequest(ranks=PPO, reward_ranks=1), [1])
    assert plan.colocated and plan.nodes == (1,)
    assert gpus(plan.scorers) == gpus(plan.engines) == gpus(plan.trainers[0]) == [(0,)]
    assert plan.notes == ("models apart need 5 GPUs and there is 1: all models share it",)
    assert plan.describe().endswith("  note: models apart need 5 GPUs and there is 1: all models share it")


def test_models_apart_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(ConfigError) as caught:
        plan_placement(PlacementRequest(ranks=PPO, reward_ranks=1), [2])
    message, _, hint = str(caught.value).partition("\n\nhint: ")
    numbers = "actor 1, critic 1, reference 1, engines 1, reward 1"
    assert message == f"models apart need 5 GPUs ({numbers}), and there are 2"
    assert hint == "``colocate_all_models`` ``ranks.actor=2`` ``num_engines=2`` shares all 2 GPUs"
    ranks = dict.fromkeys(PPO, 4)
    for num_engines, size, shared in ((4, 1, 4), (2, 2, 4), (1, 8, 8)):
        with pytest.raises(ConfigError, match=f"add ``colocate_all_models``, with which all models share {shared} GPU"):
            plan_placement(PlacementRequest(ranks=ranks, num_engines=num_engines, tensor_parallel_size=size), [8])


@pytest.mark.parametrize(
    ("request_", "nodes", "message"),
    [
        (
            PlacementRequest(ranks={"actor": 4}, num_engines=4, colocate_all_models=True),
            [2],
            "models on shared GPUs need 4 GPUs (train 4, engines 4), and there are 2",
        ),
        (SEEDS["70B on two nodes each"][0], [8] * 8, "need 80 GPUs (actor 16, critic 16, reference 16, engines 16"),
        (
            PlacementRequest(ranks={"actor": 8}, num_nodes={"actor": 2}, colocate_all_models=True),
            [8],
            "need 8 GPUs on 2 node(s) (train 8, engines 1), and there are 8 on 1 (8)",
        ),
        (
            PlacementRequest(ranks={"actor": 6, "critic": 6, "reference": 4}, num_engines=0),
            [8, 8],
            "need 16 GPUs on 1 node(s) (actor 6, critic 6, reference 4), and there are 16 on 2 (8, 8)",
        ),
        (
            PlacementRequest(ranks={"actor": 1}, tensor_parallel_size=16),
            [8, 8, 8],
            "an engine needs 16 GPUs of one node, and the largest node has 8",
        ),
    ],
)
def test_layouts_that_no_node_or_cluster_has_room_for_are_refused(request_, nodes, message):
    with pytest.raises(ConfigError) as caught:
        plan_placement(request_, nodes)
    said, _, hint = str(caught.value).partition("\n\nhint: ")
    assert message in said
    assert hint


def test_gpus_of_a_plan_anywhere_are_those_of_the_layout_that_was_asked_for():
    request = PlacementRequest(ranks=PPO, num_engines=2, tensor_parallel_size=4, reward_ranks=3)
    assert plan_anywhere(request).num_gpus == plan_anywhere(request, 4).num_gpus == 14
    assert plan_anywhere(request, 8).nodes == (6, 8)
    shared = PlacementRequest(ranks=EIGHT, num_engines=4, tensor_parallel_size=2, reward_ranks=8)
    assert plan_anywhere(replace(shared, colocate_all_models=True), 8).num_gpus == 8
    assert plan_anywhere(shared, 8).nodes == (8,) * 5


def test_zero_processes_live_with_the_actor():
    plan = plan_placement(PlacementRequest(ranks={"actor": 2, "critic": 0, "reference": 0}, reward_ranks=0), [3])
    assert [(group.name, group.roles, gpus(group)) for group in plan.trainers] == [
        ("actor+critic+reference", ("actor", "critic", "reference"), [(0,), (1,)])
    ]
    assert gpus(plan.scorers) == [(0,), (1,)] and gpus(plan.engines) == [(2,)]
    shared = PlacementRequest(
        ranks={"actor": 2, "critic": 0, "reference": 2}, num_engines=2, reward_ranks=0, colocate_all_models=True
    )
    plan = plan_placement(shared, [2])
    assert plan.trainers[0].roles == ("actor", "critic", "reference") and len(plan.trainers) == 1
    assert gpus(plan.scorers) == gpus(plan.engines) == [(0,), (1,)]
    on_cpu = plan_placement(PlacementRequest(ranks={"actor": 2}, reward_ranks=0), [0])
    assert on_cpu.scorers.num_ranks == 2
    critic = PlacementRequest(ranks={"actor": 1, "critic": 2}, reward_ranks=0, colocate_critic_reward=True)
    assert gpus(plan_placement(critic, [4]).scorers) == [(1,), (2,)]


def test_engines_larger_than_the_policys_share_of_a_node_get_weights_through_host_memory():
    request = PlacementRequest(ranks={"actor": 1}, tensor_parallel_size=2, num_engines=2, colocate_all_models=True)
    plan = plan_placement(request, [2])
    assert gpus(plan.engines) == [(0, 1), (0, 1)]
    assert plan.shares_gpus and plan.weight_transfer == "shared_memory"
    fitting = plan_placement(replace(request, ranks={"actor": 2}), [2])
    assert gpus(fitting.engines) == [(0, 1), (0, 1)] and fitting.weight_transfer == "ipc"


def test_description_numbers_the_gpus_of_every_process():
    request = PlacementRequest(
        ranks={"actor": 4, "critic": 4}, num_engines=2, tensor_parallel_size=2, reward_ranks=2, colocate_all_models=True
    )
    assert plan_placement(request, [8]).describe().splitlines() == [
        "4 GPU(s)",
        "  train    4 x actor + critic, GPU 0-3",
        "  engines  2 x vLLM, GPU 0-1, 2-3",
        "  reward   2 x reward, GPU 0-1",
    ]
    apart = replace(request, colocate_all_models=False, colocate_critic_reward=True, reward_ranks=4)
    assert plan_placement(apart, [8, 4]).describe().splitlines() == [
        "12 GPU(s) on 2 nodes",
        "  actor    4 x actor, node 0 GPU 0-3",
        "  critic   4 x critic, node 0 GPU 4-7",
        "  engines  2 x vLLM, node 1 GPU 0-1, 2-3",
        "  reward   4 x reward, node 0 GPU 4-7",
    ]
    crowded = PlacementRequest(ranks={"actor": 3}, num_engines=2, tensor_parallel_size=2, colocate_all_models=True)
    assert "2 x vLLM, GPU 0-1, 0+2" in plan_placement(crowded, [3]).describe()
    nodes = plan_placement(PlacementRequest(ranks={"actor": 4}, num_nodes={"actor": 2}, num_engines=0), [2, 2])
    assert "4 x actor, node 0 GPU 0-1; node 1 GPU 0-1" in nodes.describe()


def test_reward_models_on_cpus_share_the_machine_and_without_them_there_are_none():
    plan = plan_placement(PlacementRequest(ranks=PPO, reward_ranks=2), [0])
    assert plan.scorers.places == (Place(), Place()) and plan.nodes == (0,)
    assert "  reward   2 x reward, CPU" in plan.describe()
    assert plan_placement(PlacementRequest(ranks=PPO), [0]).scorers is None


def test_reward_models_apart_get_gpus_of_their_own():
    plan = plan_placement(PlacementRequest(ranks=PPO, reward_ranks=2, tensor_parallel_size=2), [7])
    assert plan.nodes == (7,) and not plan.notes
    assert sorted(card for placed in plan.all_processes for card in placed.cards) == [(0, gpu) for gpu in range(7)]


def test_reward_models_with_the_critic_take_no_gpus_of_their_own():
    ranks = {"actor": 1, "critic": 2, "reference": 1}
    request = PlacementRequest(ranks=ranks, reward_ranks=2, colocate_critic_reward=True)
    plan = plan_placement(request, [5])
    assert plan.nodes == (5,) and not plan.colocated and not plan.shares_gpus
    assert gpus(plan.scorers) == gpus(plan.trainers_of("critic")) == [(1,), (2,)]


def test_reward_models_without_a_critic_to_live_with_get_gpus_of_their_own():
    request = PlacementRequest(ranks={"actor": 1}, reward_ranks=1, colocate_critic_reward=True)
    plan = plan_placement(request, [3])
    assert plan.num_gpus == 3 and set(plan.scorers.cards).isdisjoint([*plan.engines.cards, *plan.trainers[0].cards])


def test_colocated_reward_models_share_every_gpu_with_engine_and_trainer():
    request = PlacementRequest(ranks=dict.fromkeys(PPO, 2), num_engines=2, reward_ranks=2, colocate_all_models=True)
    plan = plan_placement(request, [8])
    assert plan.nodes == (2,)
    assert gpus(plan.scorers) == gpus(plan.engines) == gpus(plan.trainers[0]) == [(0,), (1,)]
