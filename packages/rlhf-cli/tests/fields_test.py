"""Libraries name their own fields, as ``field``, in what they tell a user, and the commands name flags for them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import rlhf_data
import rlhf_models
import rlhf_rollout
import rlhf_train
from rlhf_cli.main import COMMANDS, command_line, main
from rlhf_data.options.declare import options
from rlhf_data.options.exits import with_flags
from rlhf_data.options.flag_names import FLAGS_OF_FIELDS
from rlhf_kernels import PolicyObjective

# By library, the modules of its own commands, which may name flags.
COMMAND_CODE = {
    rlhf_data: ["checks", "command_line", "exits", "flags", "inspection", "keys", "main", "options", "sections"],
    rlhf_models: ["dequantize"],
    rlhf_rollout: ["commands"],
    rlhf_train: [],
}
OFFLINE = ["sft", "rm", "dpo", "kto", "prm", "kd"]
OPTIONS = {name: {option.name for option in options(command_line(name).config)} for name in COMMANDS}
ALL_OPTIONS = set().union(*OPTIONS.values(), {"X_num_nodes", "X_num_gpus_per_node"})
MARK = re.compile(r"``([A-Za-z][\w./]*(?:=[^`\n]*)?)``")
FLAG = re.compile(r"(?<![\w-])--(\w+|\{\})(?![\w-])")


def library_files() -> Iterator[Path]:
    for package, excluded in COMMAND_CODE.items():
        root = Path(next(iter(package.__path__)))
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
    flags = {path.name: sorted({*ALL_OPTIONS, "{}"} & set(names)) for path, names in found.items()}
    assert {name: named for name, named in flags.items() if named} == {}


@pytest.mark.parametrize(("path", "mark"), MARKED, ids=lambda value: getattr(value, "stem", value))
def test_the_flag_of_a_field_belongs_to_a_command_that_runs_its_code(path, mark):
    flags = re.findall(r"--(\w+)", with_flags(f"``{mark}``").replace("X_", "actor_"))
    assert flags
    assert set(flags) <= set().union(*(OPTIONS[name] for name in commands_of(path)))


def test_what_is_marked_is_a_parameter_or_an_attribute_of_a_library():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    known = {node.arg for node in nodes if isinstance(node, ast.arg)}
    known |= {getattr(node.target, "id", "") for node in nodes if isinstance(node, ast.AnnAssign)}
    names = {name for _, mark in MARKED for name in re.split("[./]", mark.partition("=")[0])}
    known |= {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    known |= {field.name for field in fields(PolicyObjective)}  # of rlhf-kernels, and a part of `AlgorithmSpec`
    assert names - known == set()


def test_every_row_of_the_table_is_used():
    used = {name for _, mark in MARKED for name in (mark, mark.partition("=")[0])}
    assert set(FLAGS_OF_FIELDS) - used - {text for tree in TREES.values() for text in texts(tree)} == set()


def test_marks_become_flags_and_other_text_stays():
    said = with_flags("drop ``share_prompts``, or set ``input_template='A: {}'``; row `seed` has ``` and ``no mark``")
    assert said == "drop --share_prompts, or set --input_template 'A: {}'; row `seed` has ``` and ``no mark``"
    assert with_flags("add ``SftEncoder.pretrain``") == "add --pretrain_mode"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "ppo --train_batch_size 3 --rollout_batch_size 4 --n_samples_per_prompt 2",
            "error: --train_batch_size is 3, which does not divide the 8 samples of a step (--rollout_batch_size 4 x"
            " --n_samples_per_prompt 2)\n\nhint: use --train_batch_size 2\n",
        ),
        (
            "generate --engine fake --prompt_data {rows} --input_key q --output_path {out} --prompt_max_len 2",
            "error: all 1 prompts of {rows} are longer than --prompt_max_len 2\n\n"
            "hint: the shortest has 6 tokens, the longest 6: raise --prompt_max_len\n",
        ),
    ],
)
def test_a_command_says_what_to_type(tmp_path, capsys, words, said):
    paths = {"rows": tmp_path / "rows.jsonl", "out": tmp_path / "out.jsonl"}
    paths["rows"].write_text('{"q": "hello"}\n')
    assert main(words.format_map(paths).split()) == 2
    assert capsys.readouterr().err.endswith(said.format_map(paths))
