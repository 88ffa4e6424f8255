"""The simulator agrees with times worked out by hand, loses no group, and reads the costs of a run back."""

import json
import math
import random
import statistics
from collections import deque
from dataclasses import replace

import pytest

import async_sim
from async_costs import decode_steps, fit, read_checked_run, read_run
from async_model import Costs, Group, Layout, simulate

TEN = [Group(1, (10,))]
STEP = Costs(decode_s=((1, 1.0),), train_token_s=0.0, train_batch_s=4.0, sync_s=1.0)


def log_normal_groups(number, samples, *, prompt_tokens, median, p99, longest, seed=0):
    """Return groups whose response lengths in tokens are log-normal, up to `longest`, each drawn by itself."""
    rng = random.Random(seed)
    sigma = math.log(p99 / median) / statistics.NormalDist().inv_cdf(0.99)

    def length():
        return min(max(round(rng.lognormvariate(math.log(median), sigma)), 1), longest)

    return [Group(prompt_tokens, tuple(length() for _ in range(samples))) for _ in range(number)]


def seconds(groups, num_steps=1, costs=STEP, **layout):
    return simulate(costs, Layout(**layout), groups, num_steps).seconds


def test_synchronous_step_is_the_sum_of_its_phases():
    # 10 tokens of 1 s, 4 s of training, 1 s of weights.
    assert seconds(TEN, 1) == pytest.approx(15)
    assert seconds(TEN, 4) == pytest.approx(60)


@pytest.mark.parametrize(
    ("at_update", "ends"),
    [
        # Two groups start at 0 and end at 10. The first is trained from 10 to 14; the third starts with the new weights
        # at 15, beside the training of the second until 19. Halted until 20, the third ends at 26 and the fourth, begun
        # at 20, at 30; batches three and four are trained until 30 and 35, each with 1 s for the weights.
        ("keep", [15, 20, 31, 36]),
        # Before the weights of the second batch come, the third group has to end, at 25; likewise the fourth at 36.
        ("drain", [15, 26, 37, 42]),
        # What is written is kept, too.
        ("restart", [15, 20, 31, 36]),
    ],
)
def test_staleness_of_one_by_hand(at_update, ends):
    whole = simulate(STEP, Layout(max_staleness=1, at_update=at_update), TEN, 4)
    assert whole.seconds == pytest.approx(ends[-1])
    assert whole.ends == pytest.approx(ends)
    assert whole.batches == ((0,), (1,), (2,), (3,))
    assert whole.staleness_mean == 0.75 and whole.staleness_max == 1  # all but the first wait for one batch
    assert whole.training_idle == pytest.approx(1 - 16 / ends[-1])


def test_slow_group_lets_others_go_first_until_its_last_batch():
    # Batches of one, staleness 2: groups 0 to 2 start with 30, 2 and 2 tokens, so that 1 and 2 are trained first, from
    # 2 to 6 and from 7 to 11. Group 0 has run for 28 s at 30, 2 s of 30 halted: it ends at 32 and is trained until 36.
    groups = [Group(1, (30,)), Group(1, (2,)), Group(1, (2,))]
    found = simulate(STEP, Layout(max_staleness=2, at_update="keep"), groups, 3)
    assert found.batches == ((1,), (2,), (0,))
    assert found.seconds == pytest.approx(37)


def test_groups_that_would_leave_too_few_places_wait():
    # Staleness 1, batches of one: group 0 of 30 tokens has to be in one of the first two batches, and so has group 1.
    # Group 2, admitted after the first batch, is complete first, but has to let group 0 go ahead.
    groups = [Group(1, (30,)), Group(1, (2,)), Group(1, (2,)), Group(1, (2,))]
    found = simulate(STEP, Layout(max_staleness=1, at_update="keep"), groups, 4)
    assert found.batches == ((1,), (0,), (2,), (3,))


def test_decode_step_depends_on_what_runs():
    # Two tokens of both at 2 s, then two more of one at 1 s; then training and weights.
    costs = Costs(decode_s=((1, 1.0), (2, 2.0)), train_token_s=0.0, train_batch_s=4.0, sync_s=1.0)
    assert seconds([Group(1, (2, 4))], costs=costs) == pytest.approx(6 + 5)
    assert costs.decode(3) == pytest.approx(3.0)  # with the slope of the last two points
    assert costs.decode(0) == 1.0


def test_prefill_halts_once_per_prompt_and_rewards_take_time():
    costs = Costs(decode_s=((1, 1.0),), train_token_s=0.1, prefill_token_s=0.5, reward_s=3.0)
    # 5 s for 10 prompt tokens, 4 decode steps, 3 s for the reward; training: two samples of 10 + 4 tokens.
    assert seconds([Group(10, (4, 4))], costs=costs) == pytest.approx(5 + 4 + 3 + 2.8)
    # Two trainers share the tokens.
    assert seconds([Group(10, (4, 4))], costs=costs, num_trainers=2) == pytest.approx(5 + 4 + 3 + 1.4)


def test_engines_are_slower_while_the_learner_trains():
    # Two groups run from 0 to 10; the third starts at 15, has 2 of its 10 tokens at 19, when the training of the second
    # ends, is halted until 20, and ends at 28; the fourth starts at 20 and has 8 tokens at 28. Until 32 it gets the two
    # others; it is trained after the weights, from 33 to 37.
    costs = replace(STEP, slowdown=2.0)
    assert seconds(TEN, 4, costs, max_staleness=1, at_update="keep") == pytest.approx(38)
    assert seconds(TEN, 4, costs) == pytest.approx(60)  # nothing runs beside training


def test_training_that_begins_beside_generation_is_slower():
    # Training of 4 s takes 6 s beside generation. The third group starts at 15, beside the training of the second until
    # 21, is halted until 22, and ends at 26. It is trained until 32 beside the fourth, which runs from 22 to 32 and is
    # trained alone, from 33 to 37.
    costs = replace(STEP, train_slowdown=1.5)
    found = simulate(costs, Layout(max_staleness=1, at_update="keep"), TEN, 4)
    assert found.ends == pytest.approx([15, 22, 33, 38])
    assert seconds(TEN, 4, costs) == pytest.approx(60)  # nothing runs beside training


def test_groups_go_to_the_engine_with_the_least_work():
    # One slot each: 10 and 4 + 4 tokens.
    groups = [Group(1, (10,)), Group(1, (4,)), Group(1, (4,))]
    costs = Costs(decode_s=((1, 1.0),), train_token_s=0.0)
    assert seconds(groups[:2], costs=costs, num_engines=2, slots=1, batch_size=2) == pytest.approx(10)
    assert seconds(groups, costs=costs, num_engines=1, slots=1, batch_size=3) == pytest.approx(18)
    assert decode_steps(groups[:2], num_engines=1, slots=1) == pytest.approx(14)
    assert decode_steps(groups[:2], num_engines=1, slots=2) == pytest.approx(10)


def test_engine_equals_one_that_counts_token_by_token():
    rng = random.Random(1)
    for _ in range(20):
        slots = rng.randint(1, 6)
        lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 20))]
        waiting, running, expected = deque(lengths), [], 0.0
        while waiting or running:
            while waiting and len(running) < slots:
                running.append(waiting.popleft())
            expected += 0.5 + 0.25 * len(running)
            running = [left - 1 for left in running if left > 1]
        costs = Costs(decode_s=((1, 0.75), (2, 1.0)), train_token_s=0.0)
        groups = [Group(1, (length,)) for length in lengths]
        assert seconds(groups, costs=costs, slots=slots, batch_size=len(groups)) == pytest.approx(expected)


COSTS = Costs(decode_s=((1, 0.01), (32, 0.02)), train_token_s=1e-3, train_batch_s=0.2, prefill_token_s=1e-4, sync_s=0.1)


@pytest.mark.parametrize("at_update", ["drain", "keep", "restart"])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
def test_every_group_is_trained_once_and_in_time(at_update, max_staleness):
    for seed in range(6):
        rng = random.Random(seed)
        groups = log_normal_groups(200, rng.randint(1, 4), prompt_tokens=8, median=20, p99=160, longest=400, seed=seed)
        layout = Layout(
            num_engines=rng.randint(1, 3),
            slots=rng.choice([2, 8, 64]),
            batch_size=rng.randint(1, 6),
            max_staleness=max_staleness,
            at_update=at_update,
        )
        found = simulate(COSTS, layout, groups, 15)
        assert sorted(index for batch in found.batches for index in batch) == list(range(15 * layout.batch_size))
        assert {len(batch) for batch in found.batches} == {layout.batch_size}
        assert found.staleness_max <= max_staleness
        assert found.samples_per_s == pytest.approx(15 * layout.batch_size * len(groups[0].lengths) / found.seconds)
        assert 0 <= found.generation_idle < 1 and 0 <= found.training_idle < 1


def test_more_staleness_is_never_slower_where_nothing_is_thrown_away():
    for seed in range(5):
        groups = log_normal_groups(400, 4, prompt_tokens=8, median=20, p99=160, longest=400, seed=seed)
        times = [
            seconds(groups, 30, COSTS, slots=32, batch_size=8, max_staleness=bound, at_update="keep")
            for bound in (0, 1, 2, 4, 8)
        ]
        assert times == sorted(times, reverse=True)
        assert times[-1] < 0.8 * times[0]


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"max_staleness": -1}, {"shared": True, "max_staleness": 1}, {"shared": True, "slots": 0}]
)
def test_impossible_layouts_are_refused(wrong):
    with pytest.raises(ValueError, match=r"staleness|shared"):
        Layout(**wrong)


def test_simulate_refuses_no_work():
    for groups, num_steps in (([], 1), (TEN, 0), ([Group(1, (1,)), Group(1, (1, 1))], 1)):
        with pytest.raises(ValueError, match="steps with"):
            simulate(STEP, Layout(), groups, num_steps)


def test_fit_finds_the_coefficients_and_none_below_zero():
    rng = random.Random(0)
    columns = [[rng.random() for _ in range(30)] for _ in range(3)]
    exact = [2 * a + 0 * b + 5 * c for a, b, c in zip(*columns, strict=True)]
    assert fit(columns, exact) == pytest.approx([2, 0, 5], abs=1e-9)
    # The best coefficient of the second column would be -1.
    assert fit(columns[:2], [3 * a - b for a, b, _ in zip(*columns, strict=True)])[1] == 0


SIZES = "[engine]\nvllm_num_engines = {}\nvllm_max_num_seqs = 64\n[rollout]\nrollout_batch_size = 4\n"


def write_run(folder, steps, cards=1):
    """Write a run whose steps have these groups, and seconds that follow from known costs, in turn on these cards."""
    placement = f"[placement]\nactor_num_nodes = 1\nactor_num_gpus_per_node = {cards}\n"
    (folder / "config.toml").write_text(SIZES.format(cards) + placement, encoding="utf-8")
    metrics, rollouts = [{"step": 0, "eval/accuracy": 0.1}], []
    for number, groups in enumerate(steps, start=1):
        answers = [length for group in groups for length in group.lengths]
        tokens = sum(answers) + 2 * 7 * len(groups)
        metrics.append(
            {
                "step": number,
                "time/generate": (7 * len(groups) * 1e-3 + sum(answers) * 1e-4) / cards + max(answers) * 0.01,
                "time/reward": 0.0,
                "time/train": 0.25 + tokens * 2e-4 / cards,
                "time/experience": tokens * 1e-4 / cards,
                "time/sync": 0.05,
                "time/evaluate": 9.0,
                "time/step": 99.0,
            }
        )
        for index, group in enumerate(groups):
            for length in group.lengths:
                spans = [
                    {"source": "prompt", "num_tokens": 7, "policy_version": 0},
                    {"source": "policy", "num_tokens": length, "policy_version": 0},
                ]
                record = {"step": number, "group_id": f"step{number}/{index:05d}", "spans": spans}
                rollouts.append(record | {"kept": True, "token_ids": [0] * (7 + length)})
        rollouts.append({"step": number, "group_id": "left out", "spans": [], "kept": False, "token_ids": []})
    for name, records in (("metrics", metrics), ("rollouts", rollouts)):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write_async_run(folder, staleness, found, groups, costs):
    """Write what a run with these batches leaves behind, whose first step but one also warmed up."""
    metrics, rollouts = [], []
    for number, (batch, begin, end) in enumerate(zip(found.batches, (0.0, *found.ends), found.ends, strict=False), 1):
        tokens = sum(7 * len(groups[index].lengths) + sum(groups[index].lengths) for index in batch)
        alone = costs.train_batch_s + costs.train_token_s * tokens
        step_s = end - begin + (99 if number == 2 else 0)
        metrics.append({"step": number, "time/step": step_s, "time/generate": 77.0, "time/train": 1.25 * alone})
        for index in batch:
            for length in groups[index].lengths:
                spans = [{"source": "prompt", "num_tokens": 7, "policy_version": 0}]
                # Admitted a dozen at a time; the order of the ids as text is another one.
                group_id = f"step{index // 12 + 1}/{index % 12:05d}"
                record = {"step": number, "group_id": group_id, "spans": spans, "token_ids": [0] * (7 + length)}
                rollouts.append(record | {"kept": True})
    for name, records in (("metrics", metrics), ("rollouts", rollouts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rules = f'[asynchrony]\nasync_train = true\nmax_staleness = {staleness}\nat_update = "keep"\n'
    (folder / "config.toml").write_text(SIZES.format(1) + rules)


def test_costs_are_read_back_from_a_run(tmp_path):
    steps = [log_normal_groups(4, 2, prompt_tokens=7, median=20, p99=99, longest=300, seed=n) for n in range(12)]
    write_run(tmp_path, steps)
    run = read_run(tmp_path)
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
    assert seconds(run.groups, 12, costs, slots=64, batch_size=4) == pytest.approx(measured, rel=1e-6)


def test_runs_of_two_layouts_tell_a_constant_from_a_part_per_token(tmp_path, capsys):
    # All steps of a run have the same tokens, so that none of the two tells by itself.
    for cards in (1, 2):
        folder = tmp_path / f"cards{cards}"
        folder.mkdir()
        steps = [[Group(7, (number, 60 - number))] * 4 for number in range(1, 25, 2)]
        write_run(folder, steps, cards)
    folders = [tmp_path / "cards1", tmp_path / "cards2"]
    costs = read_run(*folders).costs
    assert costs.train_batch_s == pytest.approx(0.25)
    assert costs.train_token_s == pytest.approx(3e-4)
    # 28 prompt tokens always come with 240 response tokens: their seconds count as those of response tokens.
    assert costs.prefill_token_s == 0
    assert costs.decode(1) == pytest.approx(0.01 + 1e-4 + 28e-3 / 240)
    both = ["--from", *map(str, folders), "--measured", *map(str, folders), "--out", str(tmp_path / "report.json")]
    async_sim.main([*both, "--cards", "2", "4", "--batch_per_card", "3", "--steps", "2"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(row["num_engines"], row["num_trainers"]) for row in report["measured"]] == [(1, 1), (2, 2)]
    assert report["slowdowns"] == {"generation": 1.0, "training": 1.0}  # nothing goes on at the same time
    printed = capsys.readouterr().out
    assert "2 cards, 6 prompts" in printed and "4 cards, 12 prompts" in printed


def test_asynchronous_runs_stand_beside_their_predictions(tmp_path, capsys):
    folders = {name: tmp_path / name for name in ("synchronous", "one", "four")}
    steps = [log_normal_groups(4, 2, prompt_tokens=7, median=20, p99=99, longest=300, seed=n) for n in range(12)]
    for folder in folders.values():
        folder.mkdir()
    write_run(folders["synchronous"], steps)
    run = read_run(folders["synchronous"])
    slower = replace(run.costs, slowdown=1.5, train_slowdown=1.25)
    other = log_normal_groups(48, 2, prompt_tokens=7, median=25, p99=99, longest=300, seed=99)  # of these runs alone
    for name, staleness in (("one", 1), ("four", 4)):
        layout = Layout(slots=64, batch_size=4, max_staleness=staleness, at_update="keep")
        found = simulate(slower, layout, other, 12)
        write_async_run(folders[name], staleness, found, other, slower)
    words = ["--from", str(folders["synchronous"]), "--measured", str(folders["one"]), str(folders["four"])]
    async_sim.main([*words, "--steps", "2", "--out", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["slowdowns"] == pytest.approx({"generation": 1.5, "training": 1.25})
    assert report["costs"]["slowdown"] == 1  # other layouts have cards for each side
    assert [row["max_staleness"] for row in report["measured"]] == [1, 4]
    assert [row["gave_slowdowns"] for row in report["measured"]] == [True, False]
    assert [row["error"] for row in report["measured"]] == pytest.approx([0, 0], abs=1e-9)
    async_sim.main([*words, "--own_cards", "--steps", "2", "--out", str(tmp_path / "own.json")])
    assert json.loads((tmp_path / "own.json").read_text())["costs"]["slowdown"] == 1.5
    assert "four: " in capsys.readouterr().out


def test_decode_steps_that_take_no_time_are_refused():
    with pytest.raises(ValueError, match="must be > 0"):
        replace(STEP, decode_s=((1, 0.0),))


@pytest.mark.parametrize(("num_steps", "message"), [(0, "there is no "), (5, "3 steps after the first 2")])
def test_missing_or_short_run_is_refused(tmp_path, capsys, num_steps, message):
    if num_steps:
        write_run(tmp_path, [[Group(7, (3, 4))] * 4] * num_steps)
    with pytest.raises(SystemExit):
        async_sim.main(["--from", str(tmp_path), "--out", "x.json"])
    assert message in capsys.readouterr().err
    write_run(tmp_path, [[Group(7, (3, 4))] * 4] * 2)
    with pytest.raises(ValueError, match="has 2 steps; a comparison leaves out the first 2"):
        read_checked_run(tmp_path)


def test_responses_that_are_all_cut_at_the_same_length_are_refused(tmp_path):
    steps = [[Group(7, (number, 40))] * 4 for number in range(1, 13)]  # tokens differ, decode steps do not
    write_run(tmp_path, steps)
    with pytest.raises(ValueError, match="40 to 40 decode steps"):
        read_run(tmp_path)


def test_layouts_use_all_cards():
    for num_cards in (2, 8, 64):
        found = async_sim.layouts(num_cards, Layout(), [1, 4])
        assert found[0].shared and found[0].num_engines == num_cards
        assert all(each.num_engines + each.num_trainers == num_cards for each in found[1:])
        assert {each.max_staleness for each in found} == {0, 1, 4}
        assert len(set(found)) == len(found) == 1 + 3 * min(num_cards - 1, 7)


def test_main_prints_a_table_and_writes_the_report(tmp_path, capsys):
    write_run(tmp_path, [[Group(7, (number, 60 - number))] * 4 for number in range(1, 25, 2)])
    out = tmp_path / "sim.json"
    words = ["--from", str(tmp_path), "--cards", "2", "4", "--steps", "5", "--staleness", "2", "--out", str(out)]
    async_sim.main(words)
    printed = capsys.readouterr().out
    assert "2 cards, 4 prompts x 2 responses per step" in printed and "in turn" in printed
    report = json.loads(out.read_text())
    assert len(report["layouts"]["2"]) == 3 and len(report["layouts"]["4"]) == 7
    best = max(row["samples_per_s"] for row in report["layouts"]["2"] if row["max_staleness"] == 0)
    assert f"{best:.2f}" in printed and math.isfinite(best)


def test_option_without_effect_is_refused(capsys):
    with pytest.raises(SystemExit):
        async_sim.main(["--from", "run", "--own_cards", "--out", "x.json"])
    assert "--own_cards needs --measured" in capsys.readouterr().err


def test_runs_with_different_slots_are_refused(tmp_path):
    for name, slots in (("a", 64), ("b", 32)):
        folder = tmp_path / name
        folder.mkdir()
        write_run(folder, [[Group(7, (3, 4))] * 4] * 8)
        config = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(config.replace("num_seqs = 64", f"num_seqs = {slots}"))
    with pytest.raises(ValueError, match="64, 32 slots"):
        read_run(tmp_path / "a", tmp_path / "b")
