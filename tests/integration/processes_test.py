"""What the controller says when a process of a run is gone."""

import os

import pytest

from rlhf_data.errors import EngineError
from rlhf_train.online.cluster import placed_bundles, ray_cluster, wait
from rlhf_train.placement import PlacementRequest, Resources, plan_placement


class Mortal:
    """Ends its process."""

    def end(self) -> None:
        os._exit(1)


def test_process_that_dies_is_an_engine_error_with_a_hint():
    import ray

    plan = plan_placement(PlacementRequest(ranks={"actor": 1}), Resources(2, 0))
    with ray_cluster(plan, None), placed_bundles(plan):
        # By value: Ray's workers need not find this file.
        ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["Mortal"]))
        actor = ray.remote(Mortal).remote()
        with pytest.raises(EngineError, match=r"(?s)a process of the run is gone.*hint: .*out of memory"):
            wait([actor.end.remote()])
