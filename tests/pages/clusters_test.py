"""What the pages say about clusters agrees with the code of Ray, and with the code here."""

import re

import pytest
from ray._private import ray_constants
from ray.scripts.scripts import cli

from page_commands import ROOT, blocks
from rlhf_cli.preflight.devices import cluster_notices
from rlhf_rollout import host

PAGE = "docs/clusters.md"
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
PARAMETERS = cli.commands["start"].params
START = {option for parameter in PARAMETERS for option in parameter.opts}
PORTS = {name: words for name, *words in re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", TEXT, re.M)}


def flags(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_flags_of_ray_start_exist():
    lines = [line for block in blocks("sh") if block.page == PAGE for line in block.text.splitlines()]
    started = [line for line in lines if line.startswith("ray start")]
    rows = [row for row in TEXT.splitlines() if row.startswith("|") and "port" in row]
    assert len(started) == 3 and len(rows) > 5
    named = flags(" ".join([*started, *rows]))
    assert {"--head", "--address", "--num-gpus", "--min-worker-port", "--dashboard-agent-listen-port"} <= named
    assert named <= START


def test_ports_are_rays():
    default = {option: parameter.default for parameter in PARAMETERS for option in parameter.opts}
    assert f"{ray_constants.DEFAULT_PORT} (`--port`)" in PORTS
    assert f"{ray_constants.DEFAULT_DASHBOARD_PORT} (`--dashboard-port`)" in PORTS
    listen = ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
    assert default["--dashboard-agent-listen-port"] == listen
    assert f"{listen} (`--dashboard-agent-listen-port`)" in PORTS
    assert default["--dashboard-host"] == "127.0.0.1"
    first, last = default["--min-worker-port"], default["--max-worker-port"]
    assert f"{first} to {last} (`--min-worker-port`, `--max-worker-port`)" in PORTS
    # Any port, because none is the default.
    for option in ("--node-manager-port", "--object-manager-port", "--metrics-export-port"):
        assert not isinstance(default[option], int) or default[option] == 0


def test_ports_where_training_processes_meet_are_those_of_free_port(monkeypatch, tmp_path):
    # The usual range of Linux begins at 32,768.
    given = tmp_path / "ip_local_port_range"
    given.write_text("32768\t60999\n")
    monkeypatch.setattr(host, "_GIVEN_PORTS", given)
    [(first, last)] = [tuple(map(int, found)) for found in re.findall(r"^\| (\d+) to (\d+) \|", TEXT, re.M)]
    drawn = {host.free_port() for _ in range(200)}
    assert first == 32_768 - 12_000 and last == 32_767
    assert first <= min(drawn) and max(drawn) <= last
    assert f"the {host._NUM_PORTS:,} ports below the first one" in TEXT


def test_variables_of_nccl_are_those_of_the_libraries_that_read_them():
    variables = set(re.findall(r"`((?:NCCL|GLOO)_[A-Z_]+)", TEXT))
    assert len(variables) == 6
    exported = [name for block in blocks("sh") if block.page == PAGE for name in re.findall(r"(\w+)=\w", block.text)]
    assert {name for name in exported if name.startswith(("NCCL", "GLOO"))} < variables


@pytest.mark.parametrize("named", [True, False])
def test_cluster_that_no_other_machine_finds_is_a_notice(monkeypatch, named):
    for address, hints in (("0.0.0.0:6379", 1), ("10.0.0.1:6379", 0)):
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        if named:
            monkeypatch.setenv("RAY_ADDRESS", address)
        notices = cluster_notices(address)
        found = [notice for notice in notices if "without --node-ip-address 0.0.0.0" in notice]
        assert len(found) == hints and len(notices) == hints + (not named)
