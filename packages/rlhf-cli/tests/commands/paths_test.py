"""What a user types, seen from the user's folder."""

from datetime import datetime
from pathlib import Path

import pytest

from rlhf_cli import main
from rlhf_cli.builtin import HELD_OUT_FILE, MODEL_DIR, TRAIN_FILE
from rlhf_cli.commands import lora_combiner, ppo
from rlhf_cli.commands.examples import COMMANDS
from rlhf_cli.config import paths
from rlhf_data.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    return tmp_path


def with_paths(command, argv):
    return paths.with_full_paths(main.command_line(command).parse(argv).config)


def test_user_path_keeps_absolute_paths_and_expands_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert paths.user_path("/data/x.jsonl") == Path("/data/x.jsonl")
    assert paths.user_path("~/x.jsonl") == Path("/home/me/x.jsonl")
    assert paths.user_path("x.jsonl") == folder / "x.jsonl"


def test_builtin_names_stand_for_what_ships(folder):
    assert paths.data_path("builtin") == TRAIN_FILE
    assert paths.data_path("builtin", held_out=True) == HELD_OUT_FILE
    assert paths.model_path("builtin") == str(MODEL_DIR)


def test_model_path_is_a_folder_or_stays_a_hub_name(folder):
    (folder / "mine").mkdir()
    assert paths.model_path("mine") == str(folder / "mine")
    assert paths.model_path("./absent") == str(folder / "absent")
    assert paths.model_path("Qwen/Qwen2.5-0.5B") == "Qwen/Qwen2.5-0.5B"


def test_names_of_teachers_are_words_of_ppo_and_folders_of_kd(folder):
    (folder / "ema").mkdir()
    sources = "".join(f"source-{number}.jsonl=ema," for number in range(20))  # longer than a file's name can be
    for command, text, full in (
        ("kd", "ema", f"{folder}/ema"),
        ("ppo", "ema", "ema"),
        ("ppo", f"{sources}./a", f"{sources}{folder}/a"),
    ):
        argv = ["--dry_run", "--teacher_model", text]
        argv += ["--enable_ema"] if command == "ppo" else []
        [section] = [part for part in vars(with_paths(command, argv)).values() if hasattr(part, "teacher_model")]
        assert section.teacher_model == full


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_model_path_of_a_run_is_the_model_that_it_saved(folder, name):
    run = folder / "rm"
    (run / "model").mkdir(parents=True)
    (run / "model" / name).write_text("{}")
    assert paths.model_path("rm") == str(run)  # a folder that no run wrote
    (run / "config.toml").write_text("")
    for text in ("rm", "./rm", str(run), "rm/model"):
        assert Path(paths.model_path(text)) == run / "model"
    (run / name).write_text("{}")
    assert paths.model_path("rm") == str(run)


def test_every_command_says_that_a_model_is_named_by_the_folder_of_a_run(folder, capfd):
    for name in ("one", "two"):
        (folder / name / "model").mkdir(parents=True)
        (folder / name / "model/config.json").write_text("{}")
        (folder / name / "config.toml").write_text("")
    one, two = ({"folder": folder / name} for name in ("one", "two"))
    said = "--{} {folder} is the folder of a run; its model is {folder}/model".format
    words = ["--pretrain", "one", "--prompt_data", "builtin", "--input_key", "prompt"]
    online = ppo.COMMAND_LINE.parse([*words, "--reward_pretrain", "owner/name, two,one/model"])
    assert list(online.notices[:2]) == [said("pretrain", **one), said("reward_pretrain", **two)]
    offline = COMMANDS["dpo"].command_line.parse(["--pretrain", "one", "--ref_pretrain", "two", "--dataset", "x.jsonl"])
    assert list(offline.notices[:2]) == [said("pretrain", **one), said("ref_pretrain", **two)]
    merge = lora_combiner.COMMAND_LINE.parse(["--model_path", "one", "--lora_path", "two", "--output_path", "x"])
    assert list(merge.notices) == [said("model_path", **one), said("lora_path", **two)]
    assert main.main(["generate", *words, "--output_path", "x.jsonl", "--dry_run"]) == 0
    assert capfd.readouterr().err.count(f"notice: {said('pretrain', **one)}\n") == 1


def test_commands_of_rlhf_rollout_get_the_files_that_builtin_stands_for(folder, monkeypatch):
    found = []
    monkeypatch.setattr("rlhf_rollout.commands.generate.run", found.append)
    words = ["--pretrain", "builtin", "--prompt_data", "builtin", "--input_key", "prompt", "--output_path", "x.jsonl"]
    main.main(["generate", *words])
    [config] = found
    assert (config.model.pretrain, config.data.prompt_data) == (str(MODEL_DIR), str(TRAIN_FILE))


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_reads_its_configuration_from_the_users_folder(folder, name):
    (folder / "own.toml").write_text("")
    main.command_line(name).parse(["--config", "own.toml", "--dry_run"])


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("r.py", "{}/r.py"),
        ("sub/r.py:score", "{}/sub/r.py:score"),
        ("package.module:function", "package.module:function"),
        ("/abs/r.py", "/abs/r.py"),
        ("package.pyramid", "package.pyramid"),
    ],
)
def test_reward_path_resolves_files_only(folder, text, resolved):
    assert paths.reward_path(text) == resolved.format(folder)


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("a.py", "{}/a.py"),
        ("a.py:solve", "{}/a.py:solve"),
        ("package.module", "package.module"),
        ("sh a.py --file 'my data.txt' --times 3", "sh {}/a.py --file '{}/my data.txt' --times 3"),
        ("sh /bin/sh absent.sh", "sh /bin/sh absent.sh"),
    ],
)
def test_agent_path_resolves_files_also_those_in_a_command_line(folder, text, resolved):
    for name in ("a.py", "my data.txt", "sh"):
        (folder / name).write_text("")
    assert paths.agent_path(text) == resolved.format(folder, folder)


def test_output_folder_is_under_the_users_folder(folder):
    assert paths.output_folder("runs/a", "ppo") == folder / "runs" / "a"
    automatic = paths.output_folder(None, "ppo")
    assert automatic.parent == folder / "rlhf-output"
    assert automatic.name.startswith("ppo-2")


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(folder, monkeypatch):
    class Clock:
        @staticmethod
        def now():
            return datetime(2031, 2, 3, 4, 5, 6)

    monkeypatch.setattr(paths, "datetime", Clock)
    names = []
    for _ in range(3):
        path = paths.output_folder(None, "ppo")
        path.mkdir(parents=True)
        names.append(path.name)
    assert names == ["ppo-20310203-040506", "ppo-20310203-040506-2", "ppo-20310203-040506-3"]


@pytest.mark.parametrize("text", ["file", "file/below", "full/of/things", "/proc/nowhere"])
def test_output_folder_that_cannot_be_used_is_refused_and_leaves_nothing(folder, text):
    (folder / "file").write_text("")
    (folder / "full" / "of" / "things").mkdir(parents=True)
    (folder / "full" / "of" / "things" / "x").write_text("")
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError, match=r"--save_path .* (is not an empty folder|cannot be written).*\n\nhint: "):
        paths.check_output_folder(paths.user_path(text))
    assert sorted(folder.rglob("*")) == before
