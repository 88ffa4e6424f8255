"""`rlhf rollouts` on records written for the test: which are shown, in which order, and that texts stay texts."""

import contextlib

import numpy as np
import pytest

from record_testing import make_group, make_prompt, make_rollout
from rlhf_cli.main import main
from rlhf_data.records import Verdict, VerdictKind
from rlhf_rollout.records_io import RolloutWriter
from rlhf_train.tracing.token_values import COLUMNS, TokenValues, write_values

OK, WRONG, TIMEOUT = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.TIMEOUT
# What would clear the screen, write over the line, turn the direction of text, and pass for a line of the command.
HOSTILE = "\x1b[2Jred\rfake\u202eevil\n  g9/0  ok  step 1, reward 9"


@pytest.fixture(params=["rollouts.jsonl", "rollouts.columns"])
def run(request, tmp_path):
    """A run of two steps: three answers to one prompt, then two to another one."""
    first, second = make_prompt("2+2=", "4"), make_prompt("What is\nit?", None)
    answers = [
        make_rollout(first, text, group_id="g0", index=index, verdict=verdict)
        for index, (text, verdict) in enumerate(
            [("four", Verdict(WRONG, 0.25)), ("4", Verdict(OK, 1.0)), (HOSTILE, Verdict(WRONG, -1.0))]
        )
    ]
    others = [
        make_rollout(
            second, "x" * 500, group_id="g1", index=0, verdict=Verdict(TIMEOUT, detail="slow"), policy_version=3
        ),
        make_rollout(second, "Four of them", group_id="g1", index=1, policy_version=3),
    ]
    with contextlib.closing(RolloutWriter(tmp_path / request.param)) as writer:
        writer.write(make_group("g0", first, answers), step=1, kept=True)
        writer.write(make_group("g1", second, others), step=2, kept=False)
    columns = dict.fromkeys(COLUMNS, np.full(8, np.nan)) | {"gap": np.array([0.5] * 5 + [-0.25, np.nan] + [9])}
    write_values(tmp_path / "token_values", 1, [TokenValues(["g0/0", "g0/1", "g0/2"], np.array([5, 2, 1]), columns)])
    return tmp_path


def shown(capsys, run, *flags):
    """Return what is written, and the ids of the rollouts in it."""
    assert main(["rollouts", str(run), *flags]) == 0
    out, err = capsys.readouterr()
    ids = [line.split()[0] for line in out.splitlines() if line.startswith("  g")]
    return out, err, ids


def test_rollouts_are_shown_with_their_prompt_once(capsys, run):
    out, err, ids = shown(capsys, run)
    assert ids == ["g0/0", "g0/1", "g0/2", "g1/0", "g1/1"]
    assert out.count("2+2=") == 2  # the id of the prompt has it, too
    assert "g0  prompt p-2+2=  label 4\n" in out
    assert "  g0/1  ok  step 1, reward 1, 2 tokens, stop, version 0\n    response  4\n" in out
    assert "  g1/1  unscored  step 2, 13 tokens, stop, version 3, not trained\n" in out
    assert "    prompt    What is it?\n" in out
    assert f"    response  {'x' * 200} ... (500 characters)\n" in out
    assert err == "5 of 5 matching rollouts\n"


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        (["--steps", "1"], ["g0/0", "g0/1", "g0/2"]),
        (["--steps", "1-2", "--verdict", "timeout, unscored"], ["g1/0", "g1/1"]),
        (["--min_gap", "0.3"], ["g0/0"]),
        (["--min_gap", "0", "--max_gap", "0.25"], ["g0/1"]),
        (["--sort", "gap"], ["g0/1", "g0/0", "g0/2", "g1/0", "g1/1"]),
        (["--prompt_id", "p-2+2=", "--sort", "reward"], ["g0/2", "g0/0", "g0/1"]),
    ],
)
def test_filters_and_order(capsys, run, flags, ids):
    _, err, found = shown(capsys, run, *flags)
    assert found == ids and err == f"{len(ids)} of {len(ids)} matching rollouts\n"


@pytest.mark.parametrize("flags", [[], ["--whole"]])
def test_text_of_a_model_neither_steers_the_terminal_nor_passes_for_a_line_of_the_command(capsys, run, flags):
    out, _, ids = shown(capsys, run, "--steps", "1", *flags)
    assert ids == ["g0/0", "g0/1", "g0/2"]
    assert not {"\x1b", "\r", "\u202e"} & set(out)
    assert r"\x1b[2Jred" in out and r"\u202eevil" in out


def test_held_out_rollouts_are_in_another_file(capsys, run):
    assert main(["rollouts", str(run), "--held_out"]) == 2
    assert "eval_rollouts.jsonl is missing" in (said := capsys.readouterr().err) and "leave out --held_out" in said
    path = next(run.glob("rollouts.*"))
    path.rename(path.with_name(f"eval_{path.name}"))
    assert shown(capsys, run, "--held_out", "--limit", "1")[2] == ["g0/0"]
    assert main(["rollouts", str(run)]) == 2
    assert "add --held_out" in capsys.readouterr().err


def test_damaged_line_is_left_out_and_told(capsys, tmp_path):
    prompt = make_prompt()
    with contextlib.closing(RolloutWriter(tmp_path / "rollouts.jsonl")) as writer:
        writer.write(make_group("g0", prompt, [make_rollout(prompt, "4", group_id="g0")]), step=1)
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        file.write(b'{"step": 2}\n{"step": 3, "cut')
    _, err, ids = shown(capsys, tmp_path)
    assert ids == ["g0/0"] and "warning: 1 line(s) of" in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--steps", "2-1"], "names no steps"),
        (["--verdict", "ok,wrnog"], "unknown verdict `wrnog`"),
        (["--finish_reason", "len"], "did you mean `length`?"),
        (["--sort", "age"], "unknown value `age`"),
    ],
)
def test_bad_values_are_refused_with_what_is_allowed(capsys, tmp_path, flags, says):
    assert main(["rollouts", str(tmp_path), *flags]) == 2
    assert says in capsys.readouterr().err
    assert main(["rollouts"]) == 2 and "write `rlhf rollouts RUN_DIR`" in capsys.readouterr().err
