"""What the commands show while a person waits: each slow part by name before it begins, and how much of it is done."""

from contextlib import AsyncExitStack

import pytest

from record_testing import write_jsonl
from rlhf_data.options.progress import Progress
from rlhf_data.testing import ByteTokenizer
from rlhf_rollout.commands import generate as generate_command
from rlhf_rollout.commands import parts
from rlhf_rollout.commands.main import main
from rlhf_rollout.commands.parts import RewardJob
from rlhf_rollout.commands.reward_section import RewardSection
from rlhf_rollout.engines import process
from rlhf_rollout.engines.fake import FakeEngine


@pytest.fixture
def shown(monkeypatch):
    """What was shown, in order: (text, done, total)."""
    calls = []
    show = Progress.show

    def recorded(self, text, *, done=None, total=None, **options):
        calls.append((text, done, total))
        show(self, text, done=done, total=total, **options)

    monkeypatch.setattr(Progress, "show", recorded)
    return calls


@pytest.fixture
def reward(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [1.0] * len(queries)}\n")
    return str(file)


def test_generate_names_each_part_before_it_begins(tmp_path, monkeypatch, shown, reward):
    def check(source, prompts, calls):
        shown.append("the trial")

    def start(kind, spec):
        shown.append("the start")
        return FakeEngine(spec, script=lambda prompt, seed: [*b"fine", 0])

    build = parts.build_reward
    monkeypatch.setattr(
        parts, "build_reward", lambda *words, **more: shown.append("the rewards") or build(*words, **more)
    )
    monkeypatch.setattr(generate_command, "check_reward", check)
    monkeypatch.setattr(process, "build_engine", start)
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"input": "a"}, {"input": "b"}])
    out = str(tmp_path / "out.jsonl")
    words = ["--engine", "fake", "--prompt_data", str(prompts), "--output_path", out, "--remote_rm_url", reward]
    assert main(["generate", *words]) == 0
    assert shown == [
        ("loading libraries", None, None),
        ("reading the prompts", None, None),
        ("trying the reward function", None, None),
        "the trial",
        ("starting the rewards", None, None),
        "the rewards",
        ("starting the engine", None, None),
        "the start",
        *(("generating", done, 2) for done in range(3)),
    ]


def test_score_counts_answers_and_those_that_are_left_out(tmp_path, shown, reward):
    pairs = [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "a" * 50, "rejected": "b"}]
    rows = write_jsonl(tmp_path / "rows.jsonl", [*pairs, {"prompt": "p"}, pairs[0]])
    out = str(tmp_path / "out.jsonl")
    words = ["--dataset", str(rows), "--chosen_key", "chosen", "--prompt_key", "prompt", "--max_len", "20"]
    assert main(["score", *words, "--skip_bad_rows", "--remote_rm_url", reward, "--output_path", out]) == 0
    # Of four rows one is too long and one has no answers. The reader comes to them before the first score.
    assert [call for call in shown if call[0] == "scoring"] == [("scoring", done, 8) for done in (0, 5, 6, 7, 8)]


async def test_reward_models_are_counted_while_they_load(monkeypatch, shown):
    class Scorer:
        def close(self):
            """Nothing is behind it."""

    monkeypatch.setattr(RewardJob, "_scorer", lambda self, path, tokenizer: shown.append(path) or Scorer())
    job = RewardJob(RewardSection(reward_pretrain="one,two", reward_batch_size=2), "float32")

    async with AsyncExitStack() as stack:
        job.open(ByteTokenizer(), stack)
    name = "loading the reward models"
    assert shown == [(name, 0, 2), "one", (name, 1, 2), "two", ("starting the rewards", None, None)]
