"""What is looked at before a run: prompts, held-out files, the metric to keep by, chat templates and tools."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from record_testing import make_group
from rlhf_cli.commands.ppo import lowest_layer
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.preflight.data import data_notices, load_all, metric_names, open_prompts
from rlhf_data.options.command_line import CommandLine
from rlhf_data.prompts import PromptSet
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict, VerdictKind
from rlhf_data.rows.row import Counts
from rlhf_data.testing import ByteTokenizer
from rlhf_train.evaluation import summarize_evaluation


def test_check_inputs_prompts_of_several_sources_are_read_one_after_the_other_or_drawn(check, refused):
    argv = ["--prompt_data", "prompts.jsonl, math.jsonl", "--max_samples", "1"]
    assert [prompt.text for prompt in check(*argv).prompts] == ["prompts 0?", "math 0?"]
    drawn = check(*argv, "--prompt_data_probs", "1,99").prompts
    assert sum(prompt.text == "math 0?" for prompt in drawn) > 1
    assert "2 data sources need as many probabilities" in refused(*argv, "--prompt_data_probs", "1")


def test_check_inputs_mixed_prompts_know_their_source_and_are_of_several(check, refused):
    both = ["--prompt_data", "prompts.jsonl,math.jsonl", "--adaptive_mix"]
    assert {prompt.source for prompt in check(*both).prompts} == {"prompts.jsonl", "math.jsonl"}
    text = refused("--prompt_data", "prompts.jsonl", "--adaptive_mix")
    assert "--adaptive_mix sets the shares of several sources, and all usable prompts are of one" in text
    assert "hint: name several in --prompt_data" in text


def test_check_inputs_each_source_has_a_teacher_and_each_teacher_a_source(check, refused, folder, models):
    policy = str(models / "policy")
    two = ["--prompt_data", "prompts.jsonl,math.jsonl", "--teacher_model"]
    for name in ("other", "lr=1,a"):  # the latter is a folder, and no list
        shutil.copytree(policy, folder / name)
    for teachers in (f"prompts.jsonl=other,math.jsonl={policy}", f"math.jsonl={policy},other", "lr=1,a"):
        assert len(check(*two, teachers).masked_ids) == 2
    (folder / "ema").mkdir()  # is not what the word means
    averaged = check(*two, f"math.jsonl={folder / 'other'},ema", "--enable_ema")
    assert averaged.masked_ids.keys() == {policy, str(folder / "other")}
    text = refused(*two, f"math.jsonl={policy}")
    assert "--teacher_model names no teacher for prompts.jsonl of --prompt_data" in text
    assert "hint: add prompts.jsonl=MODEL, or MODEL alone" in text
    text = refused(*two, f"maths.jsonl={policy},{policy}")
    assert text.startswith("--teacher_model: unknown data source `maths.jsonl`; known: math.jsonl, prompts.jsonl")
    text = refused(*two, f"math.jsonl={policy},prompts.jsonl={policy},{policy}")
    assert f"--teacher_model has {policy} for sources without a teacher of their own, and all have one" in text
    text = refused("--prompt_data", "math.jsonl", "--teacher_model", f"math.jsonl={policy}")
    assert "by data source, and all prompts are of a single one" in text
    assert "hint: write the MODEL alone" in text
    text = refused(*two, f"math.jsonl={policy},prompts.jsonl=./absent")
    assert text.startswith(f"--teacher_model {folder / 'absent'}: ")


def test_check_inputs_bad_rows_are_refused_or_left_out(check, refused, folder):
    with (folder / "prompts.jsonl").open("a") as file:
        file.write('{"input": ""}\n')
    text = refused()
    assert "1 of 3 rows cannot be used" in text
    assert "prompts.jsonl:3: `input` is empty" in text
    assert len(check("--skip_bad_rows").prompts) == 2


def test_check_inputs_held_out_prompts_are_told_apart_by_file(check):
    found = check("--eval_data", "math.jsonl,code.jsonl")
    assert [prompt.source for prompt in found.eval_prompts] == ["math", "math", "code", "code"]
    assert (found.eval_prompts.counts.num_rows, found.eval_prompts.counts.num_too_long) == (4, 0)


def test_check_inputs_held_out_prompts_are_told_apart_by_key_in_letters_that_metrics_have(check):
    found = check("--eval_data", "math.jsonl", "--source_key", "set")
    assert [prompt.source for prompt in found.eval_prompts] == ["math_0", "math_1"]
    assert {prompt.source for prompt in found.prompts} == {"train"}


@pytest.mark.parametrize(
    "more", [["--adaptive_mix"], ["--teacher_model", "{0},a_b.jsonl={1}"], ["--eval_data", "a b.jsonl,a_b.jsonl"]]
)
def test_check_inputs_sources_whose_metrics_would_have_one_name_are_refused(refused, folder, models, more):
    for name in ("a b", "a_b"):
        shutil.copy(folder / "math.jsonl", folder / f"{name}.jsonl")
    shutil.copytree(models / "policy", folder / "other")
    data = ["--prompt_data", "a b.jsonl,a_b.jsonl"] if "--eval_data" not in more else []
    text = refused(*data, *(word.format(models / "policy", "other") for word in more))
    assert re.search(r"sources 'a b(.jsonl)?' and 'a_b(.jsonl)?' would have one name, a_b(.|\n)*hint: rename", text)


@pytest.mark.parametrize(
    ("flags", "file"),
    [
        ("--input_key sets", "prompts"),
        ("--source_key sets --eval_data math.jsonl", "math"),
        ("--extra_keys sets --prompt_data whole.jsonl --eval_data math.jsonl", "math"),
    ],
)
def test_check_inputs_key_that_is_not_there_is_refused_before_the_model_is_read(refused, folder, flags, file):
    (folder / "whole.jsonl").write_text('{"input": "1?", "sets": 1}\n')
    text = refused(*flags.split(), "--pretrain", "./absent")
    option = flags.split()[0]
    assert text.startswith(f"{option}: {folder / file}.jsonl:1: unknown key `sets`; known: input, set")


def test_check_inputs_held_out_files_of_one_name_are_refused(refused, folder):
    (folder / "other").mkdir()
    shutil.copy(folder / "math.jsonl", folder / "other")
    text = refused("--eval_data", "math.jsonl,other/math.jsonl")
    assert "two files of --eval_data are called math" in text


@pytest.mark.parametrize(
    "name", ["eval/accuracy", "eval/pass@1", "eval/pass@2", "eval/pass@3", "eval/math/pass@3", "eval/code/truncated"]
)
def test_check_inputs_best_metric_is_one_that_will_be_measured(check, name):
    argv = ["--eval_data", "math.jsonl,code.jsonl", "--eval_n_samples_per_prompt", "3"]
    check(*argv, "--best_metric_key", name)


@pytest.mark.parametrize("sources", [("math",), ("math", "code")])
def test_metric_names_are_those_of_an_evaluation(sources):
    spans = (
        Span(SpanSource.PROMPT, np.array([1])),
        Span(SpanSource.POLICY, np.array([2]), np.array([-0.1]), policy_version=0),
    )
    groups = []
    for source in sources:
        verdict = Verdict(VerdictKind.OK, 1.0, 1.0)
        rollouts = [Rollout(f"{source}/{n}", source, spans, FinishReason.STOP, verdict=verdict) for n in range(3)]
        groups.append(make_group(source, Prompt("p", np.array([1]), "?", source=source), tuple(rollouts)))
    measured = {name for name in summarize_evaluation(groups) if "verdict_" not in name}
    assert set(metric_names(set(sources), 3)) == measured


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("eval/acuracy", "eval/accuracy"),
        ("eval/pass@4", "eval/pass@"),
        ("pass@1", "eval/pass@1"),
        ("eval/maths/pass@1", "eval/math/pass@1"),
    ],
)
def test_check_inputs_best_metric_that_nothing_measures_is_refused(refused, name, hint):
    argv = ["--eval_data", "math.jsonl,code.jsonl", "--eval_n_samples_per_prompt", "3"]
    text = refused(*argv, "--best_metric_key", name)
    assert text.startswith(f"--best_metric_key: unknown metric `{name}`; known: eval/accuracy")
    assert f"hint: did you mean `{hint}" in text


def test_check_inputs_best_metric_may_be_a_number_that_a_function_logs_and_not_one_of_a_model(check, refused, models):
    argv = ["--eval_data", "math.jsonl", "--best_metric_key", "eval/brevity"]
    check(*argv)
    check(*argv[:-1], "eval/reward_1")
    only_a_model = ["--remote_rm_url", "None", "--reward_pretrain", str(models / "judge")]
    assert "unknown metric `eval/brevity`" in refused(*argv, *only_a_model)
    mixed = ["--remote_rm_url", "reward.py", "--reward_pretrain", str(models / "judge")]
    check(*argv, *mixed)


def test_data_preset_gives_training_and_held_out_prompts_their_labels(folder):
    for name, answer in (("prompts", 3), ("math", 4)):
        row = {"question": f"{name}?", "answer": f"It is {answer}.\n#### {answer}"}
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    words = "--prompt_data prompts.jsonl --eval_data math.jsonl --preset_data gsm8k --remote_rm_url reward.py"
    config = CommandLine(config=PpoConfig, prog="").parse(["--pretrain", "m", *words.split()]).config
    prompts, held_out = load_all(config, *open_prompts(config), ByteTokenizer())
    assert [(prompt.text, prompt.label) for prompt in (*prompts, *held_out)] == [("prompts?", "3"), ("math?", "4")]


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("qwen2_5", ""),  # Qwen2.5 does not think
        ("qwen3", "reasoning"),  # it drops the reasoning of answers before the last question
        ("deepseek_r1_distill", "answers and reasoning"),  # its generation prompt begins the reasoning, too
        ("cohere", ""),
    ],
)
@pytest.mark.parametrize("history", ["append", "split"])
def test_check_inputs_template_that_rewrites_answers_is_a_notice(check, folder, models, template, parts, history):
    shutil.copytree(models / "policy", folder / "policy")
    trl = importlib.util.find_spec("trl")
    assert trl is not None and trl.origin is not None
    text = (Path(trl.origin).parent / f"chat_templates/{template}.jinja").read_text()
    (folder / "policy/chat_template.jinja").write_text(text)
    (folder / "agent.py").write_text("async def run_episode(session):\n    return 0.0\n")
    argv = ["--pretrain", "policy", "--agent_func_path", "agent.py", "--agent_history", history]
    notices = [notice for notice in check(*argv).notices if "chat template" in notice]
    begins = f"the chat template rewrites earlier {parts}: "
    follows = {
        "append": "agents keep what the policy wrote; --agent_history split would begin another rollout there",
        "split": "with --agent_history split, conversations over HTTP begin another rollout there",
    }
    assert notices == ([begins + follows[history]] if parts else [])


def test_check_inputs_tools_reach_training_and_held_out_prompts_or_are_a_notice(check, refused, folder, models):
    shutil.copytree(models / "policy", folder / "policy")
    template = "{{ tools[0].function.name if tools }}:{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "policy/chat_template.jinja").write_text(template)
    for name in ("train", "held"):
        row = {"input": f"{name}?", "tools": [{"type": "function", "function": {"name": f"tool_{name}"}}]}
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    argv = [
        "--pretrain",
        "policy",
        "--apply_chat_template",
        "--prompt_data",
        "train.jsonl",
        "--eval_data",
        "held.jsonl",
    ]
    found = check(*argv, "--tools_key", "tools")
    assert found.eval_prompts is not None
    assert [prompt.text for prompt in (*found.prompts, *found.eval_prompts)] == ["tool_train:train?", "tool_held:held?"]
    assert not [notice for notice in found.notices if "tools" in notice]
    without = check(*argv)
    assert without.prompts[0].text == ":train?"
    said = f"{folder}/train.jsonl:1 has `tools`, which the chat template does not get: --tools_key tools gives it"
    assert [notice for notice in without.notices if notice.startswith(said)]
    assert "did you mean --tools_key tools" in refused(*argv, "--tools_key", "tool")


def test_check_inputs_variables_of_the_chat_template_reach_all_prompts(check, refused, folder, models):
    shutil.copytree(models / "policy", folder / "policy")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '/no' if think is defined and not think }}"
    (folder / "policy/chat_template.jinja").write_text(template)
    argv = ["--pretrain", "policy", "--apply_chat_template", "--eval_data", "math.jsonl", "--input_key", "input"]
    given = ["--chat_template_kwargs", '{"think": false}']
    found = check(*argv, *given)
    assert found.eval_prompts is not None
    assert [prompt.text for prompt in (*found.prompts, *found.eval_prompts)][::2] == ["prompts 0?/no", "math 0?/no"]
    assert check(*argv).prompts[0].text == "prompts 0?"
    assert "the chat template does not read `thin`" in refused(*argv, given[0], '{"thin": 1}')


def test_held_out_prompts_are_training_prompts_if_they_ask_the_same_about_the_same_image():
    config = PpoConfig(rollout={"rollout_batch_size": 2})
    trained, held_out = (
        PromptSet(tuple(Prompt(f"{n}{i}", np.array([1]), "Which colour?", images=(i,)) for i in images), Counts(2))
        for n, images in (("t", ("red.png", "blue.png")), ("h", ("blue.png", "green.png")))
    )
    assert data_notices(config, trained, held_out) == ["1 of 2 held-out prompts are also training prompts"]


@pytest.mark.parametrize(
    ("argv", "num_prompts", "is_told"),
    [
        ("--train_steps 3", 96, True),
        ("--train_steps 3", 95, False),
        ("--train_steps None", 96, True),
        ("--train_steps None --num_episodes 2", 96, False),
        ("--train_steps 3 --num_episodes 2", 96, True),
        ("--train_steps 3 --difficulty_pool", 96, False),
        ("--train_steps 3 --adaptive_mix", 96, False),
        ("--train_steps 1 --dynamic_filtering", 320, False),
    ],
)
def test_answers_to_prompts_that_do_not_come_again_are_a_notice(argv, num_prompts, is_told):
    command_line = CommandLine(config=PpoConfig, prog="", recipe=lowest_layer)
    config = command_line.parse(["--reuse_solved", "9", *argv.split()]).config
    prompts = tuple(Prompt(f"p{i}", np.array([1, 2]), f"prompt {i}") for i in range(num_prompts))
    found = data_notices(config, PromptSet(prompts, Counts(num_prompts)), None)
    told = "--reuse_solved has no effect: 3 step(s) x --rollout_batch_size 32 draw each of the 96 prompts at most once"
    assert found == [told] * is_told
