"""`python -m rlhf_cli.doctor.probe NAME`: imports one library as a run does, and writes what it found as JSON.

In a process of its own, because a library that is broken may end the process, and two of them change each other.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from rlhf_data.errors import RlhfError
from rlhf_rollout.host import collection_paused, local_gpus


def _torch() -> dict[str, Any]:
    import torch

    found = {"version": torch.__version__, "cuda": torch.version.cuda, "tested": []}
    if local_gpus():
        torch.ones(8, device="cuda").sum().item()  # raises what is wrong with the driver, or with this build
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return found


def _transformers() -> dict[str, Any]:
    import transformers
    from transformers import AutoModelForCausalLM  # noqa: F401

    return {"version": transformers.__version__, "tested": []}


def _vllm() -> dict[str, Any]:
    from rlhf_rollout.engines.vllm.internals import check_vllm, tested_versions, version

    on_gpu = local_gpus() > 0
    check_vllm(on_gpu=on_gpu)
    return {"version": version(), "tested": tested_versions(on_gpu=on_gpu)}


def _deepspeed() -> dict[str, Any]:
    from rlhf_train.engine.deepspeed_internals import TESTED_VERSION, import_deepspeed

    deepspeed = import_deepspeed("cuda" if local_gpus() else "cpu")
    return {"version": deepspeed.__version__, "tested": [TESTED_VERSION]}


def _ray() -> dict[str, Any]:
    """Join the cluster that a run would join, or start one as a run does."""
    from rlhf_rollout.ray_internals import TESTED_VERSIONS
    from rlhf_train.cluster.ray_session import find_cluster, join, started_cluster

    found: dict[str, Any] = {"version": version("ray"), "tested": TESTED_VERSIONS, "cluster": find_cluster()}
    if found["cluster"] is None:
        with started_cluster(1, 0):
            return found
    found["nodes"] = len(join(found["cluster"]))
    return found


def _rank() -> dict[str, Any]:
    """Add up one number over the ranks, as trainers do; the arguments are rank, number of ranks, port and device."""
    import torch

    from rlhf_train.engine.process_group import init_process_group, leave_process_group

    rank, num_ranks, port = map(int, sys.argv[2:5])
    device = sys.argv[5]
    if device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[6]
    init_process_group(rank=rank, world_size=num_ranks, master=("127.0.0.1", port), device=device)
    total = torch.full((1 << 20,), float(rank + 1), device=device)
    torch.distributed.all_reduce(total)
    mean = total.mean().item()  # waits for the GPU, before the group is gone
    leave_process_group()
    return {"sum": mean}


PROBES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "torch": _torch,
    "transformers": _transformers,
    "vllm": _vllm,
    "deepspeed": _deepspeed,
    "ray": _ray,
    "rank": _rank,
}

if __name__ == "__main__":
    with collection_paused():
        try:
            answer = PROBES[sys.argv[1]]()
        except RlhfError as error:
            answer = {"error": str(error)}
    print(f"\n{json.dumps(answer)}", flush=True)
    os._exit(0)  # Python's own end takes apart what was imported, for up to two seconds
