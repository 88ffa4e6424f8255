"""GPUs that a process may see, and how its threads wait."""

import gc
import os
import socket
from pathlib import Path

import pytest

from rlhf_rollout import host
from rlhf_rollout.host import (
    collection_paused,
    free_port,
    local_gpus,
    place_vllm_sockets,
    socket_folder,
    spare_collection,
    wait_passively,
)


def test_spared_collections_skip_what_exists_and_come_after_more_than_nine_thousand_objects():
    before = gc.get_threshold()
    gc.collect()
    try:
        spare_collection()
        assert gc.get_freeze_count() > 1000
        number = gc.get_stats()[0]["collections"]
        kept = [[] for _ in range(9000)]
        assert gc.get_stats()[0]["collections"] == number
        kept += [[] for _ in range(9000)]
        assert gc.get_stats()[0]["collections"] == number + 1
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def test_what_is_made_while_collection_is_paused_is_old_afterwards():
    gc.collect()
    with collection_paused():
        assert not gc.isenabled()
        kept = [[] for _ in range(110_000)]
    assert gc.isenabled() and gc.get_freeze_count() == 0
    old = set(map(id, gc.get_objects(generation=2)))
    assert old.issuperset(map(id, kept))


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


def test_free_port_is_none_that_the_system_gives_to_others():
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port()
    assert 1024 <= port < first_given
    with socket.socket() as server:
        server.bind(("", port))


@pytest.mark.parametrize("said", [None, "", "1024 65535", "many 65535"])
def test_free_port_is_found_without_a_range_below_those_that_the_system_gives(monkeypatch, tmp_path, said):
    if said is not None:
        (tmp_path / "range").write_text(said)
    monkeypatch.setattr(host, "_GIVEN_PORTS", tmp_path / "range")
    with socket.socket() as server:
        server.bind(("", free_port()))


@pytest.mark.parametrize(
    ("folder", "num_bytes", "chosen"),
    [
        ("/scratch", 99, "/scratch"),
        ("/scratch", 100, "/tmp"),
        ("/ä", 103, "/ä"),  # three bytes
        ("/ä", 105, "/tmp"),
    ],
)
def test_sockets_lie_where_their_paths_are_short_enough(folder, num_bytes, chosen):
    assert socket_folder(folder, num_bytes) == chosen


@pytest.mark.parametrize(("size", "moves"), [(70, False), (71, True)])
def test_vllm_makes_sockets_in_a_folder_with_a_short_path(monkeypatch, size, moves):
    """vLLM's sockets are named by a UUID of 36 characters; Linux allows 107 bytes."""
    folder = "/" + "x" * (size - 1)
    monkeypatch.setattr("tempfile.tempdir", folder)
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "as before, after the test")
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    place_vllm_sockets()
    assert os.environ["VLLM_RPC_BASE_PATH"] == ("/tmp" if moves else folder)
    monkeypatch.setattr("tempfile.tempdir", "/other")
    place_vllm_sockets()
    assert os.environ["VLLM_RPC_BASE_PATH"] == ("/tmp" if moves else folder)
