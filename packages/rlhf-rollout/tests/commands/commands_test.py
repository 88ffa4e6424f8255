"""The commands: what they refuse before anything starts, notices, dry runs, and what their help imports."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from record_testing import read_jsonl, write_jsonl
from rlhf_data.testing import ByteTokenizer
from rlhf_rollout.commands.main import COMMANDS, main
from rlhf_rollout.commands.parts import EngineJob, make_engine
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.rewards.sources import CallOptions, RewardSource
from rlhf_rollout.workers.guarded import WorkerOptions
from rollout_testing import generate_words

_MATH = ("--remote_rm_url", "rlhf_rollout.rewards.math", "--label_key", "a")


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """A model whose vocabulary of 900 has 300 tokens."""
    from rlhf_models.testing import tiny_model_dir, tiny_tokenizer

    folder = tiny_model_dir(tmp_path_factory.mktemp("padded"), vocab_size=900)
    tiny_tokenizer(300).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("flag", ["--tokenizer", "--pretrain"])
def test_fake_engine_answers_prompts_in_the_tokens_of_any_tokenizer(padded, tmp_path, flag):
    # Ids from 256 on are whole words of this tokenizer.
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"q": "the sum of the numbers"}])
    assert generate(prompts, tmp_path / "out.jsonl", flag, padded, "--generate_max_len", "8", "--seed", "1") == 0
    [record] = read_jsonl(tmp_path / "out.jsonl")
    num_prompt = record["spans"][0]["num_tokens"]
    assert max(record["token_ids"][:num_prompt]) >= 256 > max(record["token_ids"][num_prompt:])


def test_ids_without_token_are_masked_and_a_model_that_has_no_tokenizer_is_served(
    prompts, padded, tmp_path, capsys, monkeypatch
):
    specs = []

    async def start(kind, spec, environ=None):
        specs.append(spec)
        return FakeEngine()

    monkeypatch.setattr("rlhf_rollout.engines.process.start_engine", start)
    monkeypatch.setattr("rlhf_rollout.commands.serve.start_engine", start)
    monkeypatch.setattr("rlhf_rollout.commands.serve.listen", lambda app, host, port, log: None)
    generate(prompts, tmp_path / "out.jsonl", "--engine", "transformers", "--pretrain", padded)
    assert main(["serve", "--engine", "transformers", "--pretrain", padded]) == 0
    assert capsys.readouterr().err.count("no token for 600 of the 900 ids") == 2
    shutil.copy(Path(padded) / "config.json", tmp_path / "config.json")
    assert main(["serve", "--engine", "transformers", "--pretrain", str(tmp_path)]) == 0
    assert re.search(r"notice: no ids of the vocabulary are masked: \S", capsys.readouterr().err)
    assert [spec.masked_ids for spec in specs] == [(range(300, 900),), (range(300, 900),), ()]


def command_words(command, engine, model, prompts):
    words = [command, "--engine", engine, "--pretrain", str(model)]
    if command in ("generate", "bench"):
        words += ["--input_key", "q", "--prompt_data", str(prompts)]
    return [*words, "--output_path", str(prompts.with_name("out.jsonl"))] if command == "generate" else words


@pytest.mark.parametrize("command", ["generate", "serve", "chat", "bench"])
def test_model_whose_head_contradicts_its_config_is_refused_before_it_is_loaded(prompts, tmp_path, capsys, command):
    from safetensors.torch import load_file, save_file

    from rlhf_models.testing import tiny_model_dir

    model = tiny_model_dir(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert main(command_words(command, "transformers", model, prompts)) == 2
    assert "ties the LM head to the embedding" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "serve", "chat", "bench"])
def test_draft_model_of_other_tokens_is_refused_before_an_engine_starts(
    prompts, padded, tmp_path, capsys, monkeypatch, command
):
    for module in ("engines.process", "commands.serve", "commands.chat", "commands.bench"):
        monkeypatch.setattr(f"rlhf_rollout.{module}.start_engine", None)
    draft = shutil.copytree(padded, tmp_path / "draft")
    tokens = draft / "tokenizer.json"
    tokens.write_text(tokens.read_text().replace('"ore": 295', '"ore": 299').replace('"gore": 299', '"gore": 295'))
    assert main([*command_words(command, "vllm", padded, prompts), "--vllm_draft_model", str(draft)]) == 2
    says = "differs from the policy's in 2 of 300 tokens: 'ore' has id 295 in the policy's and 299 in this one"
    hint = "hint: draft with a smaller model of the policy's family, or with --vllm_speculative ngram"
    assert re.search(f"{says}\n\n{hint}", capsys.readouterr().err)
    assert main([*command_words(command, "vllm", padded, prompts), "--vllm_speculative", "mtp"]) == 2
    assert f"{padded} has no layers that predict several tokens" in capsys.readouterr().err


def test_engines_without_a_model_of_their_own_mask_nothing():
    for kind in ("fake", "http"):
        spec = EngineSpec(model="none")
        assert EngineJob(kind=kind, spec=spec, tokenizer=None).masked_spec(ByteTokenizer()) is spec


@pytest.fixture
def prompts(tmp_path):
    return write_jsonl(tmp_path / "prompts.jsonl", [{"q": f"{n}+1=", "a": n + 1} for n in range(5)])


def generate(prompts, out, *more):
    return main(generate_words(prompts, out, "--input_key", "q", *more))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--input_kye", "q"], "unknown flag `--input_kye`\n\nhint: did you mean `--input_key`?"),
        (["--input_key", "question"], "prompts.jsonl:1: unknown key `question`; known: a, q"),
        (["--engine", "vlm"], "did you mean `vllm`?"),
        (["--engine", "vllm"], "--pretrain is missing: engine vllm needs a model"),
        (["--prompt_data", "nothere.jsonl"], "data file nothere.jsonl does not exist"),
        (["--prompt_max_len", "1"], "all 5 prompts of"),
        (["--prompt_max_len", "0"], "--prompt_max_len is 0; it must be at least 1"),
        (["--prompt_max_len", "x"], "--prompt_max_len is x; it must be a whole number"),
        (["--n_samples_per_prompt", "2", "--temperature", "0"], "greedy responses are all the same"),
        (["--top_p", "0"], "--top_p is 0; it must be above 0.0"),
        (["--top_k", "0"], "--top_k is 0, which leaves no token to sample"),
        (["--engine", "http", "--pretrain", "m"], "--base_url is missing: --engine http asks a server"),
        (["--bf16", "float16"], "--bf16 is float16; it must be true or false"),
        (["--input_template", "x"], "must contain `{}` exactly once"),
        (["--remote_rm_url", "nothere.py"], "reward file nothere.py does not exist"),
        (["--remote_rm_url", "http://127.0.0.1:9/get_reward"], "the reward server does not answer: http://127.0.0.1:9"),
        (["--remote_rm_url", "math", "--reward_weights", "one"], "--reward_weights is one; it must be"),
        (["--reward_weights", "1"], "1 weights for 0 rewards: none"),
    ],
)
def test_generate_bad_input_is_refused_before_the_engine_starts(prompts, tmp_path, capsys, monkeypatch, more, says):
    monkeypatch.setattr(
        "rlhf_rollout.engines.process.build_engine", lambda *arguments: pytest.fail("the engine was built")
    )
    assert generate(prompts, tmp_path / "out.jsonl", *more) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_generate_model_without_tokenizer_is_refused(prompts, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    assert generate(prompts, tmp_path / "out.jsonl", "--pretrain", str(tmp_path / "model")) == 2
    assert f"{tmp_path / 'model'} has no tokenizer that makes tokens of text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "generate --prompt_data {prompts} --input_key q --output_path {out} --pretrain {none}",
        "generate --prompt_data {prompts} --output_path {out} --engine fake --reward_pretrain {none}",
        "score --dataset {prompts} --output_path {out} --reward_pretrain {none}",
        "serve_rm --reward_pretrain {none}",
        "chat --pretrain {none}",
        "chat --engine transformers --pretrain {none} --tokenizer owner/name",
    ],
)
def test_model_folder_that_does_not_exist_is_refused(prompts, tmp_path, capsys, arguments):
    names = {"prompts": prompts, "out": tmp_path / "out.jsonl", "none": tmp_path / "none"}
    assert main(arguments.format(**names).split()) == 2
    told = capsys.readouterr().err
    assert f"there is no model folder {names['none']}\n\nhint: give an existing folder" in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["generat"],
            "unknown command `generat`; known: bench, chat, generate, score, serve, serve_rm\n\n"
            "hint: did you mean `generate`",
        ),
        (["generate", "--output_path", "x"], "--prompt_data is missing: it names the prompts"),
        (["generate", "--prompt_data", "x"], "--output_path is missing: the rows must be written somewhere"),
        (["score", "--output_path", "x"], "--dataset is missing: it names the answers to score"),
        (["score", "--dataset", "x"], "--output_path is missing"),
        (["score", "--dataset", "x", "--output_path", "y"], "--remote_rm_url is missing: nothing says how"),
        (["serve_rm"], "--remote_rm_url is missing: nothing says how"),
        (["serve_rm", "--port", "65536"], "--port is 65536; it must be at most 65535"),
        (["chat"], "--pretrain is missing: engine vllm needs a model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_command_that_lacks_something_is_refused(capsys, words, says):
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_main_without_a_command_lists_the_commands(capsys):
    assert main([]) == main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert listed.count("usage: rlhf-rollout COMMAND") == 2
    assert all(f"  {name} " in listed for name in ("generate", "score", "serve", "serve_rm", "bench", "chat"))


@pytest.mark.parametrize(
    ("more", "notice"),
    [
        (["--min_reward", "1"], "--min_reward has no effect: nothing scores the responses"),
        (["--reward_timeout_s", "1"], "--reward_timeout_s has no effect: nothing scores the responses"),
        ([*_MATH, "--min_reward", "1"], "--min_reward has no effect: --post_processor is rollouts"),
        (
            [*_MATH, "--reward_batch_size", "1"],
            "--reward_batch_size has no effect: no own function, server or model scores",
        ),
        ([*_MATH, "--normalize_reward"], "--normalize_reward has no effect: there is no --reward_pretrain"),
        (["--reward_template", "{input}"], "--reward_template has no effect: --post_processor is rollouts"),
        (["--vllm_quantization", "fp8"], "--vllm_quantization has no effect: --engine is fake"),
        (["--vllm_speculative", "ngram"], "--vllm_speculative has no effect: --engine is fake"),
        (["--enforce_eager"], "--enforce_eager has no effect: --engine is fake"),
        (["--enable_prefix_caching", "false"], "--enable_prefix_caching has no effect: --engine is fake"),
        (["--base_url", "http://x"], "--base_url has no effect: --engine is fake"),
        (["--bf16"], "--bf16 has no effect: --engine is fake"),
    ],
    ids=" ".join,
)
def test_generate_option_without_effect_is_a_notice(prompts, tmp_path, capsys, more, notice):
    assert generate(prompts, tmp_path / "out.jsonl", *more, "--dry_run") == 0
    told = capsys.readouterr().err
    assert told == f"notice: {notice}\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--reward_pretrain m", "the reward model, m: a score of at least 1 (--success_threshold) counts as right"),
        ("--reward_pretrain m --success_threshold 0.5", "the reward model, m: a score of at least 0.5 (--success_th"),
        ("--reward_pretrain m --remote_rm_url math", "the first of 2 rewards, math: a score of at least 1 (--suc"),
        ("--remote_rm_url math", None),
    ],
    ids=["model", "model and threshold", "two rewards", "a reward with verdicts"],
)
def test_what_counts_as_right_is_told_where_the_reward_does_not_say_it(prompts, tmp_path, capsys, flags, says):
    assert generate(prompts, tmp_path / "out.jsonl", *flags.split(), "--dry_run") == 0
    generated = capsys.readouterr().err
    assert main(["score", "--dataset", "d", "--output_path", "o", *flags.split(), "--dry_run"]) == 0
    for told in (generated, capsys.readouterr().err):
        assert told.count("verdicts follow") == (says is not None)
        assert f"notice: verdicts follow {says or ''}" in told or says is None


@pytest.mark.parametrize(
    "reward", ["math", "rlhf_rollout.rewards.math", "rlhf_rollout.rewards.math:reward_func", "code"]
)
def test_rewards_that_compare_with_a_label_need_its_key(prompts, tmp_path, capsys, reward):
    score = ["score", "--dataset", str(prompts), "--output_path", str(tmp_path / "out.jsonl"), "--output_key", "q"]
    score += ["--input_key", "q"]
    flags = ["--remote_rm_url", f"format:think,{reward}"]
    for words in (generate_words(prompts, tmp_path / "out.jsonl", "--input_key", "q", *flags), [*score, *flags]):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert f"--label_key is missing: the reward {reward} compares" in told
        assert "hint: add --label_key KEY" in told
        assert main([*words, "--label_key", "a", "--dry_run"]) == 0
        assert "missing" not in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_score_keys_that_its_rows_do_not_have_are_a_notice(capsys):
    words = ["score", "--dataset", "d", "--output_path", "o", *_MATH, "--dry_run"]
    assert main([*words, "--prompt_key", "p"]) == 0
    assert "--prompt_key has no effect: without --chosen_key a row holds one answer" in capsys.readouterr().err
    assert main([*words, "--chosen_key", "c", "--output_key", "a"]) == 0
    assert "--output_key has no effect: --chosen_key says that rows are pairs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        ("--engine transformers --pretrain MODEL", 2),
        ("--engine fake --pretrain MODEL", 0),  # loads no model
        ("--engine fake --reward_pretrain MODEL", 2),
    ],
)
def test_dry_run_refuses_a_model_whose_code_may_not_run(prompts, tmp_path, capsys, flags, status):
    from own_code_testing import own_code_model_dir

    model = str(own_code_model_dir(tmp_path / "mine", tmp_path / "was-run"))
    words = [model if word == "MODEL" else word for word in flags.split()]
    assert generate(prompts, tmp_path / "out.jsonl", *words, "--dry_run") == status
    assert ("Python code of its own" in capsys.readouterr().err) == (status == 2)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("generate --prompt_data absent.jsonl --input_key q", "absent.jsonl"),
        ("generate --prompt_data FILE --input_key absent", "absent"),
        ("generate --prompt_data FILE --input_key q --label_key absent", "absent"),
        ("bench --prompt_data absent.jsonl --input_key q", "absent.jsonl"),
        ("bench --prompt_data FILE --input_key absent", "absent"),
        ("score --remote_rm_url format:think --dataset absent.jsonl --input_key q --output_key q", "absent.jsonl"),
        ("score --remote_rm_url format:think --dataset FILE --input_key q --output_key absent", "absent"),
    ],
)
def test_dry_run_refuses_data_that_is_not_there_or_lacks_a_key_and_accepts_the_rest(prompts, capsys, words, problem):
    command, *flags = words.replace("FILE", str(prompts)).split()
    kind = [] if command == "score" else ["--engine", "fake"]
    out = "--out" if command == "bench" else "--output_path"
    flags += [*kind, out, str(prompts.parent / "out.jsonl"), "--dry_run"]
    assert main([command, *flags]) == 2
    assert problem in capsys.readouterr().err
    good = [str(prompts) if word == "absent.jsonl" else "q" if word == "absent" else word for word in flags]
    assert main([command, *good]) == 0


def test_dry_run_loads_no_data_from_the_hub(prompts, capsys):
    words = ["generate", "--prompt_data", f"{prompts},org/name", "--input_key", "absent", "--engine", "fake"]
    assert main([*words, "--output_path", str(prompts.parent / "out.jsonl"), "--dry_run"]) == 0
    assert "not looked at: --prompt_data org/name: a dry run does not load data" in capsys.readouterr().err


def test_dry_run_lists_what_is_missing(capsys):
    assert main(["generate", "--dry_run", "--n_samples_per_prompt", "2", "--post_processor", "rs"]) == 0
    told = capsys.readouterr()
    assert "n_samples_per_prompt = 2" in told.out
    lacks = [line for line in told.err.splitlines() if line.startswith("still missing: ")]
    assert [line.split()[2] for line in lacks] == ["--prompt_data", "--remote_rm_url", "--output_path", "--pretrain"]


def test_dry_run_prints_a_configuration_that_does_the_same_and_starts_nothing(prompts, tmp_path, capsys):
    out, file = tmp_path / "out.jsonl", tmp_path / "job.toml"
    assert generate(prompts, out, "--n_samples_per_prompt", "2", "--seed", "3", "--dry_run") == 0
    file.write_text(capsys.readouterr().out)
    assert not out.exists()
    assert main(["generate", "--config", str(file), "--seed", "4"]) == 0
    assert main(["generate", "--config", str(file), "--overwrite"]) == 0
    first = sorted(out.read_text().splitlines())
    assert generate(prompts, out, "--n_samples_per_prompt", "2", "--seed", "3", "--overwrite") == 0
    assert sorted(out.read_text().splitlines()) == first
    assert len(first) == 10


def test_engine_sampling_and_rewards_are_what_the_flags_say():
    flags = (
        "--prompt_data p --prompt_split test --prompt_data_probs 1 --max_samples 3 --input_key q --label_key a"
        " --apply_chat_template --prompt_max_len 10 --skip_bad_rows --generate_max_len 20 --temperature 0.5 --top_p 0.5"
        " --top_k 4 --n_samples_per_prompt 2 --seed 7 --pretrain m --tokenizer t --bf16 --vllm_max_num_seqs 5"
        " --vllm_gpu_memory_utilization 0.5 --vllm_tensor_parallel_size 2 --enforce_eager --enable_prefix_caching false"
        " --vllm_quantization fp8 --min_p 0.1 --repetition_penalty 1.1 --stop A B"
        " --remote_rm_url f.py --reward_pretrain rm --reward_weights 1,2 --reward_timeout_s 3 --reward_num_workers 4"
        " --reward_start_timeout_s 7 --reward_memory_gb 2 --reward_env A,B --failed_reward -1"
        " --reward_batch_size 6 --normalize_reward --output_path o.jsonl --overwrite --post_processor rs"
        " --min_reward 0.5 --reward_template {reward}"
    )
    config = COMMANDS["generate"].command_line("x").parse(flags.split()).config
    sampling = SamplingParams(
        num_samples=2, max_tokens=20, temperature=0.5, top_p=0.5, top_k=4, seed=7,
        min_p=0.1, repetition_penalty=1.1, stop=("A", "B"),
    )  # fmt: skip
    assert config.sampling() == sampling
    spec = EngineSpec(
        model="m", tokenizer="t", dtype="bfloat16", quantization="fp8", max_model_len=30, max_num_seqs=5,
        gpu_memory_utilization=0.5, tensor_parallel_size=2, enforce_eager=True, enable_prefix_caching=False,
    )  # fmt: skip
    engine = make_engine(config.model, config.engine, config.max_len)
    assert engine == EngineJob(kind="vllm", spec=spec, tokenizer="t")
    assert config.reward.sources() == (
        RewardSource(kind="function", targets=("f.py",), weight=1.0),
        RewardSource(kind="model", targets=("rm",), weight=2.0),
    )
    worker = WorkerOptions(start_timeout_s=7.0, memory_gb=2.0, env=("A", "B"))
    calls = CallOptions(timeout_s=3.0, num_workers=4, batch_size=6, worker=worker, failed_reward=-1.0)
    assert config.reward.calls() == calls
    assert config.output.rollouts_path == Path("o.rollouts.jsonl")


@pytest.mark.parametrize(
    ("command", "more"),
    [("generate", "--prompt_data p --output_path o"), ("bench", "--prompt_data p"), ("chat", ""), ("serve", "")],
)
def test_every_command_with_an_engine_drafts_tokens_and_says_what_that_turns_off(command, more):
    parse = COMMANDS[command].command_line("x").parse
    parsed = parse(f"--pretrain m --vllm_speculative ngram --vllm_speculative_tokens 6 {more}".split())
    spec = make_engine(parsed.config.model, parsed.config.engine, 30).spec
    assert (spec.speculative, spec.speculative_tokens, spec.draft_model) == ("ngram", 6, None)
    [notice] = parsed.notices
    assert notice.startswith("--vllm_speculative ngram: engines do without the speed-ups of single tokens, idle_slots")
    parsed = parse(f"--pretrain m --vllm_draft_model org/small {more}".split())
    assert make_engine(parsed.config.model, parsed.config.engine, 30).spec.draft_model == "org/small"
    [notice] = parsed.notices
    assert notice.startswith("--vllm_draft_model org/small: engines do without the speed-ups of single tokens")


def test_threads_of_a_command_wait_passively_on_cpus(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("KMP_BLOCKTIME", "0")
    assert main(["--help"]) == 0
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_help_brings_no_heavy_library():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import rlhf_rollout.commands.main as m\n"
        "try: m.main(['generate', '--help'])\n"
        "finally: print([name for name in ('torch', 'transformers', 'ray', 'vllm', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--remote_rm_url" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
