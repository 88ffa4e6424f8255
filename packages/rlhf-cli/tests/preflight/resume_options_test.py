"""Options of a run that continues: which contradict, which may change, and which cannot."""

import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_cli.builtin import MODEL_DIR
from rlhf_cli.commands.examples import COMMANDS
from rlhf_cli.commands.offline import _updates_of_ended_run
from rlhf_cli.commands.ppo import COMMAND_LINE, main
from rlhf_cli.config.paths import check_output_folder
from rlhf_cli.preflight.resume import (
    changed_options,
    check_can_continue,
    check_run_folders,
    has_checkpoint,
    run_folder,
    saying_how_to_resume,
    steps_of_ended_run,
)
from rlhf_data.errors import ConfigError
from rlhf_data.options.command_line import to_toml
from rlhf_train.algorithms.own_code import OwnCode


def parse(*argv):
    return COMMAND_LINE.parse(argv)


def written(folder, *argv):
    """Write the configuration that `argv` describes to a run's folder."""
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(parse(*argv).config))
    return folder


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--save_steps 5 --disable_ds_ckpt", "--save_steps 5 with --disable_ds_ckpt would save nothing"),
        ("--load_checkpoint --save_path r --disable_ds_ckpt", "saves nothing to continue from"),
        ("--max_ckpt_num 0", "--max_ckpt_num"),
        ("--max_ckpt_mem 0", "--max_ckpt_mem"),
        ("--resume nowhere", "--resume: .*nowhere does not exist\n\nhint: name the folder of a run"),
    ],
)
def test_contradictions_are_refused(argv, message, tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        parse(*argv.split())


def test_options_of_checkpoints_without_checkpoints_are_a_notice():
    [notice] = parse("--max_ckpt_num", "5").notices
    assert notice == "--max_ckpt_num has no effect: --save_steps is off"


def test_resume_takes_the_options_of_the_run_and_flags_override_them(tmp_path):
    run = written(tmp_path / "run", "--train_steps", "7", "--actor_learning_rate", "3e-4", "--seed", "9")
    config = parse("--resume", str(run), "--train_steps", "12").config
    assert (config.training.seed, config.training.actor_learning_rate, config.training.train_steps) == (9, 3e-4, 12)
    assert config.checkpoint.continues and not parse().config.checkpoint.continues


def test_run_that_ended_without_a_checkpoint_is_not_replaced(tmp_path):
    run = written(tmp_path / "run")
    resumed = parse("--resume", str(run)).config.checkpoint
    check_can_continue(resumed, run)  # it was killed before it saved anything: it starts again
    (run / "model").mkdir()
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 0.5}\n')
    check_can_continue(resumed, run)  # an error ended it before its first update: it starts again
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/reward": 0.5}\n{"step": 1, "loss": 0.5}\n{"st')
    check_can_continue(parse().config.checkpoint, run)
    with pytest.raises(ConfigError, match=r"has ended and has no checkpoint.*\n\nhint: start a new run"):
        check_can_continue(resumed, run)
    (run / "checkpoints/step-00000001").mkdir(parents=True)
    (run / "checkpoints/step-00000001/manifest.json").touch()
    check_can_continue(resumed, run)


def ended_run(tmp_path, *argv, summary='{"step": 7, "time/total": 9.5}\n', step=7):
    """Write a run of `ppo` that ended after seven steps: its last metrics, a checkpoint of `step`, and its model."""
    run = written(tmp_path / "run", *argv)
    (run / "metrics.jsonl").write_text(f'{{"step": 7, "loss": 0.5}}\n{summary}')
    (run / f"checkpoints/step-{step}").mkdir(parents=True)
    (run / f"checkpoints/step-{step}/manifest.json").touch()
    shutil.copytree(MODEL_DIR, run / "model")
    return run


def test_run_that_has_done_all_its_steps_ends_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rlhf_train.online.run_online", lambda job, view: pytest.fail("a run was started"))
    run = ended_run(tmp_path, "--train_steps", "7")
    for flags in ([], ["--train_steps", "5"]):
        assert main(["--resume", str(run), *flags]) == 0
        said = f"the run in {run} has done its 7 step(s): nothing is left to do\n\nhint: a larger --train_steps or"
        assert said in capsys.readouterr().out
    with pytest.raises(pytest.fail.Exception, match="a run was started"):
        main(["--resume", str(run), "--train_steps", "8"])
    assert "notice: --train_steps was 7 and is 8: from here on, learning rates follow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "done"),
    [
        ({}, 7),
        ({"summary": ""}, None),  # it was killed after its last checkpoint, and the model is that of an earlier error
        ({"summary": '{"step": 7, "time/tot'}, None),
        ({"step": 5}, None),  # the last two steps can be done again
    ],
    ids=["ended", "killed", "killed while it wrote", "old checkpoint"],
)
def test_run_has_ended_once_its_last_checkpoint_its_model_and_its_summary_are_there(tmp_path, change, done):
    run = ended_run(tmp_path, **change)
    section = parse("--resume", str(run)).config.checkpoint
    assert steps_of_ended_run(section, run) == done
    assert steps_of_ended_run(parse().config.checkpoint, run) is None
    (run / "model/model.safetensors").write_bytes(b"torn")
    assert steps_of_ended_run(section, run) is None
    shutil.rmtree(run / "model")
    assert steps_of_ended_run(section, run) is None


def test_rank_0_decides_for_all_ranks_that_an_offline_run_has_ended(tmp_path, monkeypatch):
    """Ranks of another node may have no run in the folder: they would start one, and wait for the others."""
    section = parse("--resume", str(ended_run(tmp_path))).config.checkpoint
    job = {"num_ranks": 2, "has_order_of": lambda path: True, "checkpoints": section.spec()}
    told = []
    monkeypatch.setattr("rlhf_train.offline.collectives.of_all_ranks", lambda own: [*told, own])
    first = SimpleNamespace(rank=0, model_path=tmp_path / "run/model", **job)
    second = SimpleNamespace(rank=1, model_path=tmp_path / "empty/model", **job)
    told.append(_updates_of_ended_run(section, first))
    assert _updates_of_ended_run(section, second) == told[0] == 7


def test_resume_in_another_folder_is_refused(tmp_path):
    run = written(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"continues in that folder, and --save_path is elsewhere\n\nhint: drop"):
        parse("--resume", str(run), "--save_path", "elsewhere")


def test_run_that_was_started_by_another_spelling_of_its_folder_is_resumed(tmp_path):
    run = written(tmp_path / "run", "--save_path", "run/")
    config = parse("--resume", str(run)).config
    assert (config.output.save_path, config.checkpoint.resume) == ("run/", str(run))


def test_changed_options_are_named_unless_they_leave_no_trace(tmp_path):
    run = written(tmp_path / "run", "--actor_learning_rate", "3e-4", "--train_steps", "5")
    same = ["--actor_learning_rate", "3e-4", "--train_steps", "5", "--save_steps", "3", "--eval_steps", "2"]
    assert changed_options(parse(*same).config, run) == []
    [notice] = changed_options(parse("--actor_learning_rate", "1e-4", *same[2:]).config, run)
    assert notice.startswith("--actor_learning_rate was 0.0003 and is 0.0001: from here on")
    assert changed_options(parse(*same).config, tmp_path / "new") == []
    with pytest.raises(ConfigError, match="--target_modules was all-linear and is q_proj, and the checkpoints"):
        changed_options(parse(*same, "--target_modules", "q_proj").config, run)


def test_option_that_the_run_did_not_know_is_named_unless_it_has_its_default(tmp_path):
    run = written(tmp_path / "run")
    text = (run / "config.toml").read_text(encoding="utf-8")
    (run / "config.toml").write_text(text.replace("overlap_comm = false\n", ""), encoding="utf-8")
    assert "overlap_comm" in text
    assert changed_options(parse().config, run) == []
    [notice] = changed_options(parse("--zero_stage", "2", "--overlap_comm").config, run)
    assert notice.startswith("--overlap_comm was not set and is True: from here on")


@pytest.mark.parametrize(
    ("flags", "has_notices"),
    [
        ([], True),
        (["--lr_scheduler", "linear", "--lr_warmup_ratio", "0"], True),
        (["--lr_scheduler", "constant", "--lr_warmup_ratio", "0.1"], True),
        (["--lr_scheduler", "constant", "--lr_warmup_ratio", "0"], False),
    ],
    ids=["cosine", "linear", "constant after a warm-up", "constant"],
)
def test_another_length_is_named_unless_learning_rates_do_not_depend_on_it(tmp_path, flags, has_notices):
    follows = "from here on, learning rates follow the schedule of a run of the new length"
    steps = f"--train_steps was 5 and is 9: {follows}"
    episodes = f"--num_episodes was 1 and is 3: {follows}"
    run = written(tmp_path / "run", "--train_steps", "5", "--num_episodes", "1", *flags)
    for more, said in (
        (["--train_steps", "5", "--num_episodes", "1"], []),
        (["--train_steps", "9", "--num_episodes", "1"], [steps]),
        (["--train_steps", "9", "--num_episodes", "3"], [episodes, steps]),
    ):
        assert changed_options(parse(*more, *flags).config, run) == (said if has_notices else [])


@pytest.mark.parametrize("line", [COMMAND_LINE, COMMANDS["sft"].command_line], ids=["ppo", "sft"])
def test_module_with_openrlhfs_name_resumes_with_the_folder_alone(tmp_path, line):
    run = tmp_path / "run"
    run.mkdir()
    flag = "--prompt_data" if line is COMMAND_LINE else "--dataset"
    more = ["--remote_rm_url", "http://localhost:1/x"] if line is COMMAND_LINE else []
    config = line.parse(["--pretrain", "builtin", flag, "a.jsonl", *more]).config
    (run / "config.toml").write_text(to_toml(config))
    assert line.parse(["--openrlhf", "--resume", str(run)]).config.model.pretrain == "builtin"


def test_a_draft_model_that_is_trained_stays_the_one_of_the_run(tmp_path):
    named = {each: ["--vllm_draft_model", each] for each in "ab"}
    rates = {rate: ["--draft_learning_rate", rate] for rate in ("1e-4", "1e-3")}
    trained = written(tmp_path / "trained", *named["a"], *rates["1e-4"])
    frozen = written(tmp_path / "frozen", *named["a"])
    for run, flags in (
        (trained, [*named["b"], *rates["1e-4"]]),
        (trained, named["a"]),
        (frozen, [*named["a"], *rates["1e-4"]]),
    ):
        with pytest.raises(ConfigError, match=r"and the checkpoints of (.|\n)*hint: drop --"):
            changed_options(parse(*flags).config, run)
    assert len(changed_options(parse(*named["a"], *rates["1e-3"]).config, trained)) == 1
    assert len(changed_options(parse(*named["b"]).config, frozen)) == 1


def test_run_on_fixed_examples_takes_its_options_too_and_keeps_its_examples(tmp_path):
    line = COMMANDS["sft"].command_line
    words = ["--pretrain", "builtin", "--dataset", "a.jsonl", "--save_steps", "5"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(line.parse(words).config))
    config = line.parse(["--resume", str(run), "--max_epochs", "2", "--eval_dataset", "b.jsonl"]).config
    assert (config.data.dataset, config.checkpoint.save_steps, config.training.max_epochs) == ("a.jsonl", 5, 2)
    [notice] = changed_options(config, run)
    assert notice.startswith("--max_epochs was 1 and is 2: from here on, learning rates follow")
    with pytest.raises(
        ConfigError, match=r"--dataset was a.jsonl and is b.jsonl, and the checkpoints(.|\n)*hint: drop"
    ):
        changed_options(line.parse(["--resume", str(run), "--dataset", "b.jsonl"]).config, run)


@pytest.mark.parametrize(
    "flags",
    [
        ["--seed", "8"],
        ["--advantage_estimator", "rloo"],
        ["--difficulty_pool", "True"],
        ["--adaptive_mix", "True"],
    ],
)
def test_options_that_the_state_belongs_to_cannot_change(tmp_path, flags):
    run = written(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=rf"{flags[0]} was .* and is {flags[1]}, and the checkpoints(.|\n)*hint: drop"
    ):
        changed_options(parse(*flags).config, run)


def test_checkpoints_of_another_run_are_refused_unless_the_run_continues_from_them(tmp_path):
    disk = tmp_path / "disk"
    (disk / "step-4").mkdir(parents=True)

    def check(*flags):
        check_run_folders(parse("--ckpt_path", str(disk), *flags).config.checkpoint, tmp_path / "run")

    check()  # nothing but an empty folder
    (disk / "step-4/manifest.json").touch()
    with pytest.raises(ConfigError, match=r"disk holds the checkpoints of another run\n\nhint: name another"):
        check()
    check("--load_checkpoint", "--save_path", str(tmp_path / "run"))


def test_load_checkpoint_alone_continues_the_newest_run_of_the_command_that_has_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    section = parse("--load_checkpoint").config.checkpoint
    home = tmp_path / "rlhf-output"
    assert run_folder(section, None, "ppo").parent == home and not home.exists()  # there is none: a new folder
    for number, name in enumerate(("ppo-1", "ppo-2", "ppo-3", "sft-9")):
        step = home / name / "checkpoints" / "step-5"
        step.mkdir(parents=True)
        (step / "manifest.json").touch()
        os.utime(step / "manifest.json", (0, 100 - number if name != "sft-9" else 200))
    (home / "ppo-4" / "checkpoints").mkdir(parents=True)  # a run without a checkpoint
    assert run_folder(section, None, "ppo") == home / "ppo-1"
    assert run_folder(section, str(tmp_path / "named"), "ppo") == tmp_path / "named"
    assert run_folder(parse().config.checkpoint, None, "ppo").name not in {"ppo-1", "ppo-2", "ppo-3", "ppo-4"}


@pytest.mark.parametrize("inner", ["", "_actor/"])
def test_checkpoints_of_openrlhf_are_recognised_and_refused(tmp_path, inner):
    disk = tmp_path / "disk"
    (disk / f"{inner}global_step20").mkdir(parents=True)

    def check():
        flags = ("--ckpt_path", str(disk), "--load_checkpoint")
        check_run_folders(parse(*flags).config.checkpoint, tmp_path / "run")

    with pytest.raises(ConfigError, match=r"a checkpoint of OpenRLHF, global_step20, .*\n\nhint: .*--pretrain MODEL"):
        check()
    (disk / "global_step20_hf").mkdir()
    (disk / "global_step20_hf/config.json").touch()
    with pytest.raises(ConfigError, match=r"hint: .*--pretrain .*disk/global_step20_hf$"):
        check()
    (disk / "step-4").mkdir()
    (disk / "step-4/manifest.json").touch()
    check()


@pytest.mark.parametrize("flag", ["--save_path", "--ckpt_path"])
def test_folders_in_rays_copy_of_a_submitted_job_are_refused_with_one_that_stays(tmp_path, monkeypatch, flag):
    copy = tmp_path / "session_1/runtime_resources/working_dir_files/_ray_pkg_0123"
    copy.mkdir(parents=True)
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(copy))
    monkeypatch.setenv("HOME", "/home/someone")
    section = parse(flag, "output/x").config
    folder = run_folder(section.checkpoint, section.output.save_path, "ppo")
    stays = tmp_path / "run"
    with pytest.raises(ConfigError, match=rf"(?s){flag} .*hint: .*{flag} /home/someone/output/x$") as caught:
        check_run_folders(section.checkpoint, folder if flag == "--save_path" else stays)
    assert "Ray's copy" in str(caught.value)
    with pytest.raises(ConfigError, match="--save_path /home/someone/rlhf-output/ppo-"):  # the default folder
        check_run_folders(parse().config.checkpoint, run_folder(parse().config.checkpoint, None, "ppo"))


def test_folder_of_checkpoints_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--ckpt_path /proc/none cannot be written.*\n\nhint: name a folder"):
        check_run_folders(parse("--ckpt_path", "/proc/none").config.checkpoint, tmp_path / "run")
    with pytest.raises(ConfigError, match="--save_path /proc/none cannot be written"):
        check_run_folders(parse().config.checkpoint, Path("/proc/none"))


def test_folder_of_a_run_may_be_used_only_to_continue_it(tmp_path):
    run = written(tmp_path / "run")
    check_output_folder(run, holds_run=True)
    with pytest.raises(ConfigError, match=f"is not an empty folder\n\nhint: name a new one, or add --resume {run}$"):
        check_run_folders(parse().config.checkpoint, run)
    (run / "model").mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    with pytest.raises(ConfigError, match=r"\n\nhint: name a new one$"):
        check_run_folders(parse().config.checkpoint, run)  # it has ended without a checkpoint
    with pytest.raises(ConfigError, match=r"\n\nhint: name a new one$"):
        check_output_folder(run, "--output_path")  # of another command, which does not continue runs
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        check_output_folder(tmp_path / "other", holds_run=True)


def test_checkpoint_is_looked_for_where_it_is_saved(tmp_path):
    run = written(tmp_path / "run")
    assert not has_checkpoint(parse().config.checkpoint, run)
    for home, flags in ((run / "checkpoints", []), (tmp_path / "disk", ["--ckpt_path", str(tmp_path / "disk")])):
        (home / "step-3").mkdir(parents=True)
        assert not has_checkpoint(parse(*flags).config.checkpoint, run)
        (home / "step-3/manifest.json").write_text("{}")
        assert has_checkpoint(parse(*flags).config.checkpoint, run)


@pytest.mark.parametrize(
    ("error", "more"),
    [
        (RuntimeError("CUDA error"), ""),
        (KeyboardInterrupt(), ""),
        # Of a copy, as it comes from the process of a rank.
        (
            pickle.loads(pickle.dumps(OwnCode("keep_group", "keep.py", "").error("failed", "mend it"))),
            " with the same file; to go on with a mended one, start a new run with --pretrain {}",
        ),
    ],
)
def test_run_that_any_error_ends_says_how_it_continues(tmp_path, error, more):
    section = parse().config.checkpoint
    said = []
    for num_notices in (0, 1):
        with pytest.raises(type(error)), saying_how_to_resume("ppo", section, tmp_path, said.append):
            raise error
        assert len(said) == num_notices
        (tmp_path / "checkpoints/step-1").mkdir(parents=True, exist_ok=True)
        (tmp_path / "checkpoints/step-1/manifest.json").touch()
    text = f"`rlhf ppo --resume {tmp_path}` continues this run from its newest checkpoint"
    assert said == [text + more.format(tmp_path)]
    # The same command line has just been refused, by an error with a hint of its own.
    resumed = section.model_copy(update={"resume": str(tmp_path)})
    with pytest.raises(ConfigError), saying_how_to_resume("ppo", resumed, tmp_path, said.append):
        raise ConfigError("the file is not the one that the run began with", hint="copy it")
    assert len(said) == 1
