"""Runs that differ in `--group_by`, the mix of sources or the draft model, and the game and sums that they learn."""

import json
import re
from pathlib import Path

import pytest

from runner import Metrics
from workloads.learning import drafting, group_by, mixing, ranges


def test_a_guess_is_answered_by_the_range_that_is_left():
    game = ranges.Environment()
    for number, guesses, answers, won in (
        ("5", (7, 2, 9, 5), ["0 to 6", "3 to 6", "3 to 6", None], 1.0),
        ("0", (9, 9, 3, 1), ["0 to 8", "0 to 8", "0 to 2", "0 to 0"], 0.0),
    ):
        game.reset(number)
        for turn, (guess, answer) in enumerate(zip(guesses, answers, strict=True)):
            text, reward, is_done, logged = game.step(ranges.parse(f"3 {guess}"))
            right = float(answer is None)
            assert (reward, is_done, logged) == (right, turn == 3, {"score": right})
            assert answer in (None, text)
        assert reward == won


def test_games_that_are_shown_follow_the_rules_and_mostly_the_range():
    heeded = []
    for number, row in enumerate(ranges.games(500)):
        turns = [message["content"] for message in row["messages"]]
        low, high = 0, 9
        for shown, guess in zip(turns[::2], map(int, turns[1::2]), strict=True):
            assert shown == f"{low} to {high}"
            heeded.append(low <= guess <= high)
            low, high = (max(low, guess + 1), high) if guess < number % 10 else (low, min(high, guess - 1))
        assert guess == number % 10 or len(turns) == 8
    assert 0.8 < sum(heeded) / len(heeded) < 0.95


def test_runs_differ_in_the_comparison_and_the_seed_alone(bench, monkeypatch):
    given = []

    def run(flags, folder):
        given.append(flags)
        assert (Path(folder.parent) / "numbers.jsonl").exists()
        return {"accuracy_before": 0.5, "accuracy_after": 0.1 * len(given)}

    monkeypatch.setattr(group_by, "run", run)
    monkeypatch.setattr(group_by, "fine_tune", lambda flags, folder: (folder / "games.jsonl").stat())
    _, report = bench("group_by", "--seeds", "4", "7")
    own = [(flags[-3], flags[-1]) for flags in given]
    assert own == [(name, seed) for seed in "47" for name in ("episode", "turn", "state")]
    assert len({(*flags[:-3], flags[-2]) for flags in given}) == 1
    state = report["group_by"]["state"]
    assert [round(one["accuracy_after"], 6) for one in state["runs"]] == [0.3, 0.6]
    assert state["runs"][1]["flags"].endswith("--group_by state --seed 7")
    assert "tmp" not in state["runs"][1]["flags"]


def test_runs_differ_in_whether_the_draft_model_is_trained_alone(bench, monkeypatch):
    given = []

    def run_ppo(flags, folder):
        given.append(flags)
        draft = json.loads((folder.parent / "draft/config.json").read_text())
        assert draft["num_hidden_layers"] == 1 and str(folder.parent / "draft") in flags
        accepted = [0.1 * len(given), 0.1]
        steps = [{"throughput/accepted_drafts": share, "time/step": 1.0} for share in accepted]
        final = {"eval/accuracy_before": 0.5, "eval/accuracy_after": 0.75, "time/total": 2.0}
        return Metrics([], steps, final)

    monkeypatch.setattr(drafting, "run_ppo", run_ppo)
    _, report = bench("drafting", "--seeds", "4", "7")
    assert [len(flags) - len(given[0]) for flags in given] == [0, 2, 0, 2]
    assert [flags[-1] for flags in given] == ["4", "4", "7", "7"]
    assert given[1][-4:-2] == ["--draft_learning_rate", "3e-3"]
    assert report["trained"]["mean_accepted_by_step"] == pytest.approx([0.3, 0.1])
    assert "tmp" not in report["frozen"]["runs"][1]["flags"]


def test_sums_of_two_tasks_are_mixed_in_two_ways(bench, monkeypatch):
    right = {False: [], True: []}
    given = []

    def fine_tune(flags, folder):
        files = {path.stem: [json.loads(line) for line in path.open()] for path in folder.glob("*.jsonl")}
        for name, rows in files.items():
            for row in rows:
                first, second, *words = re.findall(r"\d+|without carry", row["prompt"])
                answer = str(int(first) + int(second) - 10 * len(words))
                assert int(first) % 10 + int(second) % 10 > 9
                if name == "shown":
                    right[bool(words)].append(row["completion"].endswith(f"#### {answer}"))
                else:
                    assert (row["answer"], bool(words)) == (answer, name.startswith("plain"))
        prompts = {name: {row["prompt"] for row in rows} for name, rows in files.items()}
        for task in ("carry", "plain"):
            assert (len(prompts[task]), len(prompts[f"{task}_held_out"])) == (256, 100)
            assert not prompts[f"{task}_held_out"] & (prompts[task] | prompts["shown"])

    def run(files, flags, folder):
        given.append(flags[4:])
        return {"accuracy_before": 0.5, "accuracy_after": 0.75}

    monkeypatch.setattr(mixing, "fine_tune", fine_tune)
    monkeypatch.setattr(mixing, "run", run)
    _, report = bench("mixing", "--seeds", "3")
    assert [*map(len, right.values())] == [1500, 1500]
    assert [sum(found) / 1500 for found in right.values()] == pytest.approx([0.25, 0.6], abs=0.04)
    assert given == [["--prompt_data_probs", "1,1", "--seed", "3"], ["--adaptive_mix", "--seed", "3"]]
    assert report["adaptive"]["runs"][0]["flags"].endswith("--disable_ds_ckpt --adaptive_mix --seed 3")
