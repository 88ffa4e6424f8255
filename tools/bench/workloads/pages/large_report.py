"""The report of a large run: seconds and memory to write the page, its size, and seconds until it can be used.

    python tools/bench/run.py large_report --out large-report.json
    python tools/bench/run.py large_report --steps 10 --groups 125 --response_tokens 100 --out page-opens.json

The run is made up: groups of 8 responses as in `records`, the same in each step, in columns, with the values that a
trainer records for each token. `rlhf report` then runs as a process of its own with its default limits. If there is a
program `chromium`, it opens the page at its rollouts some times: from the start of loading until a filter has been
applied and laid out, which is to take 2 s in the median.
"""

import re
import resource
import shutil
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_rollout.records_io import RolloutWriter
from rlhf_train.tracing.token_values import COLUMNS, TokenValues, halves, write_values
from workloads.speed.records import made_up_groups

GOAL_S = 2.0
# Behind the page's own scripts, which draw it.
USE = """<script>
document.getElementById("f-verdict").value = "ok";
applyFilters();
document.body.offsetHeight;
const opened = `${performance.now()} ms, ${browser.items.length} held`;
document.body.replaceChildren(opened);
</script></body>"""
FLAGS = {
    "steps": 200,
    "groups": (128, "of 8 responses, per step"),
    "response_tokens": 1000,
    "openings": (5, "of the page in Chromium"),
}


def write_run(folder: Path, options: Namespace) -> int:
    """Write the folder of a run; return its number of sampled tokens."""
    folder.mkdir()
    groups = made_up_groups(options.groups, options.response_tokens)
    ids = [rollout.rollout_id for group in groups for rollout in group.rollouts]
    counts = np.full(len(ids), options.response_tokens)
    rng = np.random.default_rng(1)
    values = TokenValues(ids, counts, {name: halves(rng.normal(size=counts.sum())) for name in COLUMNS})
    writer = RolloutWriter(folder / "rollouts.columns")
    for step in range(1, options.steps + 1):
        writer.write(*groups, step=step, kept=True)
        write_values(folder / "token_values", step, [values])
    writer.close()
    lines = (f'{{"step": {step}, "rollout/reward": 0.5}}\n' for step in range(1, options.steps + 1))
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    return options.steps * int(counts.sum())


def opening(page: Path, folder: Path) -> tuple[float, int]:
    """Return the seconds until a page can be used in Chromium, and the number of rollouts that it holds."""
    tried = folder / "opened.html"
    tried.write_text(page.read_text(encoding="utf-8").replace("</body>", USE), encoding="utf-8")
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    words += ["--dump-dom", f"file://{tried}#rollouts"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    milliseconds, number = re.search(r"([\d.]+) ms, (\d+) held", shown.rpartition("<body>")[2]).groups()
    return float(milliseconds) / 1000, int(number)


def measure(options: Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Write the run, then its page."""
    run = folder / "run"
    num_tokens = write_run(run, options)
    page = folder / "report.html"
    start = time.monotonic()
    command = [sys.executable, "-m", "rlhf_cli.main", "report", str(run), "--output_path", str(page)]
    subprocess.run(command, check=True)
    seconds = time.monotonic() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = {
        "num_rollouts": options.steps * options.groups * 8,
        "num_tokens": num_tokens,
        "size_bytes": sum(path.stat().st_size for path in run.rglob("*") if path.is_file()),
        "seconds": seconds,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / 1024,
        "page_bytes": page.stat().st_size,
    }
    if shutil.which("chromium") is not None:
        times, numbers = zip(*(opening(page, folder) for _ in range(options.openings)), strict=True)
        report |= {"page_rollouts": numbers[0], "opens_s": times}
        if statistics.median(times) > GOAL_S:
            report["missed"] = [f"the page can be used after {statistics.median(times):.1f} s, not {GOAL_S:g}"]
    yield report
