"""What a launcher's environment variables mean: which rank, which commands, and what is refused."""

import pytest

from rlhf_cli.main import COMMANDS, main
from rlhf_cli.preflight.launcher import Launch, check_launched_once, launch
from rlhf_data.errors import ConfigError

TWO = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29501"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch()),
        # `deepspeed` with one process sets all of them.
        (TWO | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, Launch()),
        (TWO, Launch(1, 2, 1, ("10.0.0.7", 29501))),
        (TWO | {"LOCAL_RANK": ""}, Launch(1, 2, None, ("10.0.0.7", 29501))),
        # A launcher on top of MPI sets both.
        (TWO | {"OMPI_COMM_WORLD_SIZE": "2"}, Launch(1, 2, 1, ("10.0.0.7", 29501))),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, Launch()),
    ],
    ids=["none", "one", "two", "no local rank", "mpi and a launcher", "mpi of one"],
)
def test_launch_is_what_the_environment_says(environ, expected):
    assert launch(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, and RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({**TWO, "MASTER_PORT": ""}, "WORLD_SIZE is 2, and MASTER_PORT not set"),
        ({**TWO, "RANK": "2"}, r"RANK is 2; it must lie in \[0, 2\)"),
        ({**TWO, "RANK": "-1"}, r"RANK is -1; it must lie in \[0, 2\)"),
        ({**TWO, "RANK": "one"}, "RANK is `one`; it must be a whole number"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is `many`; it must be a whole number"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "MPI started 4 processes"),
        ({"PMI_SIZE": "4"}, "MPI started 4 processes"),
    ],
)
def test_launch_by_half_is_refused(environ, message):
    with pytest.raises(ConfigError, match=message) as refused:
        launch(environ)
    assert "\n\nhint: " in str(refused.value)


def test_commands_that_start_their_own_processes_are_launched_once():
    trained_together = {name for name in COMMANDS if not _is_refused(name)}
    assert trained_together == {"sft", "rm", "dpo", "kto", "prm", "kd"}
    check_launched_once("ppo", "rlhf ppo", TWO | {"WORLD_SIZE": "1"})
    with pytest.raises(ConfigError, match=r"4 processes of `rlhf ppo` were launched \(OMPI_COMM_WORLD_SIZE\)"):
        check_launched_once("ppo", "rlhf ppo", {"OMPI_COMM_WORLD_SIZE": "4"})


def _is_refused(command: str) -> bool:
    try:
        check_launched_once(command, f"rlhf {command}", TWO)
    except ConfigError:
        return True
    return False


def test_several_processes_of_ppo_are_refused_and_rank_0_says_how_to_start_it(monkeypatch, capsys):
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    assert main(["ppo", "--dry_run"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert main(["ppo", "--dry_run"]) == 2
    error = capsys.readouterr().err
    assert "error: 2 processes of `rlhf ppo` were launched (WORLD_SIZE); it starts its own processes\n" in error
    assert "hint: use `rlhf ppo --actor_num_gpus_per_node 2`, without a launcher\n" in error
