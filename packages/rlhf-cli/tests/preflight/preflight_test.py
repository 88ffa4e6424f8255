"""What is looked at before a run: reward servers, reward models, the critic, the teacher and the agent."""

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlhf_cli.builtin import MODEL_DIR
from rlhf_models.testing import tiny_model_dir, tiny_tokenizer
from tiny_vision import drawn_shapes, tiny_vision_model_dir, tiny_vision_reward_dir


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


def test_check_inputs_reaches_every_server_once(check, folder, server):
    found = check("--remote_rm_url", f"reward.py,{server.url}")
    assert [source.kind for source in found.reward_sources] == ["function", "server"]
    assert found.reward_sources[0].targets == (str(folder / "reward.py"),)
    assert found.reward_sources[1].targets == (server.url,)
    assert len(server.requests) == 1 and server.requests[0][0] == "prompts 0?"
    assert found.notices == ()


def test_check_inputs_reward_models_are_folders_and_the_critic_starts_from_the_first(check, models):
    argv = ["--remote_rm_url", "None", "--reward_pretrain", f"{models / 'judge'},{models / 'second'}"]
    found = check(*argv)
    assert [source.targets[0] for source in found.reward_sources] == [str(models / "judge"), str(models / "second")]
    assert found.critic == str(models / "judge")
    assert found.notices == (
        f"the critic starts from the reward model {models / 'judge'}; use --critic_pretrain for another model",
    )
    named = check(*argv, "--critic_pretrain", str(models / "policy"))
    assert (named.critic, named.notices) == (str(models / "policy"), ())
    without = check(*argv, "--advantage_estimator", "group_norm", "--n_samples_per_prompt", "2")
    assert without.notices == ()


@pytest.mark.parametrize("flags", ["--share_prompts", "--sequence_parallel_size 2 --actor_num_gpus_per_node 2"])
def test_check_inputs_reward_model_is_not_concerned_by_what_is_done_with_packed_samples(check, models, flags):
    argv = ["--remote_rm_url", "None", "--reward_pretrain", str(models / "judge"), "--packing_samples", *flags.split()]
    check(*argv, "--advantage_estimator", "group_norm", "--n_samples_per_prompt", "4")


def test_check_inputs_without_reward_model_the_critic_is_the_policy(check, models):
    assert check().critic == str(models / "policy")
    found = check("--lora_rank", "2", "--target_modules", "q_proj")
    assert found.critic == str(models / "policy")
    assert re.fullmatch(r"--lora_rank 2 trains \d\.\d\d% of the weights", *found.notices)


def test_check_inputs_says_how_much_of_a_critic_its_adapters_are(check, refused):
    layers = ["--target_modules", "q_proj"]
    found = check("--critic_lora_rank", "2", *layers)
    assert re.fullmatch(r"--critic_lora_rank 2 trains \d\.\d\d% of the critic's weights", *found.notices)
    both = check("--lora_rank", "2", "--critic_lora_rank", "0", *layers)
    assert len(both.notices) == 1 and both.notices[0].startswith("--lora_rank 2 trains")
    text = refused("--critic_lora_rank", "2", "--target_modules", "absent_proj")
    assert "absent_proj" in text and "hint:" in text


def test_check_inputs_model_without_a_score_is_refused(refused, models):
    text = refused("--reward_pretrain", str(models / "policy"))
    assert text.startswith("--reward_pretrain: the model")
    assert "has no scalar head" in text


@pytest.mark.parametrize("flag", ["reward_pretrain", "critic_pretrain", "teacher_model"])
def test_check_inputs_model_that_reads_other_tokens_is_refused(refused, models, flag):
    text = refused("--pretrain", str(MODEL_DIR), f"--{flag}", str(models / "judge"))
    assert text.startswith(f"--{flag}: the vocabulary of {models / 'judge'} differs from the policy's")


@pytest.mark.parametrize("flag", ["pretrain", "critic_pretrain"])
def test_check_inputs_critic_with_a_head_of_an_unknown_name_is_refused(refused, folder, models, flag):
    import torch
    from safetensors.torch import load_file, save_file

    file = shutil.copytree(models / "policy", folder / "own") / "model.safetensors"
    save_file(load_file(file) | {"critic.weight": torch.ones(1, 64)}, file, {"format": "pt"})
    text = refused("--advantage_estimator", "gae", f"--{flag}", "own")
    assert text.startswith(f"--{flag}: the model {folder / 'own'} has the weight critic.weight of shape [1, 64]")


def test_check_inputs_teacher_is_accepted_alone_and_refused_with_a_short_context(check, refused, folder, models):
    argv = ["--remote_rm_url", "None", "--teacher_model"]
    found = check(*argv, str(models / "policy"))
    assert found.reward_sources == ()
    shutil.copytree(models / "policy", folder / "short")
    config = json.loads((folder / "short" / "config.json").read_text())
    (folder / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 39}))
    text = refused(*argv, "short")
    assert text.startswith("--teacher_model: --prompt_max_len 32 + --generate_max_len 8 is 40 tokens")
    num_tokens = len(tiny_tokenizer())
    check(*argv, str(models / "policy"), "--teacher_top_k", str(num_tokens))
    text = refused(*argv, str(models / "policy"), "--teacher_top_k", str(num_tokens + 1))
    assert f"--teacher_top_k is {num_tokens + 1}, and the tokenizer has {num_tokens} tokens" in text


def test_check_inputs_entropy_that_no_policy_has_is_refused(check, refused):
    assert len(tiny_tokenizer()) == 512  # whose logarithm is 6.238
    check("--entropy_target", "6.23")
    text = refused("--entropy_target", "6.25")
    most = "512 equally likely tokens have 6.24"
    assert text.startswith(f"--entropy_target is 6.25 nats per token, which no policy has: {most}\n\nhint: Skywork")


def test_check_inputs_ids_without_token_are_found_for_policy_and_teacher_and_told_once(check, folder, models):
    num_tokens = len(tiny_tokenizer())
    for name, num_rows in (("padded", 600), ("teacher", 640)):
        tiny_model_dir(folder / name, vocab_size=num_rows)
        tiny_tokenizer().save_pretrained(folder / name)
    padded, teacher = str(folder / "padded"), str(folder / "teacher")
    found = check("--pretrain", padded, "--teacher_model", teacher)
    assert found.masked_ids == {padded: (range(num_tokens, 600),), teacher: (range(num_tokens, 640),)}
    told = [notice for notice in found.notices if "no token" in notice]
    assert len(told) == 1 and f"{600 - num_tokens} of the 600 ids" in told[0]
    whole = check()
    assert whole.masked_ids == {str(models / "policy"): ()}
    assert not any("no token" in notice for notice in whole.notices)


def test_check_inputs_models_that_lack_weights_or_could_not_be_saved_are_refused(refused, folder, models, monkeypatch):
    from safetensors.torch import load_file, save_file

    from rlhf_models import weights

    for name, lost in (("policy", "model.norm.weight"), ("judge", "model.layers.1.mlp.up_proj.weight")):
        tensors = load_file(shutil.copytree(models / name, folder / name) / "model.safetensors")
        del tensors[lost]
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
    said = refused("--pretrain", "policy")
    assert said.startswith("--pretrain: the model") and "policy lacks 1 weights of a Qwen2ForCausalLM, such as" in said
    critic = ("--critic_pretrain", "judge", "--advantage_estimator", "gae")
    said = refused(*critic)
    assert said.startswith("--critic_pretrain: the model") and "judge lacks 1 weights of a Qwen2Model, such as" in said
    said = refused("--reward_pretrain", "judge", "--advantage_estimator", "gae")
    assert said.startswith("--reward_pretrain: the model") and "judge lacks 1 weights" in said
    whole = weights._in_checkpoint
    monkeypatch.setattr(weights, "_in_checkpoint", lambda *args: {"old." + name: x for name, x in whole(*args).items()})
    said = refused()
    assert said.startswith("--pretrain: a trained qwen2 could not be saved so that transformers loads it (missing keys")


def test_check_inputs_process_reward_model_is_known_by_its_config(check, refused, folder, models):
    shutil.copytree(models / "policy", folder / "steps")
    config = json.loads((folder / "steps" / "config.json").read_text())
    steps = {"process_reward": {"placeholder": 5, "good": 10, "bad": 12}}
    (folder / "steps" / "config.json").write_text(json.dumps(config | steps))
    argv = ["--remote_rm_url", "None", "--critic_pretrain", str(models / "policy"), "--reward_pretrain"]
    found = check(*argv, f"{models / 'judge'},steps", "--step_separator", ".")
    assert (found.process_models, found.notices) == ((str(folder / "steps"),), ())
    plain = check(*argv, str(models / "judge"), "--step_separator", ".")
    assert plain.process_models == ()
    assert plain.notices == ("--step_separator has no effect: no model of --reward_pretrain judges steps",)
    sharded = check(*argv, "steps", "--reward_sharding", "on", "--reward_num_gpus_per_node", "2")
    assert sharded.notices == (f"--reward_sharding has no effect on {folder / 'steps'}: it judges steps",)
    alone = check(*argv, str(models / "judge"), "--reward_sharding", "on")
    assert alone.notices == ("--reward_sharding has no effect: reward models have one process each",)
    text = refused(*argv, "steps", "--running_reward_norm")
    assert text.startswith("--running_reward_norm normalizes rewards of whole responses, and ")
    text = refused(*argv, f"{models / 'judge'},steps", "--reward_normalize", "each", "--n_samples_per_prompt", "4")
    assert text.startswith("--reward_normalize each normalizes rewards of whole responses, and ")
    (folder / "steps" / "config.json").write_text(json.dumps(config | {"process_reward": {"placeholder": 5}}))
    assert refused(*argv, "steps").startswith("--reward_pretrain: process_reward of a model's config")
    (folder / "steps" / "config.json").write_text(json.dumps(config | steps))
    (folder / "steps" / "model.safetensors").unlink()
    assert "steps has no weights" in refused(*argv, "steps")


def test_check_inputs_reward_models_read_images_as_the_policy_does(check, refused, folder, models):
    rewards = tiny_vision_reward_dir(folder / "rm", tiny_vision_model_dir(folder / "eyes", "smolvlm"))
    rows = drawn_shapes(folder / "pictures", 4, seed=1)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--pretrain", "eyes", "--image_key", "images", "--apply_chat_template", "--prompt_max_len", "160"]
    argv += ["--remote_rm_url", "None", "--advantage_estimator", "group_norm", "--n_samples_per_prompt", "2"]
    sharded = ["--reward_sharding", "on", "--reward_num_gpus_per_node", "2"]
    found = check(*argv, "--reward_pretrain", "rm", *sharded)
    assert found.reward_sources[0].targets == (str(rewards),)
    assert "--reward_sharding has no effect: reward models that read images are not divided" in found.notices
    processor = json.loads((rewards / "preprocessor_config.json").read_text())
    (rewards / "preprocessor_config.json").write_text(json.dumps(processor | {"do_image_splitting": False}))
    assert "rm reads images in another way than the trained model" in refused(*argv, "--reward_pretrain", "rm")
    config = json.loads((rewards / "config.json").read_text())
    steps = {"process_reward": {"placeholder": 5, "good": 10, "bad": 12}}
    (rewards / "config.json").write_text(json.dumps(config | steps))
    assert "--image_key needs rewards of whole responses, and" in refused(*argv, "--reward_pretrain", "rm")


@pytest.mark.parametrize("template", ["", "{{ raise_exception('one question only') if messages|length > 1 }}"])
def test_check_inputs_agent_needs_no_template_for_conversations(check, folder, models, template):
    shutil.copytree(models / "policy", folder / "policy")
    (folder / "policy/chat_template.jinja").write_text(template)
    (folder / "agent.py").write_text("async def run_episode(session):\n    return 0.0\n")
    found = check("--pretrain", "policy", "--agent_func_path", "agent.py")
    assert found.agent == str(folder / "agent.py")
    assert not [notice for notice in found.notices if "chat template" in notice]


def test_check_inputs_agent_is_the_command_line_of_a_program(check, refused, folder):
    (folder / "agent.py").write_text("")
    assert check("--agent_func_path", "sh agent.py 3").agent == f"sh {folder}/agent.py 3"
    argv = ["--agent_func_path", "python_that_is_not_there agent.txt"]
    assert "neither a Python file nor a module, nor a program that can be run" in refused(*argv)


def test_check_inputs_tool_parser_that_nobody_knows_is_refused(refused, folder):
    (folder / "agent.py").write_text("async def run_episode(session):\n    return 0.0\n")
    argv = ["--agent_func_path", "agent.py", "--agent_tool_parser", "hermess"]
    assert "unknown tool parser `hermess`" in refused(*argv)
