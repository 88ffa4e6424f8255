"""Command lines as guides to OpenRLHF print them: each one parses and dry-runs with nothing changed but its module."""

import os
import re
import shlex
from pathlib import Path

import pytest

from rlhf_cli.openrlhf.modules import main

HERE = Path(__file__).parent
COMMENT = re.compile(r"(^|\s)#.*")
MODULE = re.compile(r"openrlhf\.cli\.(\w+)")


def blocks(name: str) -> list[str]:
    """Return the blocks of a file of printed lines, its first comment left out."""
    return (HERE / name).read_text().strip().split("\n\n")[1:]


def words_of(block: str) -> list[str]:
    """Return the words that a shell would make of a block, with inline comments and broken lines."""
    lines = (COMMENT.sub("", line).rstrip().removesuffix("\\") for line in block.splitlines())
    return shlex.split(os.path.expandvars(" ".join(lines)))


def module_and_flags(block: str) -> tuple[str, list[str]]:
    """Return the module that a printed command line runs, and what follows it."""
    words = words_of(block)
    position = next(index for index, word in enumerate(words) if MODULE.fullmatch(word))
    launcher = words[:position]
    assert launcher[-2:] in (["python3", "-m"], ["deepspeed", "--module"])
    return MODULE.fullmatch(words[position])[1], words[position + 1 :]


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """Return a function from module and flags to the exit status, and to what a dry run lists under its titles."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-user")
    monkeypatch.setattr("socket.socket.connect", lambda *words: pytest.fail("a dry run used the network"))

    def run(module: str, flags: list[str]) -> tuple[int, str, dict[str, list[str]]]:
        status = main(module, [*flags, "--dry_run"])
        printed = capsys.readouterr()
        assert "secret-of-the-user" not in printed.out + printed.err
        assert "{token}" not in printed.out + printed.err
        found: dict[str, list[str]] = {}
        for block in printed.out.partition("results will be in")[2].split("\n\n")[1:]:
            title, *lines = block.splitlines()
            found[title] = [line.strip() for line in lines if "hint: " not in line]
        return status, printed.out + printed.err, found

    return run


# For each block: the GPUs that it is planned for, what cannot run yet, and what is missing, the last two by their first
# words.
ANY = "no GPU, everything shares the CPU"
EXPECTED = [
    ("8 GPU(s)", [], ["--prompt_data"]),  # PPO on shared GPUs
    ("", [], []),  # reward model
    ("8 GPU(s)", [], ["--prompt_data", "--reward_pretrain ./output/llama3-8b-rm"]),  # PPO, with that reward model
    ("8 GPU(s)", [], ["--prompt_data", "--n_samples_per_prompt is 1"]),  # GRPO
    ("", [], []),  # DPO
    ("16 GPU(s)", [], ["--prompt_data", "--reward_pretrain ./reward-model-70b"]),  # 70B, shared
    ("64 GPU(s) on 4 nodes", [], ["--prompt_data", "--remote_rm_url"]),  # 70B, apart
    ("40 GPU(s) on 5 nodes", [], ["--prompt_data", "--reward_pretrain ./reward-model-70b"]),
    ("16 GPU(s) on 2 nodes", [], ["--pretrain", "--prompt_data", "--remote_rm_url"]),  # two nodes, shared
    (ANY, [], ["--pretrain", "--prompt_data", "--remote_rm_url"]),
    ("80 GPU(s) on 10 nodes", [], ["--prompt_data", "--reward_pretrain ./reward-70b"]),
    (ANY, [], ["--remote_rm_url ./reward_func_code_gen.py"]),
    (ANY, [], ["--remote_rm_url ./reward_func_math.py"]),
    (ANY, [], ["--remote_rm_url ./reward_func_conversation.py"]),
    (ANY, [], []),  # asynchronous
    ("7 GPU(s)", [], ["--n_samples_per_prompt is 1"]),  # GRPO, on one line
]


def different_blocks() -> list[str]:
    """Return each command line once, however often and with whatever indentation it is printed."""
    found: dict[tuple[str, ...], str] = {}
    for block in blocks("openrlhf_commands.txt"):
        found.setdefault(tuple(words_of(block)), block)
    return list(found.values())


@pytest.mark.parametrize(("block", "expected"), zip(different_blocks(), EXPECTED, strict=True))
def test_printed_command_line_parses_and_dry_runs(dry_run, block, expected):
    module, flags = module_and_flags(block)
    status, text, found = dry_run(module, flags)
    assert status == 0, text
    places, unavailable, missing = expected
    assert re.findall("^placement: (.*)", text, re.MULTILINE) == [places] * bool(places)
    for title, starts in (("cannot run yet", unavailable), ("still missing", missing)):
        lines = found.get(title, [])
        assert len(lines) == len(starts), (title, lines)
        assert not [pair for pair in zip(sorted(lines), sorted(starts), strict=True) if not pair[0].startswith(pair[1])]


@pytest.mark.parametrize("block", blocks("openrlhf_flags.txt"))
def test_printed_flags_parse_and_dry_run(dry_run, block):
    flags = words_of(block)
    status, text, _ = dry_run("train_ppo_ray", ["--pretrain", "org/model", *flags])
    assert status == 0, text
    assert "error: " not in text


LAUNCH = re.compile(r"(python3? -m|deepspeed --module) openrlhf\.cli\.\w+")


def continues(line: str) -> bool:
    """Return whether a line of a command ends with a backslash, a comment behind it left out."""
    return COMMENT.sub("", line).rstrip().endswith("\\")


def command_lines(text: str) -> list[str]:
    """Return the command lines that a document prints, with their broken lines and comments.

    Guides also forget the backslash, mostly before a comment: a line of flags continues the line above it.
    """
    lines, found = text.splitlines(), []
    for position, line in enumerate(lines):
        if LAUNCH.search(line) is None:
            continue
        first, end = position, position + 1
        while first > 0 and continues(lines[first - 1]):
            first -= 1
        while end < len(lines) and (continues(lines[end - 1]) or lines[end].lstrip().startswith(("--", "# "))):
            end += 1
        found.append("\n".join(lines[first:end]))
    return found


DOCUMENT = """Train with `openrlhf.cli.train_ppo_ray`:
```bash
ray start --head
ray job submit --address="http://127.0.0.1:8265" \\
  -- python3 -m openrlhf.cli.train_ppo_ray \\ # the module
  --pretrain a/b \\
  --save_steps 100 # every 100 steps
  # ... other args
```
# A heading
deepspeed --module openrlhf.cli.train_rm --bf16
--max_len 8192

--not_part_of_it 1
`python3 -m openrlhf.cli.train_dpo`
"""


def test_command_lines_of_a_document_are_found_with_broken_lines_and_comments():
    ray, deepspeed, inline = command_lines(DOCUMENT)
    assert ray.splitlines()[0].startswith("ray job submit")
    assert ray.splitlines()[-1] == "  # ... other args"
    assert module_and_flags(ray) == ("train_ppo_ray", ["--pretrain", "a/b", "--save_steps", "100"])
    assert module_and_flags(deepspeed) == ("train_rm", ["--bf16", "--max_len", "8192"])
    assert inline == "`python3 -m openrlhf.cli.train_dpo`"


@pytest.mark.skipif(not os.environ.get("RLHF_SEEDS"), reason="RLHF_SEEDS names no folder of documents")
def test_every_command_line_of_the_documents_is_in_the_copy():
    documents = sorted(path for path in Path(os.environ["RLHF_SEEDS"]).iterdir() if path.is_file())
    assert [line for path in documents for line in command_lines(path.read_text())] == blocks("openrlhf_commands.txt")
