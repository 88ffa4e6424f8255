"""Error texts and the tree."""

import pickle

import pytest

from rlhf_data import errors
from rlhf_data.errors import ConfigError, first_line, joined, missing_file, nearest, unknown, with_hint

NAMES = ["ConfigError", "DataError", "EngineError", "RewardError", "WeightSyncError", "CheckpointError"]


@pytest.mark.parametrize("name", NAMES)
def test_errors_share_a_base_and_pickle(name):
    error = getattr(errors, name)("what\n\nhint: why")
    assert isinstance(error, errors.RlhfError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "what\n\nhint: why"


def test_errors_write_their_hint_below_the_message_and_keep_it_across_processes():
    error = pickle.loads(pickle.dumps(ConfigError("what", hint="why")))
    assert type(error) is ConfigError and str(error) == "what\n\nhint: why"
    assert str(ConfigError("what", hint=None)) == "what"


def test_unknown_lists_the_known_and_guesses():
    assert unknown("flag", "zero_stag", ["zero_stage", "seed"]) == (
        "unknown flag `zero_stag`; known: seed, zero_stage\n\nhint: did you mean `zero_stage`?"
    )
    assert unknown("flag", "qqqq", ["seed"]) == "unknown flag `qqqq`; known: seed"
    assert nearest("qqqq", ["seed"]) is None


def test_joined_messages_have_one_hint_at_the_end():
    first, second = with_hint("a", "do x"), with_hint("b", "do y")
    assert joined([first, first, second, "c"], "\n") == "a\na\nb\nc\n\nhint: do x; do y"
    assert joined([first], "; ", "do z") == "a\n\nhint: do x; do z"
    assert joined(["a", "b"], "; ") == "a; b"


def test_missing_file_tells_folder_missing_file_and_folder_given_apart(tmp_path):
    (tmp_path / "reward.py").touch()
    assert missing_file("file", tmp_path / "rewrd.py").endswith(f"hint: did you mean {tmp_path / 'reward.py'}?")
    message = f"file {tmp_path / 'zzzz'} does not exist\n\nhint: `ls {tmp_path}` shows what is there"
    assert missing_file("file", tmp_path / "zzzz") == message
    assert "there is no folder" in missing_file("file", tmp_path / "a" / "b")
    (tmp_path / "link").symlink_to("gone")
    assert missing_file("file", tmp_path / "link").endswith("hint: it is a link to gone, which is missing")
    assert missing_file("file", tmp_path).endswith("is a folder, not a file\n\nhint: name a file in it")


def test_first_line_names_the_type_of_an_error():
    assert first_line(ValueError("\n no data \nat row 3")) == "ValueError: no data "
    assert first_line(RuntimeError()) == "RuntimeError: "
