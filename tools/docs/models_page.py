"""Write the table of families of models into its page; takes two minutes."""

import re
import subprocess
import sys
from collections.abc import Collection
from dataclasses import astuple
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: families -->\n", "<!-- end of the table -->\n"
HEADS = ("family", "padded", "packed", "packed, `sdpa` or `eager`", "shared prompts", "saved", "sent", "vLLM")
_TIMEOUT_S = 300

sys.path[:0] = [str(ROOT / "tests" / "support"), str(Path(__file__).parent)]


def with_table(page: str, *, with_engines: bool, chosen: Collection[str] = ()) -> str:
    """Return the page with a new table. The last column stays as it is unless vLLM is to run.

    Where families are `chosen`, the rows of the others stay as they are, too.
    """
    from families import FAMILIES, examine

    head, _, rest = page.partition(BEGIN)
    old, _, tail = rest.partition(END)
    rows = {row[1]: row for row in re.finditer(r"^\| `([^`]+)` .*\| ([^|]+) \|$", old, re.M)}
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for family in FAMILIES:
        if chosen and family not in chosen:
            lines.append(rows[family][0])
            continue
        told = _in_vllm(family) if with_engines else rows[family][2] if family in rows else "-"
        lines.append(f"| `{family}` | {' | '.join(astuple(examine(family)))} | {told} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return head + BEGIN + "\n".join(lines) + "\n" + END + tail


def _in_vllm(family: str) -> str:
    """Return the differences from plain transformers as text. The process is a new one, because vLLM may end it."""
    # vLLM computes linear attention and sinks of attention on a CPU only in bfloat16.
    dtype = "bfloat16" if family.startswith(("gpt_oss", "qwen3_5", "qwen3_next")) else "float32"
    command = [sys.executable, str(ROOT / "tests/support/family_engines.py"), family, "--dtype", dtype]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "does not answer"
    found = re.search(r"^gaps: (.*)$", done.stdout, re.M)
    if found is not None:
        return found[1] if dtype == "float32" else f"{found[1]} ({dtype})"
    print(done.stderr[-2000:], file=sys.stderr)
    if "errors.ConfigError: " in done.stderr:
        return "refused"
    if "the engine failed and takes no more requests" in done.stderr:
        return "fails at the first request"
    return "fails" if "Error: weights" in done.stderr or "WeightSync" in done.stderr else "does not start"


if __name__ == "__main__":
    from write import parser, write

    line = parser(__doc__)
    line.add_argument("--vllm", action="store_true", help="also start vLLM with each family; takes half an hour")
    line.add_argument("--family", action="append", default=[], help="make the row of this family alone; repeatable")
    args = line.parse_args()
    sys.exit(write(PAGE, lambda page: with_table(page, with_engines=args.vllm, chosen=args.family), args))
