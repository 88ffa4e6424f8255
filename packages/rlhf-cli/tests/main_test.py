"""`rlhf` itself: the list of commands, versions, completion, and the commands that it shares with `rlhf-rollout`."""

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest

from rlhf_cli.builtin import BUILTIN
from rlhf_cli.main import COMMANDS, GROUPS, command_line, main
from rlhf_data.options.declare import options
from rlhf_data.options.exits import exit_status

GENERATE = ("--engine", "fake", "--prompt_data", BUILTIN, "--input_key", "prompt")


def test_help_groups_every_command_once(capsys):
    assert main([]) == main(["--help"]) == 0
    first, second = capsys.readouterr().out.split("usage: rlhf COMMAND [flags]\n")[1:]
    assert first == second
    blocks = {block.splitlines()[0]: block.splitlines()[1:] for block in first.strip().split("\n\n")}
    assert [name.split()[0] for name in blocks["inference:"]] == [
        "generate",
        "score",
        "serve",
        "serve_rm",
        "bench",
        "chat",
    ]
    assert set(blocks) >= {"reinforcement learning:", "fine-tuning:", "tools:"}
    assert sum(map(len, GROUPS.values())) == len(COMMANDS)


def test_version_names_what_is_installed(capsys):
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rlhf-cli")
    assert f"ray {version('ray')}" in lines
    assert lines[-1] == f"python {sys.version.split()[0]}"


@pytest.mark.parametrize("module", ["rlhf_cli.main", "rlhf_data.main", "rlhf_rollout.commands.main"])
def test_help_that_nobody_reads_to_its_end_ends_without_a_word(module):
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does when it has its lines
    command = [sys.executable, "-m", module, "--help"]
    with open(writer, "wb") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_command_without_stdout_ends_as_with_it():
    command = [sys.executable, "-m", "rlhf_data.main", "--help"]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_pipe_that_breaks_elsewhere_is_no_end_of_the_output():
    def command() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        exit_status(command)


def completions(script, *words):
    """Return what bash offers for the last of `words` after `rlhf`."""
    last = len(words)
    typed = " ".join(f"'{word}'" for word in ("rlhf", *words))
    code = f"{script}\nCOMP_WORDS=({typed}); COMP_CWORD={last}; _shtab_rlhf; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_completion_in_bash_offers_commands_flags_and_values(capsys):
    assert main(["--print_completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert {"ppo", "generate"} <= set(completions(script, ""))
    assert completions(script, "lora_c") == ["lora_combiner"]
    assert completions(script, "ppo", "--advantage_e") == ["--advantage_estimator"]
    assert completions(script, "ppo", "--advantage_estimator", "re") == ["reinforce", "reinforce_baseline", "remax"]
    assert completions(script, "ppo", "--actor.adam") == []  # flags of other programs are accepted, not offered


@pytest.mark.parametrize("words", [["--print_completion"], ["--print_completion", "fish"]])
def test_completion_of_an_unknown_shell_is_refused(capsys, words):
    assert main(words) == 2
    assert "known: bash, tcsh, zsh" in capsys.readouterr().err


def test_generate_writes_where_the_user_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    (tmp_path / "reward.py").write_text("def reward_func(q, p, l): return {'rewards': [1.0] * len(q)}\n")
    words = [*GENERATE, "--max_samples", "2", "--remote_rm_url", "reward.py", "--output_path", "o.jsonl"]
    assert main(["generate", *words, "--generate_max_len", "4"]) == 0, capsys.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [record["reward"] for record in records] == [1.0, 1.0]


def test_one_name_has_one_declaration_in_all_commands():
    """Options of one name have one type in every command, but for keys of rows, which differ by what rows hold, and
    for `resume`: a run continues in a folder, and a file is continued where it is. A server may leave `max_len` to its
    model's context."""
    kinds: dict[str, set[str]] = {}
    for name in COMMANDS:
        for option in options(command_line(name).config):
            kinds.setdefault(option.name, set()).add(str(option.info.annotation))
    several = {name for name, found in kinds.items() if len(found) > 1}
    assert several == {"chosen_key", "label_key", "max_len", "output_key", "resume", "seed"}
