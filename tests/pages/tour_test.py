"""The tour runs as its page prints it, on fewer rows and steps: every command reads what earlier ones wrote.

The commands are forked from processes that have imported torch, vLLM and DeepSpeed, because every import takes
seconds. tests/integration/launchers_test.py starts every command in a new interpreter.
"""

import json
import shlex
import shutil
import subprocess
from pathlib import Path

from metric_names import is_explained
from page_commands import ROOT, script
from warm_commands import warm_commands

TIMEOUT_S = 1500
# A server never ends; the other commands get less to do, and vLLM starts for `ppo` alone. Later flags win over those on
# the page. The page draws the same rollouts for three kinds of rows: here the second and the third kind continue from
# those of the first.
PRELUDE = """
rlhf() {
  local kind split
  for kind in iter_dpo plain; do
    for split in train held_out; do
      if [[ "$*" == *"--output_path outputs/$kind-$split.jsonl"* ]]; then
        cp "outputs/rs-$split.rollouts.jsonl" "outputs/$kind-$split.rollouts.jsonl"
        set -- "$@" --resume
      fi
    done
  done
  case $1 in
    serve_rm) warm "$@" --dry_run ;;
    generate) warm "$@" --max_samples 24 --engine transformers ;;
    ppo) warm "$@" --train_steps 1 --rollout_batch_size 16 ;;
    sft|rm|dpo|kto|prm|kd) warm "$@" --max_epochs 1 ;;
    *) warm "$@" ;;
  esac
}
"""
MODELS = ("sft", "lora", "kd", "rm", "ppo", "dpo", "kto", "prm")


def test_tour(tmp_path):
    data = tmp_path / "packages/rlhf-cli/src/rlhf_cli/builtin/data"
    shutil.copytree(ROOT / "packages/rlhf-cli/src/rlhf_cli/builtin/data", data)
    with warm_commands() as words:
        text = f'warm() {{ {shlex.join(words)} "$@"; }}\n{PRELUDE}{script("docs/tour.md")}'
        command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for name in MODELS:
        assert (tmp_path / f"outputs/{name}/model/config.json").is_file() or name == "lora", name
        logged = {key for line in read_jsonl(tmp_path / f"outputs/{name}/metrics.jsonl") for key in line}
        assert [key for key in logged - {"step"} if not is_explained(key)] == [], "docs/metrics.md"
    assert (tmp_path / "outputs/merged/config.json").is_file()
    scored = read_jsonl(tmp_path / "outputs/scored.jsonl")
    assert scored and all(row["reward"] in (0.0, 1.0) for row in scored)


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
