"""Libraries name their own fields, as ``field``, in what they tell a user, and the commands name flags for them."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_cli.main import COMMANDS, command_line
from rlhf_data.exits import FLAGS_OF_FIELDS, with_flags
from rlhf_data.options import options

# By library, the modules of its own commands, which may name flags.
COMMAND_CODE = {
    "rlhf_data": ["checks", "command_line", "exits", "flags", "inspection", "keys", "main", "options", "sections"],
    "rlhf_models": [],
    "rlhf_rollout": ["commands"],
    "rlhf_train": [],
}
OFFLINE = ["sft", "rm", "dpo", "kto", "prm", "kd"]
OPTIONS = {name: {option.name for option in options(command_line(name).config)} for name in COMMANDS}
ALL_OPTIONS = set().union(*OPTIONS.values())
MARK = re.compile(r"``([A-Za-z][\w.]*(?:=[^`\n]*)?)``")
FLAG = re.compile(r"(?<![\w-])--(\w+|\{\})(?![\w-])")


def library_files() -> Iterator[Path]:
    for package, excluded in COMMAND_CODE.items():
        root = Path(next(iter(importlib.import_module(package).__path__)))
        for path in sorted(root.rglob("*.py")):
            if path.relative_to(root).with_suffix("").parts[0] not in excluded:
                yield path


def texts(tree: ast.AST) -> Iterator[str]:
    """The literals in a file; {} stands for what an f-string fills in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in library_files()}
MARKED = sorted({(path, mark) for path, tree in TREES.items() for text in texts(tree) for mark in MARK.findall(text)})


def commands_of(path: Path) -> list[str]:
    """The commands that run the code of a library's file."""
    if "rlhf_train/online" in path.as_posix():
        return ["ppo"]
    if "rlhf_train/offline" in path.as_posix():
        return OFFLINE
    return ["ppo", *OFFLINE] if "rlhf_train" in path.as_posix() else list(COMMANDS)


def test_no_library_names_a_flag():
    found = {path: [name for text in texts(tree) for name in FLAG.findall(text)] for path, tree in TREES.items()}
    found = {path: names for path, names in found.items() if not re.search("rlhf_train/", path.as_posix())}
    flags = {path.name: sorted({*ALL_OPTIONS, "{}"} & set(names)) for path, names in found.items()}
    assert {name: named for name, named in flags.items() if named} == {}


@pytest.mark.parametrize(("path", "mark"), MARKED, ids=lambda value: getattr(value, "stem", value))
def test_the_flag_of_a_field_belongs_to_a_command_that_runs_its_code(path, mark):
    flag = re.match(r"--(\w+)", with_flags(f"``{mark}``"))
    assert flag is not None and flag[1] in set().union(*(OPTIONS[name] for name in commands_of(path)))


def test_what_is_marked_is_a_parameter_or_an_attribute_of_a_library():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    known = {node.arg for node in nodes if isinstance(node, ast.arg)}
    known |= {getattr(node.target, "id", "") for node in nodes if isinstance(node, ast.AnnAssign)}
    assert {mark.partition("=")[0].rpartition(".")[2] for _, mark in MARKED} - known == set()


def test_every_row_of_the_table_is_used():
    assert set(FLAGS_OF_FIELDS) - {name for _, mark in MARKED for name in (mark, mark.partition("=")[0])} == set()


def test_marks_become_flags_and_other_text_stays():
    said = with_flags("drop ``share_prompts``, or set ``input_template='A: {}'``; row `seed` has ``` and ``no mark``")
    assert said == "drop --share_prompts, or set --input_template 'A: {}'; row `seed` has ``` and ``no mark``"
    assert with_flags("add ``SftEncoder.pretrain``") == "add --pretrain_mode"
