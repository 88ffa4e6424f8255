"""Training data of generated responses: what each post-processor keeps, that trainers read it, and runs that go on."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from record_testing import read_jsonl, write_jsonl
from rlhf_data.chat.tokens import encode_prompts
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.load import load_examples
from rlhf_data.examples.preference import PreferenceEncoder
from rlhf_data.examples.sft import SftEncoder
from rlhf_data.rows.sources import open_sources
from rlhf_data.testing import EOS_ID, ByteTokenizer
from rlhf_rollout.commands.generate import take_up
from rlhf_rollout.commands.main import main
from rlhf_rollout.commands.post_process import post_process
from rlhf_rollout.engines.fake import FakeEngine
from rollout_testing import generate_words

TOKENIZER = ByteTokenizer()
TEMPLATE = "Q: {} A:"


def record(text, reward, verdict="ok", finish_reason="stop", question="q"):
    values = {"reward": reward, "verdict": verdict, "finish_reason": finish_reason}
    return {"input": question, "text": text, "label": "L", **values}


GROUP = [
    record("low", -1.0, "wrong"),
    record("high", 2.0),
    record("cut", 3.0, finish_reason="length"),
    record("crashed", None, "crash"),
    record("high", 2.0),
    record("  ", 9.0),
    record("middle", 0.5),
]


def made(kind, group=GROUP, **options):
    return list(post_process(group, kind, **options))


@pytest.mark.parametrize(
    ("kind", "options", "kept"),
    [
        ("plain", {}, ["low", "high", "cut", "crashed", "high", "middle"]),  # all that are not empty
        ("best_of_n", {}, ["cut"]),
        ("rs", {}, ["high", "cut", "middle"]),  # once each
        ("rs", {"min_reward": 1.0}, ["high", "cut"]),
        ("rs", {"min_reward": -1.0}, ["low", "high", "cut", "middle"]),
    ],
)
def test_responses_that_are_kept(kind, options, kept):
    rows = made(kind, **options)
    assert [row["output"] for row in rows] == kept
    assert all(row["finish_reason"] == ("length" if row["output"] == "cut" else "stop") for row in rows)


def test_rendered_has_the_prompt_as_the_model_saw_it():
    group = [one | {"prompt": "<user> q <bot>"} for one in (record("low", -1.0), record("crashed", None))]
    assert [(row["input"], row["output"]) for row in made("rendered", group)] == [
        ("<user> q <bot>", "low"),
        ("<user> q <bot>", "crashed"),
    ]
    assert made("plain")[0] == {"input": "q", "output": "low", "reward": -1.0, "label": "L", "finish_reason": "stop"}


def test_best_of_responses_without_a_reward_is_none():
    assert made("best_of_n", [GROUP[3]]) == []


def test_iterative_dpo_pairs_the_best_and_the_worst_of_those_that_ended():
    # The response with the reward 3 was cut, so 2 is the best; -1 the worst: the margin is 3.
    answers = {"prompt": "q", "chosen": "high", "rejected": "low"}
    assert made("iter_dpo") == [{**answers, "chosen_reward": 2.0, "rejected_reward": -1.0, "margin": 3.0}]


@pytest.mark.parametrize("group", [[], GROUP[1:2], [record("a", 1.0), record("b", 1.0)], GROUP[2:4]])
def test_iterative_dpo_makes_no_pair_where_nothing_is_better(group):
    assert made("iter_dpo", group) == []


def test_conditional_sft_writes_the_reward_into_the_input_and_takes_braces_as_they_are():
    [row] = made("csft", [record("x", 1.234, question="f{reward}{input}")], reward_template="<{reward}> {input}!")
    assert (row["input"], row["output"]) == ("<1.23> f{reward}{input}!", "x")


@pytest.fixture
def prompts(tmp_path):
    return write_jsonl(tmp_path / "prompts.jsonl", [{"q": f"{n}+1=", "a": n + 1} for n in range(6)])


@pytest.fixture
def reward(tmp_path):
    (tmp_path / "reward.py").write_text("def reward_func(q, p, l): return {'rewards': [float(len(t)) for t in q]}\n")
    return str(tmp_path / "reward.py")


@pytest.fixture
def scripted(monkeypatch):
    """Engines that write letters, of a number that depends on prompt and sample; one in four is cut."""
    script = lambda prompt, seed: [*(b"abcdefgh"[: 1 + (sum(prompt) + seed) % 8]), EOS_ID]  # noqa: E731
    monkeypatch.setattr(
        "rlhf_rollout.engines.process.build_engine",
        lambda kind, spec: FakeEngine(spec, script=script),
    )


def arguments(prompts, out, more=""):
    """Return the command line with the words of `more`."""
    return generate_words(prompts, out, "--input_key", "q", "--input_template", TEMPLATE, "--seed", "3", *more.split())


@pytest.mark.parametrize("kind", ["plain", "best_of_n", "rs", "csft"])
def test_rows_of_answers_are_read_by_the_sft_loader_with_the_tokens_of_generation(
    prompts, reward, tmp_path, scripted, capsys, kind
):
    out = tmp_path / "out.jsonl"
    more = f"--n_samples_per_prompt 4 --generate_max_len 6 --remote_rm_url {reward} --post_processor {kind}"
    assert main(arguments(prompts, out, more)) == 0
    encoder = SftEncoder(tokenizer=TOKENIZER, input_template=TEMPLATE)
    examples = load_examples(open_sources(out), encoder, max_len=100)
    rollouts = read_jsonl(tmp_path / "out.rollouts.jsonl")
    rows = read_jsonl(out)
    num_cut = sum(record["finish_reason"] == "length" for record in rollouts)
    assert 0 < num_cut < 24
    assert f"{num_cut} of 24 rollouts were cut by --generate_max_len 6" in capsys.readouterr().err
    assert len(examples.examples) == len(rows) >= 6
    if kind == "csft":
        assert all(f"<rm_score>: {row['reward']:.2f}" in row["input"] for row in rows)
        return
    # What the trainer reads of a row are the tokens that the engine was asked with and wrote, the stop token too.
    generated = {tuple(record["token_ids"]) for record in rollouts}
    assert {tuple(example.token_ids.tolist()) for example in examples.examples} <= generated
    assert len(rows) == {"plain": 24, "best_of_n": 6}.get(kind, len(rows))


def test_pairs_are_read_by_the_preference_loader(prompts, reward, tmp_path, scripted):
    out = tmp_path / "out.jsonl"
    more = f"--n_samples_per_prompt 4 --generate_max_len 9 --remote_rm_url {reward} --post_processor iter_dpo"
    assert main(arguments(prompts, out, more)) == 0
    encoder = PreferenceEncoder(tokenizer=TOKENIZER, prompt_key="prompt", margin_key="margin", input_template=TEMPLATE)
    examples = load_examples(open_sources(out), encoder, max_len=100).examples
    assert examples
    for example in examples:
        # The reward is the number of characters, and tokens are bytes.
        assert example.margin == example.chosen.num_tokens - example.rejected.num_tokens > 0


def test_chat_prompts_stay_messages_and_are_read_with_the_template(tmp_path, scripted):
    messages = [{"role": "user", "content": "hello"}]
    prompts, out = write_jsonl(tmp_path / "chat.jsonl", [{"m": messages}]), tmp_path / "out.jsonl"
    more = ["--input_key", "m", "--apply_chat_template", "--post_processor", "plain"]
    assert main(generate_words(prompts, out, *more)) == 0
    assert json.loads(out.read_text())["input"] == messages
    [example] = load_examples(
        open_sources(out), SftEncoder(tokenizer=TOKENIZER, apply_chat_template=True), max_len=100
    ).examples
    [prompt_ids] = encode_prompts(["<bos>user: hello<eos>\nassistant: "], TOKENIZER, has_special_tokens=True)
    assert example.token_ids[: len(prompt_ids)].tolist() == prompt_ids


@pytest.mark.parametrize(("post_processor", "num_rows"), [("plain", 2), ("iter_dpo", 1)])
def test_tools_of_a_prompt_stay_in_the_rows_that_are_made(tmp_path, capsys, post_processor, num_rows):
    tools = [{"type": "function", "function": {"name": "add"}}]
    prompts = write_jsonl(tmp_path / "tools.jsonl", [{"input": "2+2", "tools": tools}])
    reward, out = tmp_path / "reward.py", tmp_path / "out.jsonl"
    reward.write_text(
        "def reward_func(queries, prompts, labels):\n    return {'rewards': [float(len(set(q))) for q in queries]}\n"
    )
    more = f"--apply_chat_template --post_processor {post_processor} --n_samples_per_prompt 2 --remote_rm_url {reward}"
    words = generate_words(prompts, out, *f"{more} --generate_max_len 5000 --overwrite --seed 1".split())
    assert main([*words, "--tools_key", "tools"]) == 0
    assert "notice" not in capsys.readouterr().err
    assert [json.loads(line)["tools"] for line in out.read_text().splitlines()] == [tools] * num_rows
    assert main(words) == 0
    assert f"notice: {prompts}:1 has `tools`, which the chat template does not get" in capsys.readouterr().err
    assert all("tools" not in json.loads(line) for line in out.read_text().splitlines())


def timeless_records(path):
    """The records of a file of rollouts, but for how long scoring took, in the order of their ids."""
    records = read_jsonl(path)
    assert all(record.pop("score_seconds") > 0 for record in records)
    return sorted(records, key=lambda record: record["rollout_id"])


def test_resumed_run_after_a_kill_equals_one_that_was_not_interrupted(prompts, reward, tmp_path, capsys):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    more = f"--n_samples_per_prompt 2 --remote_rm_url {reward} --post_processor best_of_n --vllm_max_num_seqs 1"
    assert main(arguments(prompts, whole, more)) == 0
    # As slow as a real engine, one prompt at a time, and killed without a chance to tidy up.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import rlhf_rollout.engines.process as process, rlhf_rollout.commands.main as m\n"
        "from rlhf_rollout.engines.fake import FakeEngine\n"
        "process.build_engine = lambda kind, spec: FakeEngine(spec, latency_s=1.0)\n"
        f"m.main({arguments(prompts, cut, more)!r})"
    )
    journal = tmp_path / "cut.rollouts.jsonl"
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ})
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_text().count("\n") >= 4):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not cut.exists()
    num_lines = journal.read_text().count("\n")
    assert 4 <= num_lines < 12
    with journal.open("a") as file:  # the half of a group, and of a line
        first, second = journal.read_text().splitlines()[:2]
        file.write(first.replace("generate/00000", "generate/00005") + "\n" + second[:40])
    capsys.readouterr()
    assert main(arguments(prompts, cut, more + " --resume")) == 0
    assert f"{num_lines // 2} of 6 prompts are already done" in capsys.readouterr().err
    rollouts = [timeless_records(tmp_path / f"{name}.rollouts.jsonl") for name in ("whole", "cut")]
    assert rollouts[0] == rollouts[1] and len(rollouts[0]) == 12
    assert cut.read_text() == whole.read_text()
    assert main(arguments(prompts, cut, more + " --resume")) == 0  # nothing left to do
    assert cut.read_text() == whole.read_text()


def test_resume_tries_failed_prompts_again(prompts, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr("rlhf_rollout.engines.process.build_engine", lambda kind, spec: FakeEngine(fail_after=4))
    assert main(arguments(prompts, out)) == 1
    monkeypatch.undo()
    assert main(arguments(prompts, out, "--resume")) == 0
    assert sorted(json.loads(line)["prompt_id"] for line in out.read_text().splitlines()) == [
        f"prompts.jsonl:{line}" for line in range(1, 7)
    ]


@pytest.fixture
def dated_model(tmp_path):
    """A folder with a tokenizer whose chat template writes the time."""
    import tokenizers
    import transformers

    words = {word: index for index, word in enumerate(["<unk>", "<eos>", "now"])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")  # each character is a token
    core.add_tokens(list("0123456789:."))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.chat_template = "{{ strftime_now('%H:%M:%S.%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "dated")
    return str(tmp_path / "dated")


def test_resumed_run_writes_the_date_of_the_run_that_began_into_its_prompts(prompts, tmp_path, dated_model, capsys):
    out = tmp_path / "out.jsonl"
    words = arguments(prompts, out, f"--pretrain {dated_model} --apply_chat_template")
    place = words.index("--input_template")
    del words[place : place + 2]
    assert main(words) == 0
    lines = out.read_text().splitlines()
    out.write_text("".join(f"{line}\n" for line in lines[:2]))
    capsys.readouterr()
    assert main([*words, "--resume"]) == 0
    told = capsys.readouterr().err
    assert "2 of 6 prompts are already done" in told
    assert "the figures leave out the 2 prompts that were done before" in told
    records = read_jsonl(out)
    assert len(records) == 6
    assert len({record["template_clock"] for record in records}) == 1
    assert len({record["prompt"][: len("12:34:56.123456")] for record in records}) == 1


@pytest.mark.parametrize("more", ["--temperature 0.5", "--max_samples 3", "--seed 4"])
def test_resume_with_other_settings_is_refused_and_changes_nothing(prompts, tmp_path, capsys, more):
    out = tmp_path / "out.jsonl"
    assert main(arguments(prompts, out)) == 0
    before = out.read_text()
    assert main(arguments(prompts, out, more + " --resume")) == 2
    assert "was written with another model or agent, other prompts, sampling or rewards" in capsys.readouterr().err
    assert out.read_text() == before


def test_take_up_refuses_what_it_has_not_written(tmp_path):
    other = write_jsonl(tmp_path / "other.jsonl", [{"precious": 1}])
    with pytest.raises(DataError, match="is not a record of a run"):
        take_up(other, "r", 1)
    assert other.read_text() == '{"precious": 1}\n'
    with pytest.raises(ConfigError, match="another model"):
        take_up(write_jsonl(other, [{"group_id": "generate/00000", "run": "s"}]), "r", 1)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--post_processor best", "did you mean `best_of_n`?"),
        ("--post_processor best_of_n --n_samples_per_prompt 2", "needs a reward"),
        ("--post_processor iter_dpo --remote_rm_url {reward}", "give --n_samples_per_prompt 4"),
        ("--post_processor csft --remote_rm_url {reward} --reward_template {{input}}", "must hold {input} and"),
        ("--resume --overwrite", "either replaced or continued"),
        ("--reward_pretrain {folder}", "a reward model reads tokens, and no tokenizer is named"),
        ("--reward_pretrain {folder} --tokenizer {folder}", "cannot load the tokenizer "),
    ],
)
def test_options_that_do_not_fit_are_refused(prompts, reward, tmp_path, capsys, more, says):
    (tmp_path / "config.json").write_text("{}")
    more = more.format(reward=reward, folder=tmp_path)
    assert main(arguments(prompts, tmp_path / "out.jsonl", more)) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_prompts_of_a_data_preset_have_their_labels(tmp_path):
    row = {"question": "2 + 2?", "answer": "It is <<2+2=4>>4.\n#### 4"}
    prompts, out = write_jsonl(tmp_path / "gsm8k.jsonl", [row]), tmp_path / "out.jsonl"
    more = ["--preset_data", "gsm8k", "--remote_rm_url", "rlhf_rollout.rewards.math"]
    assert main(generate_words(prompts, out, *more)) == 0
    [record] = read_jsonl(out)
    assert (record["input"], record["label"], record["verdict"]) == ("2 + 2?", "4", "unparsable")
