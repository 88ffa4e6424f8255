"""Episodes of agents through the command `generate`: what is written, what limits them, and runs that go on."""

import json
from pathlib import Path

import pytest

from record_testing import read_jsonl, write_jsonl
from rlhf_data.testing import EOS_ID
from rlhf_rollout.commands.main import main
from rlhf_rollout.engines.fake import FakeEngine
from rollout_testing import generate_words

RETRIES = str(Path(__file__).parents[4] / "examples" / "math_retries.py")
# The first answer is in one rollout, the second one, to another history, in another. One prompt kills its agent.
TWO_ROLLOUTS = """
import os

async def run_episode(session):
    if session.prompt == "2+2=":
        raise ValueError("not this one")
    first = await session.reply()
    second = await session.complete([5, 6, 7])
    if os.environ.get("REWARDED"):
        return [1.0, 0.5]
"""


@pytest.fixture
def prompts(tmp_path):
    return write_jsonl(tmp_path / "prompts.jsonl", [{"q": f"{n}+{n}=", "a": str(2 * n)} for n in range(4)])


@pytest.fixture(autouse=True)
def second_answer_is_4(monkeypatch):
    script = lambda prompt, seed: [*(b"#### 4" if EOS_ID in list(prompt) else b"#### 0"), EOS_ID]  # noqa: E731
    make = lambda kind, spec: FakeEngine(spec, script=script)  # noqa: E731
    monkeypatch.setattr("rlhf_rollout.engines.process.build_engine", make)


def generate(prompts, out, agent, *more):
    """Return the status and the records in the order of their ids."""
    words = ["--input_key", "q", "--label_key", "a", "--agent_func_path", agent, "--agent_num_workers", "1"]
    status = main(generate_words(prompts, out, *words, "--seed", "3", *more))
    records = read_jsonl(out) if out.exists() else []
    for record in records:
        record.pop("score_seconds")
    return status, sorted(records, key=lambda record: record["rollout_id"])


def test_episodes_of_an_agent_are_written_with_their_spans_and_rewards_by_turn(prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    status, records = generate(prompts, out, RETRIES, "--n_samples_per_prompt", "2", "--agent_max_len", "300")
    assert (status, len(records)) == (0, 8)
    found = {record["prompt"]: record for record in records}
    # 0 is right at once, 4 at the second attempt, and 2 and 6 are never reached.
    assert [found[f"{n}+{n}="]["turn_rewards"] for n in range(4)] == [[1.0], [-0.1] * 3, [-0.1, 1.0], [-0.1] * 3]
    record = found["2+2="]
    assert (record["verdict"], record["reward"], record["score"]) == ("ok", 0.9, 1.0)
    assert record["extra"] == {"attempts": 2.0, "right_at_once": 0.0, "turns": 2.0}
    assert [span["source"] for span in record["spans"]] == ["prompt", "policy", "environment", "policy"]
    assert sum(span["num_tokens"] for span in record["spans"]) == len(record["token_ids"]) == len(record["logprobs"])
    assert record["text"].count("#### ") == 2 and "That is wrong" in record["text"]
    assert "verdicts: ok 4, wrong 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "num_turns"),
    [(["--max_steps", "1"], 1), (["--agent_max_len", "90"], 2), (["--agent_max_seconds", "1e-9"], 0)],
)
def test_limits_end_episodes_with_what_they_have_earned(prompts, tmp_path, capsys, more, num_turns):
    limits = ["--max_samples", "2", *more]  # 1+1=, whose answer is never right
    _, records = generate(prompts, tmp_path / "out.jsonl", RETRIES, *limits)
    [record] = [record for record in records if record["prompt"] == "1+1="]
    assert sum(span["source"] == "policy" for span in record["spans"]) == num_turns
    if num_turns:
        assert record["turn_rewards"] == [-0.1] * num_turns
        assert (record["finish_reason"], record["verdict"]) == ("length", "wrong")


@pytest.mark.parametrize("rewards", ["the agent", "a function"])
def test_failed_agents_cost_their_own_episodes_and_stopped_runs_go_on(prompts, tmp_path, monkeypatch, capsys, rewards):
    agent, out = tmp_path / "agent.py", tmp_path / "out.jsonl"
    agent.write_text(TWO_ROLLOUTS)
    (tmp_path / "reward.py").write_text("def reward_func(q, p, l): return {'rewards': [7.0] * len(q)}\n")
    monkeypatch.setenv("REWARDED", "yes")
    more = ["--n_samples_per_prompt", "2"]
    more += ["--reward_env", "REWARDED"] if rewards == "the agent" else ["--remote_rm_url", str(tmp_path / "reward.py")]
    status, records = generate(prompts, out, str(agent), *more)
    said = capsys.readouterr().err
    assert status == 0 and "has no effect" not in said
    crashed = [record for record in records if record["verdict"] == "crash"]
    assert [record["prompt"] for record in crashed] == ["2+2="] * 2
    assert all(record["reward"] is None and "not this one" in record["detail"] for record in crashed)
    assert len(records) - len(crashed) == 12  # three prompts, two episodes, two rollouts
    for record in records:
        number = int(record["rollout_id"][-1])
        if record["verdict"] == "crash":
            continue
        assert record["episode_id"] + f".{number}" == record["rollout_id"] and record["num_rollouts"] == 4
        if rewards == "the agent":
            assert (record["reward"], record["turn_rewards"]) == (1.5, [[1.0], [0.5]][number])
            assert record["earned_elsewhere"] == [[0.0, 0.5], [1.0, 0.0]][number]
        else:
            assert (record["reward"], record["turn_rewards"]) == (7.0, [])
    # The last group lacks the last rollout of its last episode, as after a kill: it is generated anew.
    lines = out.read_text().splitlines(keepends=True)
    at = next(at for at in reversed(range(len(lines))) if json.loads(lines[at])["num_rollouts"] == 4)
    group = [line for line in lines if json.loads(line)["group_id"] == json.loads(lines[at])["group_id"]]
    out.write_text("".join([line for line in lines if line not in group] + group[:3]))
    assert generate(prompts, out, str(agent), *more, "--resume") == (0, records)
    assert "3 of 4 prompts are already done" in capsys.readouterr().err
    assert generate(prompts, out, str(agent), *more, "--resume", "--max_steps", "3")[0] == 2
    assert "was written with another model or agent" in capsys.readouterr().err


def test_agents_that_cannot_run_and_options_that_do_not_fit_are_refused(prompts, tmp_path, capsys):
    out, broken = tmp_path / "out.jsonl", tmp_path / "broken.py"
    broken.write_text("import no_such_module\n\nasync def run_episode(session): ...\n")
    for agent, more, says in (
        (str(broken), [], "No module named 'no_such_module'"),
        (str(tmp_path / "missing.py"), [], "missing.py"),
        (RETRIES, ["--post_processor", "plain"], "--post_processor plain makes rows of one prompt and one answer"),
        (RETRIES, ["--max_steps", "0"], "--max_steps"),
        (RETRIES, ["--stop", "END"], "--stop ends responses of single turns, and an agent says itself"),
    ):
        assert generate(prompts, out, agent, *more) == (2, [])
        assert says in capsys.readouterr().err
    assert main(generate_words(prompts, out, "--input_key", "q", "--max_steps", "3", "--dry_run")) == 0
    assert "--max_steps has no effect: there is no --agent_func_path" in capsys.readouterr().err
