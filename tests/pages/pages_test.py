"""What the pages tell people to type is accepted, the files they name exist, and their Python runs."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from page_commands import PATTERNS, ROOT, blocks, calls
from rlhf_cli.main import COMMANDS as RLHF_COMMANDS
from rlhf_cli.main import command_line
from rlhf_cli.main import main as rlhf
from rlhf_cli.openrlhf.modules import main as openrlhf
from rlhf_data.main import COMMAND_LINE as INSPECT
from rlhf_data.options.command_line import CommandLine
from rlhf_data.options.declare import options
from rlhf_rollout.agents import AgentSpec, EpisodeLimits, check_agent
from rlhf_rollout.commands.main import COMMANDS
from rlhf_rollout.rewards.rubric import load_rubric

PAGES = sorted({block.page for block in blocks("sh")})
ANSWERS = (
    '{"input": "What is 4 + 8?", "output": "4+8=12 #### 12", "reward": 1.0, "label": "12"}\n'
    '{"input": "What is 5 + 9?", "output": "5+9=14, 1 #### 4", "reward": 0.0, "label": "14"}\n'
)


def test_every_block_of_a_page_is_in_a_language_that_is_checked():
    known = {"sh", "python", "toml", "mermaid", ""}
    pages = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})
    fences = [
        (page.name, fence) for page in pages for fence in re.findall(r"^```(\w+)$", page.read_text("utf-8"), re.M)
    ]
    assert fences and [(name, fence) for name, fence in fences if fence not in known] == []


def test_toml_of_the_pages_is_a_rubric(tmp_path):
    found = list(blocks("toml"))
    assert [block.page for block in found] == ["docs/rewards.md"]
    (tmp_path / "rubric.toml").write_text(found[0].text, encoding="utf-8")
    rubric = load_rubric(tmp_path / "rubric.toml")
    assert rubric.reward({"helpful": 5.0, "polite": 1.0}) == pytest.approx(2 / 3)


def test_pages_with_commands_are_found():
    assert {"README.md", "CONTRIBUTING.md", "docs/quickstart.md", "docs/tour.md", "kernels/README.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_is_accepted(page, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "here"
    (folder / "outputs").mkdir(parents=True)
    (folder / "examples").symlink_to(ROOT / "examples")
    for split in ("train", "held_out"):
        (folder / f"outputs/plain-{split}.jsonl").write_text(ANSWERS, encoding="utf-8")
    monkeypatch.chdir(folder)
    found = calls(page, folder)
    assert found, f"{page} has shell blocks without a command"
    for program, *arguments in found:
        CHECKS[program](arguments)
        capsys.readouterr()


def check_rlhf(arguments: list[str]) -> None:
    """The flags must be known and have an effect; a dry run or a plan of a page must succeed."""
    if "--dry_run" in arguments or arguments[0] == "plan":
        assert rlhf(arguments) == 0, f"rlhf {' '.join(arguments)}"
    else:
        _check_flags(command_line(arguments[0]), arguments)


def check_rlhf_rollout(arguments: list[str]) -> None:
    _check_flags(COMMANDS[arguments[0]].command_line("rlhf-rollout"), arguments)


def _check_flags(line: CommandLine[Any], arguments: list[str]) -> None:
    name = {"RUN_DIR": "--run", "FILE.py": "--file"}.get(line.words.partition(" ")[0])
    named = list(takewhile(lambda word: not word.startswith("-"), arguments[1:])) if name else []
    parsed = line.parse([*([name, ",".join(named)] if named else []), *arguments[1 + len(named) :]])
    useless = [notice for notice in parsed.notices if "no effect" in notice]
    assert not useless, f"{' '.join(arguments)}: {useless}"


def check_rlhf_data(arguments: list[str]) -> None:
    assert arguments[0] == "inspect"
    _check_flags(INSPECT, arguments)


def check_bazel(arguments: list[str]) -> None:
    command, *rest = arguments
    assert command in ("run", "test", "build")
    for label in (word for word in rest if word.startswith("//")):
        folder, _, target = label.removeprefix("//").partition(":")
        place = ROOT / folder.removesuffix("...").rstrip("/")
        assert place.is_dir(), f"{label}: no folder {place}"
        if target and (place / "BUILD.bazel").is_file():
            assert f'"{target}"' in (place / "BUILD.bazel").read_text(encoding="utf-8"), f"{label} is no target"


def check_openrlhf(arguments: list[str]) -> None:
    """A module of OpenRLHF's name, whose dry run must succeed."""
    assert arguments[0] == "-m" and "--dry_run" in arguments
    assert openrlhf(arguments[1], arguments[2:]) == 0, " ".join(arguments)


def check_python(arguments: list[str]) -> None:
    """A script must exist and know its flags; a module must be pytest, on paths that exist."""
    if arguments[0] == "-m":
        assert arguments[1] == "pytest"
        check_pytest(arguments[2:])
        return
    script = ROOT / arguments[0]
    # Bazel's Python does not look beside a script for what it imports.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(script.parent), *filter(None, sys.path)])}
    command = [sys.executable, script, "--help"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    for flag in (word for word in arguments if word.startswith("--")):
        assert flag in shown.stdout, f"{arguments[0]} has no {flag}"


def check_pytest(arguments: list[str]) -> None:
    for path in arguments:
        assert (ROOT / path).exists(), path


def check_pip(arguments: list[str]) -> None:
    if arguments[0] == "config":
        return
    assert arguments[0] == "install"
    for word in arguments[1:]:
        if word == "--find-links=bazel-bin/wheels":
            continue
        path, _, extras = word.partition("[")
        folder = ROOT / path if "/" in path else ROOT / "packages" / path
        _check_extras(folder / "pyproject.toml", extras.rstrip("]").split(",") if extras else [])


def check_uv(arguments: list[str]) -> None:
    command, *rest = arguments
    if command == "publish":
        assert [word for word in rest if word != "--dry-run"] == ["bazel-bin/wheels/*.whl"]
    elif command == "version":  # it writes the version of the workspace, which no package may have beside it
        assert rest[0] == "--frozen" and len(rest) == 2
        files = ROOT.glob("packages/*/pyproject.toml")
        packages = [tomllib.loads(file.read_text("utf-8"))["project"] for file in files]
        assert packages and not any("version" in package for package in packages)
    else:
        assert [command, rest[0]] == ["sync", "--extra"]
        _check_extras(ROOT / "pyproject.toml", rest[1:2])


def _check_extras(file: Path, extras: list[str]) -> None:
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    unknown = set(extras) - set(project.get("optional-dependencies", {}))
    assert not unknown, f"{file} has no extra {unknown}"


def check_ray(arguments: list[str]) -> None:
    """Flags of `ray start` must be those of the installed Ray, which is not started."""
    from ray.scripts.scripts import start

    assert arguments[0] == "start"
    start.make_context("start", arguments[1:])


CHECKS = {
    "bazel": check_bazel,
    "tools/bazelw": check_bazel,
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    "python3": check_openrlhf,
    "ray": check_ray,
    "rlhf": check_rlhf,
    "rlhf-data": check_rlhf_data,
    "rlhf-rollout": check_rlhf_rollout,
    "uv": check_uv,
}


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: f"{block.page}:{block.line}")
def test_python_of_a_page_runs(block, tmp_path):
    if block.page == "docs/python.md":  # it trains: tests/integration/python_test.py runs it as the example that it is
        example = (ROOT / "examples/from_python.py").read_text(encoding="utf-8")
        code = example[example.index("import re") :].replace("import sys\n", "")
        assert block.text == code.replace("sys.argv[1]", '"runs/carries"')
        return
    file = tmp_path / "example.py"
    file.write_text(block.text, encoding="utf-8")
    if any(name in block.text for name in ("def run_episode", "class Environment", "TOOLS = ")):
        # The server that a page names does not exist.
        file.write_text("".join(line for line in block.text.splitlines(True) if not line.startswith("MCP = ")))
        check_agent(AgentSpec(path=str(file), limits=EpisodeLimits()))
        return
    if "def reward_func" not in block.text:
        done = subprocess.run([sys.executable, file.name], cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        return
    reward_func = runpy.run_path(str(file))["reward_func"]
    result = reward_func(["1+1=#### 2", "2+2=#### 5"], ["1+1=", "2+2="], ["2", "#### 4"])
    assert len(result["rewards"]) == len(result["scores"]) == 2


def test_page_of_options_has_every_option():
    text = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    names = {option.name for name in RLHF_COMMANDS for option in options(command_line(name).config)}
    missing = sorted(name for name in names if f"`--{name}`" not in text)
    assert not missing, "run: python tools/docs/options_page.py"


def test_links_lead_to_files():
    for page in sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)}):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert os.path.exists(page.parent / target), f"{page.name}: {target}"


def test_tree_of_the_architecture_page_has_the_folders_of_the_packages():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    listed, above = set(), {}
    for line in re.search(r"^## Tree\n+```\n(.*?)^```", text, re.M | re.S)[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        above[depth] = line.split()[0].rstrip("/")
        listed.add("/".join(above[level] for level in range(depth + 1)))
    sources = [path.parent.relative_to(ROOT) for path in ROOT.glob("packages/*/src/**/*.py")]
    folders = {str(path) for path in sources}
    assert {path for path in listed if path.startswith("packages/")} == folders


def test_readme_is_short():
    prose = re.sub(r"<!--.*?-->", "", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(prose.split()) <= 800


def test_chinese_readme_has_the_commands_figures_and_links_of_the_english_one():
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    for pattern in (r"^```.*?^```$", r"<!--.*?-->", r"(?<=\]\()(?!#|README)[^)]+", r"(?<!`)`[^`\n]+`(?!`)"):
        in_each = [re.findall(pattern, text, re.M | re.S) for text in (english, chinese)]
        assert in_each[0] and sorted(in_each[0]) == sorted(in_each[1]), pattern
    numbers = [set(re.findall(r"\d+(?:\.\d+)+", text)) for text in (english, chinese)]
    assert numbers[0] == numbers[1] - {"1.35"}  # 135 million


def test_page_for_assistants_is_short_and_says_when_to_read_it():
    text = (ROOT / "docs/skill/SKILL.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    assert re.match(r"---\nname: rlhf\ndescription: .{80,1024}\n---\n\n# ", text)


def test_readmes_of_packages_have_the_same_headings():
    for page in (ROOT / "kernels/README.md", *sorted(ROOT.glob("packages/*/README.md"))):
        headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.M)
        expected = ["Install", "Use it alone", "What it defines", "How it behaves", "Test"]
        assert headings == expected, page
