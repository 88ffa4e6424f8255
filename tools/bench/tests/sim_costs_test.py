"""The simulator's costs are read back from runs that follow from known ones, and runs stand beside their prediction."""

import json
import math
import random
import statistics
from dataclasses import replace

import pytest

from sim.costs import fit, read_run
from sim.model import Group, Layout, simulate

CONFIG = """[engine]
vllm_num_engines = {cards}
vllm_max_num_seqs = {slots}
[rollout]
rollout_batch_size = 4
[placement]
actor_num_nodes = 1
actor_num_gpus_per_node = {cards}
"""
SPREAD = [[Group(7, (number, 60 - number))] * 4 for number in range(1, 25, 2)]  # steps of the same number of tokens


def log_normal_groups(number, samples, *, prompt_tokens, median, p99, longest, seed=0):
    """Return groups whose response lengths in tokens are log-normal, up to `longest`, each drawn by itself."""
    rng = random.Random(seed)
    sigma = math.log(p99 / median) / statistics.NormalDist().inv_cdf(0.99)

    def length():
        return min(max(round(rng.lognormvariate(math.log(median), sigma)), 1), longest)

    return [Group(prompt_tokens, tuple(length() for _ in range(samples))) for _ in range(number)]


def test_fit_finds_the_coefficients_and_none_below_zero():
    rng = random.Random(0)
    columns = [[rng.random() for _ in range(30)] for _ in range(3)]
    exact = [2 * a + 0 * b + 5 * c for a, b, c in zip(*columns, strict=True)]
    assert fit(columns, exact) == pytest.approx([2, 0, 5], abs=1e-9)
    # The best coefficient of the second column would be -1.
    assert fit(columns[:2], [3 * a - b for a, b, _ in zip(*columns, strict=True)])[1] == 0


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def records(step, group_id, group):
    """Return the lines of `rollouts.jsonl` of a group with prompts of 7 tokens."""
    asked = {"source": "prompt", "num_tokens": 7, "policy_version": 0}
    same = {"step": step, "group_id": group_id, "kept": True}
    return [
        same | {"spans": [asked, asked | {"source": "policy", "num_tokens": length}], "token_ids": [0] * (7 + length)}
        for length in group.lengths
    ]


def write_run(folder, steps, cards=1, slots=64):
    """Write a run whose steps have these groups, and seconds that follow from known costs, in turn on these cards."""
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(CONFIG.format(cards=cards, slots=slots), encoding="utf-8")
    metrics, rollouts = [{"step": 0, "eval/accuracy": 0.1}], []
    for number, groups in enumerate(steps, start=1):
        answers = [length for group in groups for length in group.lengths]
        tokens = sum(answers) + 2 * 7 * len(groups)
        seconds = {
            "generate": (7 * len(groups) * 1e-3 + sum(answers) * 1e-4) / cards + max(answers) * 0.01,
            "reward": 0.0,
            "train": 0.25 + tokens * 2e-4 / cards,
            "experience": tokens * 1e-4 / cards,
            "sync": 0.05,
            "evaluate": 9.0,
            "step": 99.0,
        }
        metrics.append({"step": number, **{f"time/{name}": value for name, value in seconds.items()}})
        for index, group in enumerate(groups):
            rollouts += records(number, f"step{number}/{index:05d}", group)
        rollouts.append({"step": number, "group_id": "left out", "spans": [], "kept": False, "token_ids": []})
    write_jsonl(folder / "metrics.jsonl", metrics)
    write_jsonl(folder / "rollouts.jsonl", rollouts)
    return folder


def write_async_run(folder, staleness, found, groups, costs):
    """Write what a run with these batches leaves behind, whose first step but one also warmed up."""
    folder.mkdir()
    rules = f'[asynchrony]\nasync_train = true\nmax_staleness = {staleness}\nat_update = "keep"\n'
    (folder / "config.toml").write_text(CONFIG.format(cards=1, slots=64) + rules)
    metrics, rollouts = [], []
    for number, (batch, begin, end) in enumerate(zip(found.batches, (0.0, *found.ends), found.ends, strict=False), 1):
        tokens = sum(7 * len(groups[index].lengths) + sum(groups[index].lengths) for index in batch)
        alone = costs.train_batch_s + costs.train_token_s * tokens
        step_s = end - begin + (99 if number == 2 else 0)
        metrics.append({"step": number, "time/step": step_s, "time/generate": 77.0, "time/train": 1.25 * alone})
        for index in batch:
            # Admitted a dozen at a time; the order of the ids as text is another one.
            rollouts += records(number, f"step{index // 12 + 1}/{index % 12:05d}", groups[index])
    write_jsonl(folder / "metrics.jsonl", metrics)
    write_jsonl(folder / "rollouts.jsonl", rollouts)
    return folder


def test_costs_are_read_back_from_a_run(tmp_path):
    steps = [log_normal_groups(4, 2, prompt_tokens=7, median=20, p99=99, longest=300, seed=n) for n in range(12)]
    run = read_run(write_run(tmp_path, steps))
    assert (run.num_engines, run.slots, run.batch_size) == (1, 64, 4)
    assert run.groups == [group for step in steps for group in step]
    costs = run.costs
    assert costs.decode(1) == pytest.approx(0.0101)
    assert costs.decode(64) == pytest.approx(0.0164)
    assert costs.prefill_token_s == pytest.approx(1e-3)
    assert costs.train_token_s == pytest.approx(3e-4)
    assert costs.train_batch_s == pytest.approx(0.25)
    assert costs.sync_s == 0.05
    # So a simulated synchronous run takes as long as the phases of the run, without its evaluations.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = ("generate", "train", "experience", "sync")
    measured = sum(line.get(f"time/{name}", 0.0) for line in lines for name in names)
    predicted = simulate(costs, Layout(slots=64, batch_size=4), run.groups, 12).seconds
    assert predicted == pytest.approx(measured, rel=1e-6)


def test_runs_of_two_layouts_tell_a_constant_from_a_part_per_token(bench, tmp_path):
    # All steps of a run have the same tokens, so that none of the two tells by itself.
    folders = [write_run(tmp_path / f"cards{cards}", SPREAD, cards) for cards in (1, 2)]
    costs = read_run(*folders).costs
    assert costs.train_batch_s == pytest.approx(0.25)
    assert costs.train_token_s == pytest.approx(3e-4)
    # 28 prompt tokens always come with 240 response tokens: their seconds count as those of response tokens.
    assert costs.prefill_token_s == 0
    assert costs.decode(1) == pytest.approx(0.01 + 1e-4 + 28e-3 / 240)
    both = ["--from", *map(str, folders), "--measured", *map(str, folders)]
    _, report = bench("async_sim", *both, "--cards", "2", "4", "--batch_per_card", "3", "--steps", "2")
    assert [(row["num_engines"], row["num_trainers"]) for row in report["measured"]] == [(1, 1), (2, 2)]
    assert report["slowdowns"] == {"generation": 1.0, "training": 1.0}  # nothing goes on at the same time
    sizes = {cards: {row["batch_size"] for row in rows} for cards, rows in report["layouts"].items()}
    assert sizes == {"2": {6}, "4": {12}}


def test_asynchronous_runs_stand_beside_their_predictions(bench, tmp_path, capsys):
    steps = [log_normal_groups(4, 2, prompt_tokens=7, median=20, p99=99, longest=300, seed=n) for n in range(12)]
    synchronous = write_run(tmp_path / "synchronous", steps)
    slower = replace(read_run(synchronous).costs, slowdown=1.5, train_slowdown=1.25)
    other = log_normal_groups(48, 2, prompt_tokens=7, median=25, p99=99, longest=300, seed=99)  # of these runs alone
    folders = []
    for staleness in (1, 4):
        layout = Layout(slots=64, batch_size=4, max_staleness=staleness, at_update="keep")
        found = simulate(slower, layout, other, 12)
        folders.append(write_async_run(tmp_path / f"staleness{staleness}", staleness, found, other, slower))
    words = ["--from", str(synchronous), "--measured", *map(str, folders), "--steps", "2"]
    _, report = bench("async_sim", *words)
    assert report["slowdowns"] == pytest.approx({"generation": 1.5, "training": 1.25})
    assert report["costs"]["slowdown"] == 1  # other layouts have cards for each side
    assert [row["max_staleness"] for row in report["measured"]] == [1, 4]
    assert [row["gave_slowdowns"] for row in report["measured"]] == [True, False]
    assert [row["error"] for row in report["measured"]] == pytest.approx([0, 0], abs=1e-9)
    assert '"run": "staleness4"' in capsys.readouterr().out
    _, report = bench("async_sim", *words, "--own_cards")
    assert report["costs"]["slowdown"] == 1.5
