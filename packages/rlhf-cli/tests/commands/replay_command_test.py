"""Runs on recorded rollouts up to the point where something would start, and `rlhf replay` with a run that is told."""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from record_testing import make_group, make_prompt, make_rollout
from rlhf_cli.builtin import MODEL_DIR
from rlhf_cli.commands import ppo
from rlhf_cli.commands.replay import compare
from rlhf_cli.main import main
from rlhf_data.options.command_line import to_toml
from rlhf_data.records import Verdict, VerdictKind
from rlhf_rollout.records_io import RolloutWriter
from rlhf_train.online_job import RunSummary
from rlhf_train.run.checkpoint import Checkpoints

METRICS = {"policy/loss": 0.25, "rollout/reward": 0.5, "kl/reference": None, "time/step": 3.0, "throughput/x": 1.0}


def write_run(folder: Path, *flags: str, steps: int = 3, planned: int = 40, source: str = "train") -> Path:
    """A folder as a run of the built-in task leaves it, but for models; its rollouts are all alike."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(ppo.COMMAND_LINE.parse(flags).config))
    prompt = replace(make_prompt(), source=source)
    verdict = Verdict(VerdictKind.OK, 1.0)
    with contextlib.closing(RolloutWriter(folder / "rollouts.jsonl")) as writer:
        for step in range(1, steps + 1):
            names = [f"step{step}/{number}" for number in range(2)]
            groups = [
                make_group(name, prompt, [make_rollout(prompt, "4", group_id=name, verdict=verdict)]) for name in names
            ]
            writer.write(*groups, step=step, num_steps=planned, kept=True)
    evaluation = {"step": 2, "eval/accuracy": 0.5}
    lines = [{"step": step, **METRICS} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [evaluation, *lines]))
    return folder


@pytest.fixture
def jobs(monkeypatch):
    """The jobs that would have run. Each leaves the metrics of its last step, with the loss of the attribute `loss`."""

    class Jobs(list):
        loss = 0.25

    found = Jobs()

    def run_online(job, view):
        found.append(job)
        lines = [{"step": job.num_steps, **METRICS, "policy/loss": found.loss, "time/step": 9.0}]
        Path(job.save_path).mkdir(exist_ok=True)
        Path(job.save_path, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return RunSummary(save_path=job.save_path, artifacts={}, metrics={})

    monkeypatch.setattr("rlhf_train.online.run_online", run_online)
    return found


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    return tmp_path


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_replay_trains_with_the_options_of_the_run_and_flags_override_them(home, jobs, capsys):
    eval_flags = ["--best_metric_key", "eval/accuracy", "--eval_steps", "2"]
    places = ["--save_path", "run", "--ckpt_path", str(home / "disk"), "--save_steps", "2", "--load_checkpoint"]
    engines = ["--vllm_num_engines", "3", "--vllm_tensor_parallel_size", "2"]
    run = write_run(home / "run", *eval_flags, *places, *engines, "--actor_learning_rate", "1e-5")
    assert main(["ppo", "--replay", "run", "--policy_loss_type", "gspo", "--save_path", "again"]) == 0
    [job] = jobs
    assert (job.replay, job.save_path) == (str(run / "rollouts.jsonl"), str(home / "again"))
    assert (job.prompts, job.eval_prompts, job.best_metric) == ((), (), None)
    assert job.checkpoints.home(job.save_path) == home / "again/checkpoints" and job.checkpoints.every == 2
    assert job.algorithm.objective.policy_loss == "gspo"
    assert job.plan.engines.num_ranks == 0 and job.plan.scorers is None
    # 3 of 40 planned steps were recorded: the learning rate follows the plan of the run, with two updates per step.
    optimizer = job.models["actor"].optimizer
    assert (job.num_steps, optimizer.total_steps, optimizer.learning_rate) == (3, 80, 1e-5)
    told = capsys.readouterr()
    assert f"training on 3 recorded steps: {run / 'rollouts.jsonl'}" in told.err
    assert "the recorded steps of run" in told.out
    assert f'replay = "{run}"' in job.config and "eval_data" not in job.config


def test_replay_ends_where_train_steps_says(home, jobs):
    write_run(home / "run", "--train_steps", "40")
    assert main(["ppo", "--replay", "run", "--train_steps", "2"]) == 0
    assert (jobs[0].num_steps, jobs[0].models["actor"].optimizer.total_steps) == (2, 4)


def test_replay_says_that_the_record_is_damaged(home, jobs, capsys):
    record = write_run(home / "run") / "rollouts.jsonl"
    with record.open("a") as file:
        file.write('{"step": 4')
    assert main(["ppo", "--replay", "run"]) == 0
    assert f"the end of {record} is damaged; steps 1 to 2 are complete" in capsys.readouterr().err


def test_replay_has_a_teacher_for_each_recorded_source_and_no_other(home, jobs, capsys):
    write_run(home / "run", source='größe".jsonl')
    write_run(home / "one")
    flags = ["--advantage_estimator", "reinforce", "--teacher_model"]
    for run, teachers, message in (
        ("run", 'größe".jsonl=builtin', None),
        ("run", "größer.jsonl=builtin,builtin", 'unknown data source `größer.jsonl`; known: größe".jsonl'),
        ("run", "m.jsonl=builtin", "unknown data source `m.jsonl`"),
        ("one", "m.jsonl=builtin", "all prompts are of a single one"),
    ):
        assert main(["ppo", "--replay", run, *flags, teachers]) == (2 if message else 0)
        assert (message or "") in capsys.readouterr().err
    [job] = jobs
    assert job.teachers == {'größe".jsonl': "teacher"}


@pytest.mark.parametrize(
    ("flags", "engines"),
    [([], 0), (["--async_train"], 3), (["--async_train", "--max_staleness", "0"], 0), (["--max_staleness", "2"], 0)],
)
def test_trainers_of_a_replay_get_as_many_cores_as_those_of_the_run(home, jobs, flags, engines):
    write_run(home / "run", *flags, "--vllm_num_engines", "3")
    assert main(["ppo", "--train_steps", "1", "--vllm_num_engines", "3", *flags]) == 0
    assert main(["ppo", "--replay", "run"]) == 0
    assert [job.num_busy_engines for job in jobs] == [engines] * 2
    assert [job.plan.engines.num_ranks for job in jobs] == [3, 0]


def test_options_of_what_a_replay_does_not_start_are_a_notice(home, jobs, capsys):
    write_run(home / "run")
    flags = ["--vllm_num_engines", "2", "--eval_data", "builtin", "--eval_steps", "3", "--input_key", "prompt"]
    assert main(["ppo", "--replay", "run", *flags, "--temperature", "0.5"]) == 0
    said = capsys.readouterr().err
    for name in ("vllm_num_engines", "eval_data", "eval_steps", "input_key"):
        assert f"--{name} has no effect: --replay trains on recorded rollouts" in said
    assert "--temperature has no effect" not in said and jobs[0].sampling.temperature == 0.5
    assert jobs[0].eval_prompts == ()


def test_dry_run_of_a_replay_shows_a_plan_without_engines_and_needs_no_prompts(home, jobs, capsys):
    prompts = home / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    write_run(home / "run", "--pretrain", "builtin", "--prompt_data", str(prompts), "--remote_rm_url", "math",
              "--label_key", "answer", "--rollout_batch_size", "2", "--train_batch_size", "2",
              "--n_samples_per_prompt", "1")  # fmt: skip
    prompts.unlink()
    assert main(["ppo", "--replay", "run", "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "vLLM" not in out and "the recorded steps of" in out and "still missing" not in out
    assert not jobs


def test_resumed_replay_replays(home, jobs):
    run = write_run(home / "run")
    assert main(["ppo", "--replay", "run", "--save_path", "again"]) == 0
    (home / "again/config.toml").write_text(jobs[0].config)
    assert main(["ppo", "--resume", "again"]) == 0
    assert (jobs[1].replay, jobs[1].save_path, jobs[1].checkpoints.resume) == (jobs[0].replay, jobs[0].save_path, True)
    assert jobs[1].replay == str(run / "rollouts.jsonl")


def test_step_of_a_run_is_repeated_elsewhere_and_compared(home, jobs, capsys):
    disk = home / "disk"
    run = write_run(home / "run", "--ckpt_path", str(disk), "--use_tensorboard", str(home / "tb"), "--save_path", "run")
    before = content(run)
    assert main(["replay", "run", "--step", "3"]) == 0
    [job] = jobs
    spec = job.checkpoints
    assert (job.num_steps, job.models["actor"].optimizer.total_steps) == (3, 80)
    assert (spec.home(run), spec.before, spec.resume, spec.every, spec.full, spec.hf_model) == (
        disk, 3, True, 0, False, False,
    )  # fmt: skip
    assert not job.record and not job.saves_models and job.trackers.use_tensorboard is None
    assert not job.save_path.startswith(str(home)) and not Path(job.save_path).exists()
    out = capsys.readouterr().out.splitlines()
    assert out[0].split() == ["metric", "recorded", "replayed", "difference"]
    assert [line.split() for line in out[1:4]] == [
        ["kl/reference", "-", "-", "-"],
        ["policy/loss", "0.25", "0.25", "0.0"],
        ["rollout/reward", "0.5", "0.5", "0.0"],
    ]
    assert out[4:] == ["step 3: 3 of 3 metrics agree within 0"]
    assert content(run) == before


def test_step_of_a_run_whose_reward_had_a_secret_address_is_repeated_without_it(home, jobs):
    write_run(home / "run", "--remote_rm_url", "math,https://me:secret@127.0.0.1/score?key=secret")
    assert "***" in (home / "run/config.toml").read_text()
    assert main(["replay", "run", "--step", "1"]) == 0
    assert [source.kind for source in jobs[0].reward.sources] == ["function", "server"]


@pytest.mark.parametrize(("flags", "status"), [([], 1), (["--tolerance", "0.01"], 1), (["--tolerance", "0.1"], 0)])
def test_status_tells_whether_all_metrics_agree_within_the_tolerance(home, jobs, capsys, flags, status):
    write_run(home / "run")
    jobs.loss = 0.3125
    assert main(["replay", "run", "--step", "1", *flags]) == status
    out = capsys.readouterr().out.splitlines()
    assert out[2].split() == ["policy/loss", "0.25", "0.3125", "0.0625", *(["differs"] if status else [])]
    assert out[-1].startswith(f"step 1: {3 - status} of 3 metrics agree within")


def test_compared_values():
    one = {"a": 1.0, "b": 100.0, "c": None, "d": None, "only": 1.0, "null": None}
    other = {"a": 1.5, "b": 150.0, "c": None, "d": 0.0, "more": 2.0}
    rows = {name: (difference, agrees) for name, _, _, difference, agrees in compare(one, other, 0.5)}
    assert rows == {
        "a": (0.5, True), "b": (50.0, True), "c": (None, True), "d": (None, False), "only": (None, False),
        "more": (None, False), "null": (None, False),
    }  # fmt: skip
    assert [agrees for *_, agrees in compare({"a": 0.1}, {"a": 0.1 + 1e-18}, 0.0)] == [True]
    assert [agrees for *_, agrees in compare({"a": 0.1}, {"a": 0.1 + 1e-16}, 0.0)] == [False]


def remove(*names):
    def act(run: Path) -> None:
        for name in names:
            (run / name).unlink()

    return act


def move_model(run: Path) -> None:
    shutil.rmtree(run.parent / "model")


BAD = {
    "no run": (["--step", "1"], None, "--run is missing: a run must be named", "rlhf replay RUN_DIR --step N"),
    "no step": (["run"], None, "--step is missing: one step is repeated", "rlhf replay RUN_DIR --step N"),
    "step 0": (["run", "--step", "0"], None, "--step is 0; it must be at least 1", ""),
    "no folder": (["nowhere", "--step", "1"], None, "there is no run in", "name the folder of a run"),
    "no such step": (["run", "--step", "4"], None, "metrics.jsonl has no step 4", "use --step 3"),
    "metrics that are none": (
        ["run", "--step", "1"],
        lambda run: (run / "metrics.jsonl").write_text("hello\n"),
        "metrics.jsonl:1 is no line of metrics",
        "repair",
    ),
    "no record": (
        ["run", "--step", "1"],
        remove("rollouts.jsonl"),
        "there is no record of rollouts",
        "--record is false",
    ),
    "a step that is not in the record": (
        ["run", "--step", "3"],
        lambda run: (run / "rollouts.jsonl").write_text("".join((run / "rollouts.jsonl").open().readlines()[:4])),
        "rollouts.jsonl has 2 complete steps, and --step is 3",
        "use --step 2",
    ),
    "no configuration": (["run", "--step", "1"], remove("config.toml"), "config.toml does not exist", ""),
    "model moved": (["run", "--step", "1"], move_model, "model", "hint"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_repeated_is_refused_with_a_hint(case, home, jobs, capsys):
    words, act, message, hint = BAD[case]
    shutil.copytree(MODEL_DIR, home / "model")
    run = write_run(home / "run", "--pretrain", str(home / "model"), "--prompt_data", "builtin",
                    "--remote_rm_url", "math", "--label_key", "answer", "--n_samples_per_prompt", "2",
                    "--rollout_batch_size", "2", "--train_batch_size", "2")  # fmt: skip
    if act is not None:
        act(run)
    assert main(["replay", *words]) == 2
    said = capsys.readouterr().err
    assert message in said[said.index("error: ") :] and hint in said
    assert not jobs


def test_dry_run_shows_the_options_and_starts_nothing(home, jobs, capsys):
    write_run(home / "run")
    assert main(["replay", "run", "--step", "2", "--dry_run"]) == 0
    assert "step = 2" in capsys.readouterr().out and not jobs


def test_checkpoint_of_the_step_itself_and_later_ones_are_not_what_it_starts_from(tmp_path):
    checkpoints = Checkpoints(tmp_path, max_num=9)
    for step in (2, 4, 6):
        (checkpoints.begin(step) / "actor").write_bytes(b"1234")
        checkpoints.commit(step, {}, [], None)
    found = [checkpoints.newest_whole(pytest.fail, before) for before in (2, 3, 4, 5, 7)]
    assert [checkpoint and checkpoint.step for checkpoint in found] == [None, 2, 2, 4, 6]
    (tmp_path / "step-4/actor").write_bytes(b"x")
    said = []
    assert checkpoints.newest_whole(said.append, 6).step == 2
    assert len(said) == 1 and "step-4 is skipped" in said[0]
