"""Find what happens with families of models, and write the table of their page.

    python tools/docs/models_page.py                           write the page from `tests/families/found.json`
    python tools/docs/models_page.py --column all              find all columns but those of vLLM and the GPU
    python tools/docs/models_page.py --column vLLM --family llama
    python tools/docs/models_page.py --gpu FILE ...            take the GPU's column from pytest's --junitxml

What is found is written to `found.json` after each family, and the page at the end.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
FOUND = ROOT / "tests" / "families" / "found.json"
BEGIN, END = "<!-- table: families -->\n", "<!-- end of the table -->\n"
LOGPROBS = {
    "padded": "padded",
    "packed": "packed",
    "named": "packed, `sdpa` or `eager`",
    "shared": "shared prompts",
    "saved": "saved",
    "sent": "sent",
}
TRAINED = ("gradients", "LoRA", "ZeRO 3", "heads", "generated")
ENGINES = {"vLLM": False, "served": True}  # whether the engine starts with a saved folder
COLUMNS = (*LOGPROBS.values(), *TRAINED, "GPU", *ENGINES)

sys.path[:0] = [str(ROOT / "tests" / "support"), str(Path(__file__).parent)]

Found = dict[str, dict[str, str]]  # what is found, by family and column


def with_table(page: str, found: Found) -> str:
    """Return the page with the table of what was found."""
    head, _, rest = page.partition(BEGIN)
    lines = [f"| family | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| `{name}` | {' | '.join(row.get(each, '-') for each in COLUMNS)} |" for name, row in found.items()]
    return head + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def find(family: str, columns: Sequence[str]) -> dict[str, str]:
    """Return what is found with a family in the columns; "log-probs" stands for all of `LOGPROBS`."""
    from families import examine, write_tiny
    from family_training import try_training

    row = {}
    if "log-probs" in columns:
        row |= {LOGPROBS[name]: told for name, told in asdict(examine(family)).items()}
    if chosen := [column for column in TRAINED if column in columns]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            write_tiny(family, folder)
            row |= {column: try_training(folder, column) for column in chosen}
    return row | {name: _in_vllm(family, saved=saved) for name, saved in ENGINES.items() if name in columns}


def _in_vllm(family: str, *, saved: bool) -> str:
    """Return the differences from plain transformers as text."""
    from family_engines import gaps
    from rlhf_data.errors import ConfigError, WeightSyncError

    # vLLM computes linear attention and sinks of attention on a CPU only in bfloat16.
    dtype = "bfloat16" if family.startswith(("gpt_oss", "qwen3_5", "qwen3_next")) else "float32"
    try:
        found = " ".join(f"{gap.largest:.0e}" for gap in gaps(family, dtype, saved=saved))
    except ConfigError:
        return "refused"
    except Exception as error:
        print(f"{family}: {type(error).__name__}: {error}", file=sys.stderr)
        if "takes no more requests" in str(error):
            return "fails at the first request"
        return "fails" if isinstance(error, WeightSyncError) or str(error).startswith("weights") else "does not start"
    return found if dtype == "float32" else f"{found} ({dtype})"


def on_gpu(report: Path) -> dict[str, str]:
    """Return what a report of `families_gpu_test.py` says of each family: what is equal, refused or wrong."""
    told: Found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test, _, family = case.get("name", "").removesuffix("]").partition("[")
        outcome = {child.tag: child.get("message", "") for child in case}
        skipped = "refused" if "it is not packed" in outcome.get("skipped", "") else "-"
        word = "wrong" if outcome.keys() & {"failure", "error"} else skipped if "skipped" in outcome else "equal"
        told.setdefault(family, {})[test.removeprefix("test_").replace("_", " ")] = word
    return {family: _in_short(tests) for family, tests in told.items()}


def _in_short(tests: dict[str, str]) -> str:
    wrong = [name for name, word in tests.items() if word == "wrong"]
    equal = [name for name, word in tests.items() if word == "equal"]
    return f"wrong: {', '.join(wrong)}" if wrong else ", ".join(equal) or min(tests.values())


def main() -> int:
    """Find what the command line asks for, and write the page or check it; return the exit status."""
    from write import parser, write

    line = parser(__doc__)
    choices = ("all", "log-probs", *TRAINED, *ENGINES)
    line.add_argument("--column", action="append", default=[], choices=choices, help="find this column; repeatable")
    line.add_argument("--family", action="append", default=[], help="of this family alone; repeatable")
    line.add_argument("--gpu", type=Path, nargs="+", default=[], help="reports of families_gpu_test.py by pytest")
    args = line.parse_args()
    for report in args.gpu:
        for family, told in on_gpu(report).items():
            _keep(family, {"GPU": told})
    columns = ("log-probs", *TRAINED) if "all" in args.column else args.column
    if columns:
        from families import FAMILIES

        for family in args.family or FAMILIES:
            row = find(family, columns)
            print(family, row, file=sys.stderr, flush=True)
            _keep(family, row)
    return write(PAGE, lambda page: with_table(page, json.loads(FOUND.read_text())), args)


def _keep(family: str, row: dict[str, str]) -> None:
    """Write what was found; the file is read again, because another process may find other columns."""
    found: Found = json.loads(FOUND.read_text())
    found[family] = found.get(family, {}) | row
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(found.items()))
    FOUND.write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    sys.exit(main())
