"""The command `rlhf-data inspect`: what it prints, and what it refuses."""

import errno
import os
import subprocess
import sys

import pytest

from record_testing import write_jsonl
from rlhf_data.errors import EngineError
from rlhf_data.main import main
from rlhf_data.options import exits
from rlhf_data.options.sections import TemplateSection

WORDS = ["<unk>", "</s>", "user", "assistant", "one", "two", "#"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer of seven words and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ' ' + m.content + ' </s> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


def inspect(capsys, dataset, *arguments):
    """Return the exit status, and what was printed on stdout and, without lines about progress, on stderr."""
    status = main(["inspect", "--dataset", str(dataset), *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, "".join(line for line in err.splitlines(keepends=True) if not line.endswith(" ...\n"))


def test_inspect_counts_rows_and_keys_without_a_tokenizer(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "one", "output": 1}, {"input": "two"}, 7])
    status, out, err = inspect(capsys, f"{path},{path}", "--row", 2)
    assert (status, err) == (0, "")
    assert out == (
        f"  input: text in 4 rows\n  output: a number in 2 rows\n4 rows can be read, 2 cannot\n"
        f"  {path}:3: a row must be a JSON object, got a number\n"
        f"  {path}:3: a row must be a JSON object, got a number\n\nrow 2 ({path}:2)\n  input: two\n"
    )


def test_inspect_measures_and_marks_what_is_trained(tmp_path, capsys, tokenizer):
    rows = [{"input": "one", "output": "two"}, {"input": "one one", "output": "two two"}, {"input": "one"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    status, out, _ = inspect(capsys, path, "--tokenizer", tokenizer, "--row", 2, "--max_len", 4)
    assert status == 0
    # Tokens: one two </s>, and one one two two </s>; trained: 2 and 3.
    assert "2 examples, 1 rows cannot be used\n" in out
    assert f"  {path}:3: unknown key `output`; known: input\n" in out
    lines = out.splitlines()
    assert [line.split() for line in lines if line.startswith(("tokens", "trained"))] == [
        ["tokens", "3", "4", "5", "5", "5"],
        ["trained", "2", "2", "3", "3", "3"],
    ]
    assert "1 examples are longer than --max_len 4" in lines
    assert lines[-2:] == ["  sequence: 5 tokens, 3 trained (in [[ ]])", "one one[[two two </s>]]"]


@pytest.mark.parametrize(
    ("row", "options", "shown"),
    [
        ({"input": "one", "output": "two"}, ["--apply_chat_template"], ["user one </s> assistant[[two </s>]]"]),
        (
            {"input": "one", "output": "two"},
            [
                "--apply_chat_template",
                "--tokenizer_chat_template",
                "{% for m in messages %}{{ m.content }} {% endfor %}",
            ],
            ["one[[two </s>]]"],
        ),
        ({"input": "one two"}, ["--pretrain_mode", "--output_key", "None"], ["one[[two </s>]]"]),
        (
            {"chosen": "one two", "rejected": "two two", "m": 2},
            ["--kind", "preference", "--margin_key", "m"],
            ["one[[two </s>]]", "two[[two </s>]]", "  margin: 2.0"],
        ),
        (
            {"input": "one", "output": "two", "good": 0},
            ["--kind", "unpaired", "--label_key", "good"],
            ["one[[two </s>]]", "  is_desirable: False"],
        ),
        (
            {"input": "one # two", "label": ["+"]},
            ["--kind", "process", "--placeholder_token", "#"],
            ["one[[#]]two", "  labels: [1.]"],
        ),
    ],
)
def test_inspect_shows_each_kind(tmp_path, capsys, tokenizer, row, options, shown):
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    status, out, err = inspect(capsys, path, "--tokenizer", tokenizer, *options)
    assert (status, err) == (0, "")
    for line in shown:
        assert line in out.splitlines()


def test_inspect_row_that_cannot_be_used_says_why(tmp_path, capsys, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "one", "output": ""}, {"input": "one", "output": "two"}])
    status, out, _ = inspect(capsys, path, "--tokenizer", tokenizer)
    assert status == 0
    assert out.endswith(f"row 1 ({path}:1)\n  cannot be used: {path}:1: `output` is empty\n")
    path = write_jsonl(tmp_path / "b.jsonl", [{"input": [], "output": "one"}, {"input": "one", "output": "two"}])
    *_, message, empty, hint = inspect(capsys, path, "--tokenizer", tokenizer)[1].splitlines()
    assert message == f"  cannot be used: {path}:1: `input` is a list of messages"
    assert (empty, hint) == ("", "hint: messages need --apply_chat_template")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--row", "3"], "--row 3: there are 1 rows that can be read"),
        (["--row", "0"], "--row is 0; it must be at least 1"),
        (["--kind", "sfft"], "--kind: unknown value `sfft`"),
        (["--inptu_key", "x"], "hint: did you mean `--input_key`?"),
        (["--input_key", "x"], "--input_key has no effect without a tokenizer"),
        (["--tokenizer", "TOKENIZER", "--chosen_key", "x"], "unknown option of --kind sft `chosen_key`"),
        (["--tokenizer", "TOKENIZER", "--kind", "process"], "--placeholder_token is missing"),
        (["--tokenizer", "/nowhere"], "there is no model folder /nowhere"),
    ],
)
def test_inspect_refuses_what_has_no_effect_or_cannot_be(tmp_path, capsys, tokenizer, arguments, says):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "one", "output": "two"}])
    status, _, err = inspect(capsys, path, *(tokenizer if word == "TOKENIZER" else word for word in arguments))
    assert status == 2
    assert says in err


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (r"Q: {}\nA: ", "Q: {}\nA: "),
        (r"user: {}\nassistant: ", "user: {}\nassistant: "),
        (r"{}\nnot now\n\nexplain\n", "{}\nnot now\n\nexplain\n"),
        ("{}\n$", "{}\n$"),
        (r"{}\n\nabla f \neq \nu_1", "{}\n\\nabla f \\neq \\nu_1"),
        (r"\Rightarrow \nRightarrow {} \not\in x \\next", r"\Rightarrow \nRightarrow {} \not\in x \\next"),
    ],
)
def test_typed_newlines_are_newlines_and_latex_stays(typed, read):
    assert TemplateSection(input_template=typed).input_template == read
    assert TemplateSection(input_template=read).input_template == read


def test_inspect_reads_a_chat_template_from_its_file(tmp_path, capsys, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "one", "output": "two"}])
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    flags = ["--tokenizer", tokenizer, "--apply_chat_template", "--tokenizer_chat_template"]
    status, out, _ = inspect(capsys, path, *flags, template)
    assert status == 0
    assert "one[[two </s>]]" in out.splitlines()
    status, _, err = inspect(capsys, path, *flags, tmp_path / "chat.jinj")
    assert status == 2
    assert f"--tokenizer_chat_template: file {tmp_path / 'chat.jinj'} does not exist" in err


def test_inspect_without_rows_needs_them_and_a_dry_run_lists_that(capsys):
    assert main(["inspect"]) == 2
    assert "error: --dataset is missing" in capsys.readouterr().err
    assert main(["inspect", "--row", "3", "--dry_run"]) == 0
    out, err = capsys.readouterr()
    assert '[inspection]\nkind = "sft"\ntokenizer' not in out  # None is the default, which TOML leaves out
    assert "row = 3\n" in out
    assert err.startswith("still missing: --dataset is missing")


def test_unknown_command_names_the_nearest(capsys):
    assert main(["inspekt"]) == 2
    assert "hint: did you mean `inspect`?" in capsys.readouterr().err


def test_a_full_disk_is_an_error_with_a_hint_in_any_command(capsys):
    """/dev/full answers each write as a full disk does; other errors of the system stay faults of the program."""

    def write():
        with open("/dev/full", "w") as file:
            file.write("row\n")

    assert exits.exit_status(write) == 1
    error = capsys.readouterr().err
    assert f"cannot be written: {os.strerror(errno.ENOSPC)}" in error
    assert "\n\nhint: free space" in error
    with pytest.raises(FileNotFoundError):
        exits.exit_status(lambda: os.stat("/dev/none"))


def test_command_gets_the_words_after_its_name_and_one_that_cannot_run_has_status_2(capsys, monkeypatch):
    calls = []

    def run(name, flags):
        calls.append((name, flags))
        raise EngineError("it does not start")

    titles = {"a": "one", "longer": "two"}
    monkeypatch.setattr(sys, "argv", ["tool", "a", "--flag"])
    assert exits.run_command("tool", titles, None, run) == 2
    assert calls == [("a", ["--flag"])]
    assert exits.exit_status(lambda: run("b", [])) == 1
    assert exits.run_command("tool", titles, [], run) == 0
    assert "\n  a       one\n  longer  two\n" in capsys.readouterr().out


def test_end_of_a_command_searches_no_imported_object_for_garbage():
    code = "import atexit, gc; from rlhf_data.options.exits import exit_status\n"
    code += "atexit.register(lambda: print(len(gc.get_objects()), gc.get_freeze_count()))\nexit_status(lambda: 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    searched, skipped = map(int, done.stdout.split())
    assert searched < 100 < 5000 < skipped
