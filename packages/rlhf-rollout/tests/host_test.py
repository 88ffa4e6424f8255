"""GPUs that a process may see, and how its threads wait."""

import pytest

from rlhf_rollout import host
from rlhf_rollout.host import local_gpus, visible_devices, wait_passively

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("visible", "number"), [("0,3", 2), ("GPU-1a2b", 1), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("0, ,2", 2)]
)
def test_local_gpus_honours_visible_devices(monkeypatch, visible, number):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_gpus() == number


def test_local_gpus_counts_the_drivers_device_files(monkeypatch, tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(host, "Path", lambda path: {"/dev": tmp_path}[path])
    assert local_gpus() == 3


@pytest.mark.parametrize(
    ("assigned", "environ", "devices"),
    [
        # Ray has set the variable itself.
        (["2"], {}, None),
        (["2"], {NOSET: "0", "CUDA_VISIBLE_DEVICES": "2"}, None),
        (["2"], {NOSET: "", "CUDA_VISIBLE_DEVICES": "2"}, None),
        # Ray was told not to: every card is in sight, and each rank takes the one that it was given.
        (["0"], {NOSET: "1"}, "0"),
        (["1"], {NOSET: "1"}, "1"),
        (["7"], {NOSET: "true", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "7"),
        # An engine of several GPUs; Ray gives the ids in no order.
        (["10", "2", "3"], {NOSET: "1"}, "2,3,10"),
        (["GPU-b", "GPU-a"], {NOSET: "1", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, "GPU-a,GPU-b"),
        # A process without a GPU.
        ([], {NOSET: "1"}, None),
        ([], {}, None),
    ],
)
def test_worker_takes_the_gpus_that_ray_assigned_where_ray_does_not_set_them(assigned, environ, devices):
    assert visible_devices(assigned, environ) == devices


@pytest.mark.parametrize(
    ("num_gpus", "before", "after"),
    [
        (0, {}, {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}),
        (0, {"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE", "KMP_BLOCKTIME": "0"}),
        (0, {"KMP_BLOCKTIME": "200"}, {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "200"}),
        (1, {}, {}),
    ],
)
def test_threads_wait_passively_without_gpus_unless_the_user_says_otherwise(monkeypatch, num_gpus, before, after):
    monkeypatch.setattr(host, "local_gpus", lambda: num_gpus)
    environ = dict(before)
    wait_passively(environ)
    assert environ == after
