"""--chat_template_kwargs: every command that renders gives the chat template the values of its variables."""

import builtins
import json

import pytest

from record_testing import write_jsonl
from rlhf_rollout.commands.main import COMMANDS, main
from rlhf_rollout.engines.fake import FakeEngine
from sentencepiece_testing import make_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}|{% endfor %}{% if think is defined and not think %}quick{% endif %}"
GIVEN = ["--chat_template_kwargs", '{"think": false}']


@pytest.fixture
def tokenizer(tmp_path):
    made = make_tokenizer("bytes")
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path / "tokenizer")
    return made


@pytest.fixture
def asked(monkeypatch, tokenizer):
    """The prompts that engines get."""
    texts = []

    def script(prompt, _):
        texts.append(tokenizer.decode(prompt))
        return [tokenizer.eos_token_id]

    monkeypatch.setattr("rlhf_rollout.engines.process.build_engine", lambda *_: FakeEngine(script=script))
    lines = iter(["2+2", "/exit"])
    monkeypatch.setattr(builtins, "input", lambda _: next(lines))
    return texts


@pytest.mark.parametrize("command", ["generate", "bench", "chat"])
@pytest.mark.parametrize(("given", "expected"), [(GIVEN, "2+2|quick"), ([], "2+2|")])
def test_prompts_are_rendered_with_the_values(tmp_path, asked, command, given, expected):
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"input": "2+2"}])
    words = [command, "--engine", "fake", "--tokenizer", str(tmp_path / "tokenizer"), *given]
    if command != "chat":
        words += ["--prompt_data", str(prompts), "--apply_chat_template"]
    words += ["--output_path", str(tmp_path / "out.jsonl")] if command == "generate" else []
    assert main(words) == 0
    assert asked[0] == expected


@pytest.mark.parametrize(("given", "expected"), [(GIVEN, "2+2|quick"), ([], "2+2|")])
def test_score_renders_the_question_with_the_values(tmp_path, tokenizer, given, expected):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"input": "2+2", "output": "4"}])
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward_func(queries, prompts, labels):\n"
        f"    return {{'rewards': [float(prompt == {expected!r}) for prompt in prompts]}}\n"
    )
    words = ["score", "--tokenizer", str(tmp_path / "tokenizer"), "--dataset", str(rows), "--apply_chat_template"]
    words += ["--remote_rm_url", str(reward), "--output_path", str(tmp_path / "out.jsonl"), *given]
    assert main(words) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["reward"] == 1.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{think: false}", "--chat_template_kwargs: {think: false} is not JSON: "),
        ("[1]", "--chat_template_kwargs: [1] is no JSON object"),
        ('{"thnk": false}', "--chat_template_kwargs: the chat template does not read `thnk`"),
    ],
)
def test_values_that_are_none_are_refused(tmp_path, tokenizer, capsys, text, says):
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"input": "2+2"}])
    words = ["generate", "--engine", "fake", "--tokenizer", str(tmp_path / "tokenizer"), "--prompt_data", str(prompts)]
    words += ["--output_path", str(tmp_path / "out.jsonl"), "--apply_chat_template", "--chat_template_kwargs", text]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "\n\nhint: write " in error


@pytest.mark.parametrize("command", ["generate", "bench", "score"])
def test_values_that_nothing_renders_are_a_notice(command):
    def notices(*words):
        return COMMANDS[command].command_line("x").parse([*GIVEN, "--dry_run", *words]).notices

    said = "--chat_template_kwargs has no effect: --apply_chat_template is off"
    assert said in notices()
    assert said not in notices("--apply_chat_template")
    if command == "generate":  # its agent may ask for conversations
        assert said not in notices("--agent_func_path", "agent.py")
    told = COMMANDS["chat"].command_line("x").parse([*GIVEN, "--dry_run", "--input_template", "Q {}"]).notices
    assert "--chat_template_kwargs has no effect: --input_template takes the place of the chat template" in told
