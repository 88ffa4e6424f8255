"""The page of all options is the one that the declarations give, and has what the table of options has."""

import ast
import re
from pathlib import Path

from options_page import PAGE, markdown

TABLE = Path(__file__).parents[2] / "packages/rlhf-cli/tests/option_table.txt"
GROUPS = {
    "offline": {"sft", "rm", "dpo", "kto", "prm", "kd"},
    "inference": {"generate", "score", "serve_rm", "chat"},
}
GROUPS["training"] = {"ppo"} | GROUPS["offline"]
GROUPS["all"] = GROUPS["training"] | GROUPS["inference"] | {"lora_combiner"}


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in lines if line.startswith("| `--")]


def test_page_is_the_one_of_the_declarations():
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: python tools/docs/options_page.py"


def test_page_has_every_option_of_every_command_with_its_default():
    found = {}
    for names, commands, _, default, meaning in rows():
        assert meaning, names
        for word in commands.split(", "):
            for command in GROUPS.get(word, {word}):
                key = command, re.match(r"`--(\w+)`", names)[1]
                assert key not in found
                found[key] = default.strip("`")
    lines = [line.split(" | ") for line in TABLE.read_text(encoding="utf-8").splitlines() if " | " in line]
    expected = {(command, name): default for commands, name, default, _ in lines[1:] for command in commands.split()}
    assert found.keys() == expected.keys()
    plain = {True: "true", False: "false", "": "empty"}
    for key, text in expected.items():
        default = ast.literal_eval(text)
        words = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        is_plain = isinstance(default, bool) or default == ""
        assert found[key] == (plain[default] if is_plain else words), key


def test_values_are_words_or_types_with_bounds():
    values = {row[0]: row[2] for row in rows()}
    estimators = "gae, reinforce, reinforce_baseline, group_norm, dr_grpo, rloo, lite_ppo, maxrl, opo, remax, "
    estimators += "max_at_k, online_dpo"
    assert values["`--advantage_estimator`"] == estimators
    assert "| `--seed` | training | whole number at least 0 and at most 2147483647 | `42` |" in PAGE.read_text("utf-8")
    assert values["`--vllm_gpu_memory_utilization`"] == "number above 0 and at most 1"
    assert values["`--bf16`"] == "true, false"
    assert values["`--is_correction_threshold`"] == "2 numbers"
