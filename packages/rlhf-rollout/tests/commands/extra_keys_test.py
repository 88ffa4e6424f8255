"""Further cells of a row: who receives them, and how functions, rows and options that do not fit are refused."""

import asyncio
import contextlib
import dataclasses
import json

import httpx
import pytest

from agent_testing import run as run_agent
from agent_testing import writes
from record_testing import make_group, make_prompt, make_rollout, write_jsonl
from rlhf_data.errors import ConfigError, DataError, RewardError
from rlhf_data.prompts import load_prompts
from rlhf_data.records import Verdict, VerdictKind
from rlhf_data.rows.sources import open_sources
from rlhf_data.testing import ByteTokenizer
from rlhf_rollout.commands import main as command
from rlhf_rollout.commands.main import COMMANDS
from rlhf_rollout.commands.serve_rm import create_app
from rlhf_rollout.records_io import batch_records, parse_group, rollout_record
from rlhf_rollout.rewards.function import FunctionReward, check_reward_function
from rlhf_rollout.rewards.remote import RemoteReward, check_reward_server
from rlhf_rollout.rewards.sources import CallOptions
from rlhf_rollout.workers.guarded import WorkerOptions
from rollout_testing import app_server, json_server

CALLS = CallOptions(worker=WorkerOptions(extra_keys=("level", "tests")))
CELLS = {"level": 3, "tests": ["a", {"b": None}]}
TAKES = """
    def reward_func(queries, prompts, labels, level, *, tests, responses):
        assert tests == [["a", {"b": None}]] * len(queries) and len(responses) == len(queries), tests
        return {"rewards": [float(one) for one in level]}
"""


def asked(**extra):
    return dataclasses.replace(make_prompt("2+2=", "4"), extra=extra or CELLS)


def scored(reward, prompt, texts=("4", "22")):
    async def run():
        try:
            return await reward.score(prompt, [make_rollout(prompt, text, index=len(text)) for text in texts])
        finally:
            await reward.close()

    return [verdict.reward for verdict in asyncio.run(run())]


@pytest.mark.parametrize("parameters", ["level, *, tests, responses", "**kwargs"])
def test_function_receives_the_cells_as_lists(write, parameters):
    source = TAKES.replace("level, *, tests, responses", parameters)
    if parameters == "**kwargs":
        source = source.replace("        assert", "        level, tests, responses = (kwargs[name] for name in"
                                " ('level', 'tests', 'responses'))\n        assert")  # fmt: skip
    path = write(source)
    assert check_reward_function(path, [asked()], CALLS) is None
    assert scored(FunctionReward(path, CALLS), asked()) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            "level",
            r"takes no keyword argument tests.*\s+hint: write def reward_func\(queries, prompts, labels, level",
        ),
        ("tests, level=1, more=None, *, other", "missing a required argument: 'other'"),
    ],
)
def test_function_that_does_not_take_them_is_refused_before_the_run(write, parameters, message):
    path = write(f"def reward_func(queries, prompts, labels, {parameters}): return {{'rewards': [1.0] * len(queries)}}")
    with pytest.raises(RewardError, match=f"(?s){message}"):
        check_reward_function(path, [], CALLS)


def test_built_in_reward_goes_without_them():
    assert scored(FunctionReward("math", CALLS), asked(), ["#### 4", "#### 5"]) == [1.0, 0.0]


def test_server_receives_them_as_fields():
    bodies = []

    def answer(body, headers):
        bodies.append(body)
        return 200, {"rewards": [float(level) for level in body["level"]]}

    with json_server(answer) as url:
        assert check_reward_server([url + "/get_reward"], [asked()]) is None
        assert scored(RemoteReward([url + "/get_reward"]), asked()) == [3.0, 3.0]
    assert [body["tests"] for body in bodies] == [[CELLS["tests"]] * len(body["query"]) for body in bodies]


def test_reward_server_hands_them_to_its_function():
    class Told:
        async def score(self, prompt, rollouts):
            return [Verdict(VerdictKind.OK, float(prompt.extra["level"])) for _ in rollouts]

        async def close(self):
            pass

    app = create_app(Told(), ByteTokenizer(), contextlib.AsyncExitStack(), extra_keys=("level",))
    with app_server(app) as url:
        body = {"query": ["a", "b"], "level": [1, 2], "other": 3}
        assert httpx.post(url + "/get_reward", json=body).json()["rewards"] == [1.0, 2.0]
        for wrong in ([1], 7, None):
            said = httpx.post(url + "/get_reward", json=body | {"level": wrong})
            assert (said.status_code, "`level` must be a list" in said.text) == (422, True)


def test_agent_finds_them_in_its_session(write):
    source = """
        async def run_episode(session):
            await session.reply()
            return float(session.extra["level"])
    """
    [episode], _ = run_agent(write(source), writes(["a"]), prompts=[asked()])
    assert episode.verdict.reward == 3.0


def test_prompts_hold_the_cells_and_their_digest_changes_with_them(tmp_path):
    def load(rows, **options):
        path = write_jsonl(tmp_path / "a.jsonl", rows)
        return load_prompts(open_sources(path), ByteTokenizer(), extra_keys=["level", "tests"], **options)

    prompts = load([{"input": "a"} | CELLS, {"input": "b", "level": None, "tests": 0}])
    assert [prompt.extra for prompt in prompts] == [CELLS, {"level": None, "tests": 0}]
    other = load([{"input": "a"} | CELLS, {"input": "b", "level": None, "tests": 1}])
    assert prompts.counts.digest != other.counts.digest
    with pytest.raises(DataError, match=r"a\.jsonl:1: unknown key `tests`"):
        load([{"input": "a", "level": 1}])


def test_rollouts_are_written_and_read_with_them():
    prompt = asked()
    group = make_group("g0", prompt, [make_rollout(prompt, "4")])
    records = json.loads(json.dumps([record for record, _ in batch_records([group], {}, has_tokens=True)]))
    assert records[0]["prompt_extra"] == CELLS
    assert parse_group(records, "here").prompt.extra == CELLS
    plain = make_prompt()
    group = make_group("g0", plain, [make_rollout(plain, "4")])
    assert "prompt_extra" not in rollout_record(group, group.episodes[0], group.episodes[0].rollouts[0])


@pytest.mark.parametrize("name", ["labels", "responses", "query"])
def test_key_with_the_name_of_another_argument_is_refused(name):
    with pytest.raises(ConfigError, match=rf"every reward function receives something else called `{name}`"):
        COMMANDS["serve_rm"].command_line("x").parse(["--remote_rm_url", "math", "--extra_keys", f"a, {name}"])


def test_keys_without_a_function_or_server_are_told(capsys):
    words = ["--remote_rm_url", "math", "--extra_keys", "a"]
    [notice] = COMMANDS["serve_rm"].command_line("x").parse(words).notices
    assert notice.startswith("--extra_keys has no effect: no reward function or server of yours scores")


def test_score_and_generate_give_them_to_a_function(tmp_path, write, capsys):
    rows = [{"input": "a", "output": "b", "level": 2}, {"input": "c", "output": "d", "level": 5}]
    data = str(write_jsonl(tmp_path / "a.jsonl", rows))
    reward = write("def reward_func(queries, prompts, labels, level): return {'rewards': [float(x) for x in level]}")
    words = [
        "--remote_rm_url",
        reward,
        "--extra_keys",
        "level",
        "--output_path",
        str(tmp_path / "out.jsonl"),
        "--overwrite",
    ]
    for argv in (["score", "--dataset", data], ["generate", "--engine", "fake", "--prompt_data", data]):
        assert command.main([*argv, *words]) == 0, capsys.readouterr().err
        found = [json.loads(line)["reward"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert sorted(found) == [2.0, 5.0]
        assert command.main([*argv, *words, "--extra_keys", "levels"]) == 2
        said = capsys.readouterr().err
        assert "--extra_keys: " in said and "did you mean --extra_keys level?" in said
