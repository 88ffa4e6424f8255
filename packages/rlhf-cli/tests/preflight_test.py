"""What is looked at before a run: reward servers, reward models, the critic, held-out files, the metric to keep by."""

import importlib.util
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from record_testing import make_group
from rlhf_cli.builtin import MODEL_DIR
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.preflight.data import load_all, metric_names, open_prompts
from rlhf_cli.preflight.inputs import Inputs, check_inputs
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.options.command_line import CommandLine
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict, VerdictKind
from rlhf_data.testing import ByteTokenizer
from rlhf_train.evaluation import summarize_evaluation

REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [0.0] * len(queries)}\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    from rlhf_models.testing import tiny_model_dir, tiny_reward_model_dir

    folder = tmp_path_factory.mktemp("models")
    tiny_model_dir(folder / "policy")
    tiny_reward_model_dir(folder / "judge")
    tiny_reward_model_dir(folder / "second", seed=2, mean=0.5, std=0.0)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    for name in ("prompts", "math", "code"):
        rows = [{"input": f"{name} {n}?", "set": f"{name} {n}"} for n in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


@pytest.fixture
def server():
    """A reward server that answers what its `answer` says, and keeps the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
            self.server.requests.append(query)
            status, rewards = self.server.answer(query)
            body = json.dumps({"rewards": rewards}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args): ...

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.requests, found.answer = [], lambda query: (200, [1.0] * len(query))
    found.url = f"http://127.0.0.1:{found.server_port}/get_reward"
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def check(folder: Path, models: Path, *argv: str) -> Inputs:
    flags = ["--pretrain", str(models / "policy"), "--prompt_data", "prompts.jsonl", "--remote_rm_url", "reward.py"]
    flags += ["--prompt_max_len", "32", "--generate_max_len", "8", "--rollout_batch_size", "2"]
    flags += ["--train_batch_size", "2", *argv]
    return check_inputs(CommandLine(config=PpoConfig, prog="").parse(flags).config, folder / "out")


def refused(folder: Path, models: Path, *argv: str) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        check(folder, models, *argv)
    return str(caught.value)


def test_check_inputs_prompts_of_several_sources_are_read_one_after_the_other_or_drawn(folder, models):
    argv = ["--prompt_data", "prompts.jsonl, math.jsonl", "--max_samples", "1"]
    assert [prompt.text for prompt in check(folder, models, *argv).prompts] == ["prompts 0?", "math 0?"]
    drawn = check(folder, models, *argv, "--prompt_data_probs", "1,99").prompts
    assert sum(prompt.text == "math 0?" for prompt in drawn) > 1
    assert "2 data sources need as many probabilities" in refused(folder, models, *argv, "--prompt_data_probs", "1")


def test_check_inputs_prompt_split_reaches_the_data_set(folder, models):
    from datasets import Dataset, DatasetDict

    splits = {name: Dataset.from_list([{"input": f"{name}?"}]) for name in ("train", "test")}
    DatasetDict(splits).save_to_disk(str(folder / "split"))
    argv = ["--prompt_data", "split", "--rollout_batch_size", "2", "--prompt_split", "test"]
    assert [prompt.text for prompt in check(folder, models, *argv).prompts] == ["test?"]


def test_check_inputs_bad_rows_are_refused_or_left_out(folder, models):
    with (folder / "prompts.jsonl").open("a") as file:
        file.write('{"input": ""}\n')
    text = refused(folder, models)
    assert "1 of 3 rows cannot be used" in text
    assert "prompts.jsonl:3: `input` is empty" in text
    assert len(check(folder, models, "--skip_bad_rows").prompts) == 2


def test_check_inputs_reaches_every_server_once(folder, models, server):
    found = check(folder, models, "--remote_rm_url", f"reward.py,{server.url}")
    assert [source.kind for source in found.reward_sources] == ["function", "server"]
    assert found.reward_sources[0].targets == (str(folder / "reward.py"),)
    assert found.reward_sources[1].targets == (server.url,)
    assert len(server.requests) == 1 and server.requests[0][0] == "prompts 0?"
    assert found.notices == ()


def test_check_inputs_server_that_is_not_there_is_refused(folder, models, server):
    server.shutdown()
    server.server_close()
    text = refused(folder, models, "--remote_rm_url", server.url)
    assert "the reward server does not answer" in text
    assert server.url in text
    assert "hint: start it" in text


def test_check_inputs_server_with_a_wrong_answer_is_refused(folder, models, server):
    server.answer = lambda query: (200, [1.0])
    assert server.url in refused(folder, models, "--remote_rm_url", server.url)


def test_check_inputs_server_that_is_busy_is_a_notice(folder, models, server):
    server.answer = lambda query: (503, [])
    (notice,) = check(folder, models, "--remote_rm_url", server.url).notices
    assert notice.startswith("the reward server failed on the first prompts, and the run goes on: ")
    assert "503" in notice


def test_check_inputs_one_of_several_rewards_is_named(folder, models):
    (folder / "broken.py").write_text("def reward_func(queries, prompts, labels):\n    raise KeyError('no luck')\n")
    (notice,) = check(folder, models, "--remote_rm_url", "reward.py,broken.py").notices
    assert notice.startswith("the reward function broken failed on the first prompts, and the run goes on: ")


def test_check_inputs_url_that_is_none_is_refused_before_the_model_is_read(folder, models):
    assert "ftp://host" in refused(folder, models, "--remote_rm_url", "ftp://host/x", "--pretrain", "./absent")


def test_check_inputs_reward_models_are_folders_and_the_critic_starts_from_the_first(folder, models):
    argv = ["--remote_rm_url", "None", "--reward_pretrain", f"{models / 'judge'},{models / 'second'}"]
    found = check(folder, models, *argv)
    assert [source.targets[0] for source in found.reward_sources] == [str(models / "judge"), str(models / "second")]
    assert found.critic == str(models / "judge")
    assert found.notices == (
        f"the critic starts from the reward model {models / 'judge'}; use --critic_pretrain for another model",
    )
    named = check(folder, models, *argv, "--critic_pretrain", str(models / "policy"))
    assert (named.critic, named.notices) == (str(models / "policy"), ())
    without = check(folder, models, *argv, "--advantage_estimator", "group_norm", "--n_samples_per_prompt", "2")
    assert without.notices == ()


@pytest.mark.parametrize("flags", ["--share_prompts", "--sequence_parallel_size 2 --actor_num_gpus_per_node 2"])
def test_check_inputs_reward_model_is_not_concerned_by_what_is_done_with_packed_samples(folder, models, flags):
    argv = ["--remote_rm_url", "None", "--reward_pretrain", str(models / "judge"), "--packing_samples", *flags.split()]
    check(folder, models, *argv, "--advantage_estimator", "group_norm", "--n_samples_per_prompt", "4")


def test_check_inputs_without_reward_model_the_critic_is_the_policy(folder, models):
    assert check(folder, models).critic == str(models / "policy")
    found = check(folder, models, "--lora_rank", "2", "--target_modules", "q_proj")
    assert found.critic == str(models / "policy")
    assert re.fullmatch(r"--lora_rank 2 trains \d\.\d\d% of the weights", *found.notices)


def test_check_inputs_says_how_much_of_a_critic_its_adapters_are(folder, models):
    layers = ["--target_modules", "q_proj"]
    found = check(folder, models, "--critic_lora_rank", "2", *layers)
    assert re.fullmatch(r"--critic_lora_rank 2 trains \d\.\d\d% of the critic's weights", *found.notices)
    both = check(folder, models, "--lora_rank", "2", "--critic_lora_rank", "0", *layers)
    assert len(both.notices) == 1 and both.notices[0].startswith("--lora_rank 2 trains")
    text = refused(folder, models, "--critic_lora_rank", "2", "--target_modules", "absent_proj")
    assert "absent_proj" in text and "hint:" in text


def test_check_inputs_model_without_a_score_is_refused(folder, models):
    text = refused(folder, models, "--reward_pretrain", str(models / "policy"))
    assert text.startswith("--reward_pretrain: the model")
    assert "has no scalar head" in text


@pytest.mark.parametrize("flag", ["reward_pretrain", "critic_pretrain", "teacher_model"])
def test_check_inputs_model_that_reads_other_tokens_is_refused(folder, models, flag):
    text = refused(folder, models, "--pretrain", str(MODEL_DIR), f"--{flag}", str(models / "judge"))
    assert text.startswith(f"--{flag}: the vocabulary of {models / 'judge'} differs from the policy's")


def test_check_inputs_critic_with_a_head_of_two_labels_is_refused(folder, models):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    shutil.copytree(models / "policy", folder / "two")
    config = AutoConfig.from_pretrained(folder / "two", num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "two")
    text = refused(folder, models, "--advantage_estimator", "gae", "--critic_pretrain", "two")
    assert text.startswith(f"--critic_pretrain: the head score.weight of the model {folder / 'two'} has the shape [2, ")


@pytest.mark.parametrize("flag", ["pretrain", "critic_pretrain"])
def test_check_inputs_critic_with_a_head_of_an_unknown_name_is_refused(folder, models, flag):
    import torch
    from safetensors.torch import load_file, save_file

    file = shutil.copytree(models / "policy", folder / "own") / "model.safetensors"
    save_file(load_file(file) | {"critic.weight": torch.ones(1, 64)}, file, {"format": "pt"})
    text = refused(folder, models, "--advantage_estimator", "gae", f"--{flag}", "own")
    assert text.startswith(f"--{flag}: the model {folder / 'own'} has the weight critic.weight of shape [1, 64]")


def test_check_inputs_reward_model_is_not_concerned_by_the_attention_of_the_policy(folder, models):
    from transformers import AutoModelForSequenceClassification, Gemma2Config

    shutil.copytree(models / "judge", folder / "capped")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma2Config(**sizes, num_key_value_heads=1, head_dim=32, vocab_size=512, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "capped")
    argv = ["--remote_rm_url", "None", "--reward_pretrain", "capped", "--attn_implementation", "sdpa"]
    check(folder, models, *argv, "--advantage_estimator", "group_norm", "--n_samples_per_prompt", "2")


def test_check_inputs_teacher_with_the_policys_tokens_is_accepted_alone_and_one_with_a_short_context_is_not(
    folder, models
):
    argv = ["--remote_rm_url", "None", "--teacher_model"]
    found = check(folder, models, *argv, str(models / "policy"))
    assert (found.teacher, found.reward_sources) == (str(models / "policy"), ())
    assert check(folder, models).teacher is None
    shutil.copytree(models / "policy", folder / "short")
    config = json.loads((folder / "short" / "config.json").read_text())
    (folder / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 39}))
    text = refused(folder, models, *argv, "short")
    assert text.startswith("--teacher_model: --prompt_max_len 32 + --generate_max_len 8 is 40 tokens")


def test_check_inputs_ids_without_token_are_found_for_policy_and_teacher_and_told_once(folder, models):
    from rlhf_models.testing import tiny_model_dir, tiny_tokenizer

    num_tokens = len(tiny_tokenizer())
    for name, num_rows in (("padded", 600), ("teacher", 640)):
        tiny_model_dir(folder / name, vocab_size=num_rows)
        tiny_tokenizer().save_pretrained(folder / name)
    padded, teacher = str(folder / "padded"), str(folder / "teacher")
    found = check(folder, models, "--pretrain", padded, "--teacher_model", teacher)
    assert found.masked_ids == {padded: (range(num_tokens, 600),), teacher: (range(num_tokens, 640),)}
    told = [notice for notice in found.notices if "no token" in notice]
    assert len(told) == 1 and f"{600 - num_tokens} of the 600 ids" in told[0]
    whole = check(folder, models)
    assert whole.masked_ids == {str(models / "policy"): ()}
    assert not any("no token" in notice for notice in whole.notices)


def test_check_inputs_models_that_lack_weights_or_could_not_be_saved_are_refused(folder, models, monkeypatch):
    from safetensors.torch import load_file, save_file

    from rlhf_models import weights

    for name, lost in (("policy", "model.norm.weight"), ("judge", "model.layers.1.mlp.up_proj.weight")):
        tensors = load_file(shutil.copytree(models / name, folder / name) / "model.safetensors")
        del tensors[lost]
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
    said = refused(folder, folder, "--pretrain", "policy")
    assert said.startswith("--pretrain: the model") and "policy lacks 1 weights of a Qwen2ForCausalLM, such as" in said
    critic = ("--critic_pretrain", "judge", "--advantage_estimator", "gae")
    said = refused(folder, models, *critic)
    assert said.startswith("--critic_pretrain: the model") and "judge lacks 1 weights of a Qwen2Model, such as" in said
    said = refused(folder, models, "--reward_pretrain", "judge", "--advantage_estimator", "gae")
    assert said.startswith("--reward_pretrain: the model") and "judge lacks 1 weights" in said
    whole = weights._in_checkpoint
    monkeypatch.setattr(weights, "_in_checkpoint", lambda *args: {"old." + name: x for name, x in whole(*args).items()})
    said = refused(folder, models)
    assert said.startswith("--pretrain: a trained qwen2 could not be saved so that transformers loads it (missing keys")


def test_check_inputs_process_reward_model_is_known_by_its_config(folder, models):
    shutil.copytree(models / "policy", folder / "steps")
    config = json.loads((folder / "steps" / "config.json").read_text())
    steps = {"process_reward": {"placeholder": 5, "good": 10, "bad": 12}}
    (folder / "steps" / "config.json").write_text(json.dumps(config | steps))
    argv = ["--remote_rm_url", "None", "--critic_pretrain", str(models / "policy"), "--reward_pretrain"]
    found = check(folder, models, *argv, f"{models / 'judge'},steps", "--step_separator", ".")
    assert (found.process_models, found.notices) == ((str(folder / "steps"),), ())
    plain = check(folder, models, *argv, str(models / "judge"), "--step_separator", ".")
    assert plain.process_models == ()
    assert plain.notices == ("--step_separator has no effect: no model of --reward_pretrain judges steps",)
    sharded = check(folder, models, *argv, "steps", "--reward_sharding", "on", "--reward_num_gpus_per_node", "2")
    assert sharded.notices == (f"--reward_sharding has no effect on {folder / 'steps'}: it judges steps",)
    alone = check(folder, models, *argv, str(models / "judge"), "--reward_sharding", "on")
    assert alone.notices == ("--reward_sharding has no effect: reward models have one process each",)
    text = refused(folder, models, *argv, "steps", "--running_reward_norm")
    assert text.startswith("--running_reward_norm normalizes rewards of whole responses, and ")
    text = refused(
        folder, models, *argv, f"{models / 'judge'},steps", "--reward_normalize", "each", "--n_samples_per_prompt", "4"
    )
    assert text.startswith("--reward_normalize each normalizes rewards of whole responses, and ")
    (folder / "steps" / "config.json").write_text(json.dumps(config | {"process_reward": {"placeholder": 5}}))
    assert refused(folder, models, *argv, "steps").startswith("--reward_pretrain: process_reward of a model's config")
    (folder / "steps" / "config.json").write_text(json.dumps(config | steps))
    (folder / "steps" / "model.safetensors").unlink()
    assert "steps has no weights" in refused(folder, models, *argv, "steps")


def test_check_inputs_reward_model_without_weights_is_refused(folder, models):
    shutil.copytree(models / "judge", folder / "judge", ignore=shutil.ignore_patterns("*.safetensors"))
    text = refused(folder, models, "--reward_pretrain", "judge")
    assert text.startswith(f"--reward_pretrain: the model folder {folder / 'judge'} has no weights")


def test_check_inputs_reward_model_with_a_short_context_is_refused(folder, models):
    shutil.copytree(models / "judge", folder / "judge")
    config = json.loads((folder / "judge" / "config.json").read_text())
    (folder / "judge" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 39}))
    text = refused(folder, models, "--reward_pretrain", "judge")
    assert "--reward_pretrain: --prompt_max_len 32 + --generate_max_len 8 is 40 tokens" in text


def test_check_inputs_held_out_prompts_are_told_apart_by_file(folder, models):
    found = check(folder, models, "--eval_data", "math.jsonl,code.jsonl")
    assert [prompt.source for prompt in found.eval_prompts] == ["math", "math", "code", "code"]
    assert (found.eval_prompts.counts.num_rows, found.eval_prompts.counts.num_too_long) == (4, 0)


def test_check_inputs_held_out_prompts_are_told_apart_by_key_in_letters_that_metrics_have(folder, models):
    found = check(folder, models, "--eval_data", "math.jsonl", "--source_key", "set")
    assert [prompt.source for prompt in found.eval_prompts] == ["math_0", "math_1"]
    assert {prompt.source for prompt in found.prompts} == {"train"}


def test_check_inputs_source_key_that_is_not_there_is_refused(folder, models):
    text = refused(folder, models, "--eval_data", "math.jsonl", "--source_key", "sets")
    assert text.startswith(f"--source_key: {folder / 'math.jsonl'}:1: unknown key `sets`; known: input, set")


def test_check_inputs_held_out_files_of_one_name_are_refused(folder, models):
    (folder / "other").mkdir()
    shutil.copy(folder / "math.jsonl", folder / "other")
    text = refused(folder, models, "--eval_data", "math.jsonl,other/math.jsonl")
    assert "two files of --eval_data are called math" in text


@pytest.mark.parametrize(
    "name", ["eval/accuracy", "eval/pass@1", "eval/pass@2", "eval/pass@3", "eval/math/pass@3", "eval/code/truncated"]
)
def test_check_inputs_best_metric_is_one_that_will_be_measured(folder, models, name):
    argv = ["--eval_data", "math.jsonl,code.jsonl", "--eval_n_samples_per_prompt", "3"]
    check(folder, models, *argv, "--best_metric_key", name)


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
        ("eval/scores", "eval/score"),
        ("eval/response_token", "eval/response_tokens"),
        ("eval/pass@4", "eval/pass@"),
        ("pass@1", "eval/pass@1"),
        ("eval/maths/pass@1", "eval/math/pass@1"),
    ],
)
def test_check_inputs_best_metric_that_nothing_measures_is_refused(folder, models, name, hint):
    argv = ["--eval_data", "math.jsonl,code.jsonl", "--eval_n_samples_per_prompt", "3"]
    text = refused(folder, models, *argv, "--best_metric_key", name)
    assert text.startswith(f"--best_metric_key: unknown metric `{name}`; known: eval/accuracy")
    assert f"hint: did you mean `{hint}" in text


def test_check_inputs_best_metric_may_be_a_number_that_a_function_logs_and_not_one_of_a_model(folder, models):
    argv = ["--eval_data", "math.jsonl", "--best_metric_key", "eval/brevity"]
    check(folder, models, *argv)
    check(folder, models, *argv[:-1], "eval/reward_1")
    only_a_model = ["--remote_rm_url", "None", "--reward_pretrain", str(models / "judge")]
    assert "unknown metric `eval/brevity`" in refused(folder, models, *argv, *only_a_model)
    mixed = ["--remote_rm_url", "reward.py", "--reward_pretrain", str(models / "judge")]
    check(folder, models, *argv, *mixed)


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
def test_check_inputs_template_that_rewrites_answers_is_a_notice_with_the_option(
    folder, models, template, parts, history
):
    shutil.copytree(models / "policy", folder / "policy")
    trl = importlib.util.find_spec("trl")
    assert trl is not None and trl.origin is not None
    text = (Path(trl.origin).parent / f"chat_templates/{template}.jinja").read_text()
    (folder / "policy/chat_template.jinja").write_text(text)
    (folder / "agent.py").write_text("async def run_episode(session):\n    return 0.0\n")
    argv = ["--pretrain", "policy", "--agent_func_path", "agent.py", "--agent_history", history]
    notices = [notice for notice in check(folder, models, *argv).notices if "chat template" in notice]
    begins = f"the chat template rewrites earlier {parts}: "
    follows = {
        "append": "agents keep what the policy wrote; --agent_history split would begin another rollout there",
        "split": "with --agent_history split, conversations over HTTP begin another rollout there",
    }
    assert notices == ([begins + follows[history]] if parts else [])


def test_check_inputs_tools_reach_training_and_held_out_prompts_or_are_a_notice(folder, models):
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
    found = check(folder, models, *argv, "--tools_key", "tools")
    assert found.eval_prompts is not None
    assert [prompt.text for prompt in (*found.prompts, *found.eval_prompts)] == ["tool_train:train?", "tool_held:held?"]
    assert not [notice for notice in found.notices if "tools" in notice]
    without = check(folder, models, *argv)
    assert without.prompts[0].text == ":train?"
    said = f"{folder}/train.jsonl:1 has `tools`, which the chat template does not get: --tools_key tools gives it"
    assert [notice for notice in without.notices if notice.startswith(said)]
    assert "did you mean --tools_key tools" in refused(folder, models, *argv, "--tools_key", "tool")


def test_check_inputs_variables_of_the_chat_template_reach_training_and_held_out_prompts(folder, models):
    shutil.copytree(models / "policy", folder / "policy")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '/no' if think is defined and not think }}"
    (folder / "policy/chat_template.jinja").write_text(template)
    argv = ["--pretrain", "policy", "--apply_chat_template", "--eval_data", "math.jsonl", "--input_key", "input"]
    given = ["--chat_template_kwargs", '{"think": false}']
    found = check(folder, models, *argv, *given)
    assert found.eval_prompts is not None
    assert [prompt.text for prompt in (*found.prompts, *found.eval_prompts)][::2] == ["prompts 0?/no", "math 0?/no"]
    assert check(folder, models, *argv).prompts[0].text == "prompts 0?"
    assert "the chat template does not read `thin`" in refused(folder, models, *argv, given[0], '{"thin": 1}')
    parsed = CommandLine(config=PpoConfig, prog="").parse([*given, "--dry_run"])
    assert "--chat_template_kwargs has no effect: --apply_chat_template is off" in parsed.notices


@pytest.mark.parametrize("template", ["", "{{ raise_exception('one question only') if messages|length > 1 }}"])
def test_check_inputs_agent_needs_no_template_for_conversations(folder, models, template):
    shutil.copytree(models / "policy", folder / "policy")
    (folder / "policy/chat_template.jinja").write_text(template)
    (folder / "agent.py").write_text("async def run_episode(session):\n    return 0.0\n")
    found = check(folder, models, "--pretrain", "policy", "--agent_func_path", "agent.py")
    assert found.agent == str(folder / "agent.py")
    assert not [notice for notice in found.notices if "chat template" in notice]


def test_check_inputs_agent_is_the_command_line_of_a_program(folder, models):
    (folder / "agent.py").write_text("")
    assert check(folder, models, "--agent_func_path", "sh agent.py 3").agent == f"sh {folder}/agent.py 3"
    argv = ["--agent_func_path", "python_that_is_not_there agent.txt"]
    assert "neither a Python file nor a module, nor a program that can be run" in refused(folder, models, *argv)


def test_check_inputs_tool_parser_that_nobody_knows_is_refused(folder, models):
    (folder / "agent.py").write_text("async def run_episode(session):\n    return 0.0\n")
    argv = ["--agent_func_path", "agent.py", "--agent_tool_parser", "hermess"]
    assert "unknown tool parser `hermess`" in refused(folder, models, *argv)
