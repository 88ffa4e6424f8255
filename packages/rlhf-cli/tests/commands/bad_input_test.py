"""Bad input to the commands: the exit status, the first line and the hint, and never a traceback."""

import builtins
import re

import pytest

from record_testing import write_jsonl
from rlhf_cli.main import main as rlhf
from rlhf_data.main import main as rlhf_data

REWARD = 'def reward_func(queries, prompts, labels):\n    return {"rewards": [1.0] * len(queries)}\n'
ENDED = '[model]\npretrain = "builtin"\nlora_dropout = 0.1\n[data]\ndataset = "rows.jsonl"\n'
SCORE = "score --dataset rows.jsonl --remote_rm_url reward.py --output_path"
SFT = "sft --pretrain builtin --dataset rows.jsonl"
PAIRS = "--pretrain builtin --dataset rows.jsonl"
PORT = r"error: reward server http://127\.0\.0\.1:99999/x: port 99999 is not within 1 to 65535"
URL = "give one such as http://host:5000/get_reward"
NOWHERE = "name a (folder that you may write to|file in a folder that you may write to)"
NO_TOKEN = "error: --host 0.0.0.0 lets other machines use this server, and no token is set"
DECODED = r"is '\\udcff', which is not UTF-8"

TABLE = [
    # command, first line on stderr, hint
    ("score --dataset rows.jsonl --remote_rm_url http://127.0.0.1:99999/x --output_path o.jsonl", PORT, URL),
    ("ppo --remote_rm_url http://127.0.0.1:99999/x", PORT, URL),
    ("ppo --remote_rm_url http://me:secret@host/x", "error: the reward server's URL at host holds a password", "token"),
    (f"{SCORE} /proc/out.jsonl", "error: /proc/out.jsonl.* cannot be written", NOWHERE),
    (f"{SCORE} rows.jsonl/out.jsonl", "error: .*rows.jsonl/out.jsonl.* cannot be written", NOWHERE),
    (f"{SCORE} {'x' * 251}", "error: .*/x+.* cannot be written", "give another --output_path"),
    (f"{SCORE} rows.jsonl", "error: .*rows.jsonl exists", "--overwrite"),
    ("ppo --micro_batch_tokens 99", "error: --micro_batch_tokens limits packed sequences", "add --packing_samples"),
    ("ppo --packing_samples --micro_batch_tokens 95", "error: --micro_batch_tokens is", "use --micro_batch_tokens 96"),
    ("ppo --sequence_parallel_size 2", "error: --sequence_parallel_size 2 divides packed", "add --packing_samples"),
    (
        "ppo --sequence_parallel_size 2 --packing_samples --torch_compile on",
        "error: --torch_compile on, and the layers are not compiled with --sequence_parallel_size",
        "leave --torch_compile at auto",
    ),
    (
        "ppo --sequence_parallel_size 2 --packing_samples",
        r"error: --sequence_parallel_size is 2, and a model has 1 training process\(es\)",
        "use 2 or a multiple: --actor_num_gpus_per_node 2",
    ),
    ("ppo --lora_sync adapter", "error: --lora_sync adapter sends adapters, and --lora_rank is 0", "set --lora_rank"),
    ("ppo --lora_sync adapter --lora_rank 513", "error: --lora_rank is 513; it must be at", "use --lora_sync merge"),
    ("ppo --vllm_speculative ngram --min_p 0.1", "error: --vllm_speculative ngram drafts tokens", "drop one of them"),
    ("ppo --vllm_speculative mtp", "error: .*/builtin/model has no", "draft with a smaller model of the policy's"),
    ("ppo --draft_learning_rate 1e-5", "error: --draft_learning_rate", "add --vllm_draft_model, or drop"),
    (
        "ppo --vllm_speculative ngram --lora_sync adapter --lora_rank 8",
        "error: --vllm_speculative ngram is not tested with --lora_rank",
        "drop one of them",
    ),
    (
        "ppo --lora_sync adapter --lora_rank 8 --bf16 --vllm_quantization fp8",
        "error: --lora_sync adapter is not tested with --vllm_quantization fp8",
        "use --lora_sync merge",
    ),
    (
        "ppo --lora_sync adapter --lora_rank 8 --image_key image",
        "error: --lora_sync adapter is not tested with --image_key",
        "use --lora_sync merge",
    ),
    ("ppo --load_in_4bit", "error: --load_in_4bit is for frozen weights under adapters, and --lora", "--lora_rank 16"),
    (f"{SFT} --load_in_4bit --lora_rank 2 --zero_stage 3", "error: --load_in_4bit restores weights", "--zero_stage 2"),
    ("ppo --load_in_4bit --lora_rank 2 --torch_compile on", "error: --load_in_4bit restores", "leave --torch_compile"),
    ("ppo --load_in_4bit --lora_rank 2 --image_key image", "error: --load_in_4bit restores", "drop --load_in_4bit"),
    (
        "ppo --load_in_4bit --lora_rank 2 --bf16 --vllm_quantization fp8",
        "error: --load_in_4bit is not tested with --vllm_quantization fp8",
        "drop one of them",
    ),
    ("ppo --load_in_4bit --lora_rank 2 --lora_sync adapter", "error: engines of --lora_sync", "use --lora_sync merge"),
    (
        "ppo --ds_tensor_parallel_size 2",
        r"error: --ds_tensor_parallel_size is 2, and a model has 1 training process\(es\)",
        "use 2 or a multiple: --actor_num_gpus_per_node 2",
    ),
    (
        "ppo --ds_tensor_parallel_size 2 --zero_stage 3 --colocate_all_models --actor_num_gpus_per_node 2 --dry_run",
        "error: --ds_tensor_parallel_size 2 divides the matrices of the layers over processes, and --zero_stage is 3",
        "use --zero_stage 2",
    ),
    (
        "ppo --ds_tensor_parallel_size 5 --actor_num_gpus_per_node 5 --dry_run",
        "error: --ds_tensor_parallel_size 5 must divide the model's num_attention_heads, which is",
        "use 2|drop it",
    ),
    ("ppo --expert_parallel_size 2 --dry_run", "error: --expert_parallel_size 2 divides the experts of", "drop it"),
    (f"{SFT} --adam_offload", "error: --adam_offload is for AdamW on bfloat16 weights, .*: weights are", "add --bf16"),
    (f"{SFT} --adam_offload --bf16 --optim muon", "error: --adam_offload .* the optimizer is Muon", "use --optim adam"),
    (f"{SFT} --bf16_moments --optim muon", "error: --bf16_moments is for AdamW, and the optimizer", "use --optim adam"),
    (f"{SFT} --zpg 2", "error: --zpg 2 copies the parts .*, and --zero_stage is 2", "add --zero_stage 3"),
    (
        "ppo --zpg 2 --zero_stage 3 --actor_num_gpus_per_node 3 --dry_run",
        "error: --zpg 2 must divide the number of training processes of each model, which is 3",
        "use one of 1, 3, or another number of processes",
    ),
    (
        "ppo --adam_offload --bf16 --actor_num_gpus_per_node 2 --dry_run",
        "error: --adam_offload is .*: --zero_stage is 2",
        "use --zero_stage 1",
    ),
    (
        "ppo --sequence_parallel_size 3 --packing_samples --actor_num_gpus_per_node 3 --dry_run",
        "error: sequence parallelism over 3 ranks divides attention heads, and the model has",
        "ranks",
    ),
    (
        "ppo --sequence_parallel_size 2 --packing_samples --attn_implementation sdpa --dry_run --actor_num_nodes 2",
        "error: --sequence_parallel_size works with the attention rlhf_packed, not with sdpa",
        "leave --attn_implementation at auto",
    ),
    ("ppo --share_prompts", "error: --share_prompts stores the prompts of packed samples", "add --packing_samples"),
    (
        "ppo --share_prompts --packing_samples --sequence_parallel_size 2",
        "error: --sequence_parallel_size divides sequences, and with --share_prompts sequences have parts in common",
        "drop one of them",
    ),
    ("ppo --share_prompts --packing_samples --routing_replay", "error: --routing_replay sends the", "drop one of them"),
    ("ppo --share_prompts --packing_samples --aux_loss_coef 0.1", "error: --aux_loss_coef counts", "drop one of them"),
    (
        "ppo --share_prompts --packing_samples --attn_implementation sdpa --dry_run",
        "error: prompts are shared by the attention rlhf_packed, not by sdpa",
        "leave --attn_implementation at auto",
    ),
    ("ppo --save_path /proc/run", "error: --save_path /proc/run cannot be written", NOWHERE),
    (f"rm {PAIRS} --save_path rows.jsonl", "error: --save_path .*rows.jsonl is not an empty folder", "name a new one"),
    ("lora_combiner --model_path a --lora_path b --output_path /proc/c", "error: --output_path /proc/c", NOWHERE),
    ("serve_rm --remote_rm_url reward.py --host 0.0.0.0", NO_TOKEN, "set RLHF_REMOTE_RM_TOKEN"),
    ("chat --engine fake --system \udcff", f"error: --system {DECODED}", "UTF-8"),
    ("ppo --lora_rank 2 --target_modules nowhere", "error: LoRA: Target modules {'nowhere'} not", "target_modules"),
    ("ppo --aux_loss_coef 0.1", "error: --aux_loss_coef balances experts, and a qwen2 model has none", "drop --aux"),
    ("ppo --routing_replay", "error: --routing_replay replays the choice of experts, and a", "drop --routing_replay"),
    ("sft --config deep.toml", "error: .*deep.toml is not TOML: nested too deeply", ""),
    ("ppo --config masked.toml", r"error: --remote_rm_url is http://h/x\?\*\*\*: \*\*\* stands for a", "whole URL"),
    ("ppo --remote_rm_url syntax.py", "error: reward file .*syntax.py is not Python", "`python .*syntax.py` shows"),
    ("ppo --remote_rm_url maths", "error: cannot import the reward function from maths", "the built-in reward `math`"),
    ("ppo --num_generations 8", "error: unknown flag `--num_generations`", "did you mean `--n_samples_per_prompt`"),
    ("sft --num_train_epochs 8", "error: unknown flag `--num_train_epochs`", "did you mean `--max_epochs`"),
    ("ppo --replay nowhere", "error: --replay: .*nowhere does not exist", "name the folder of a run"),
    ("sft --resume empty", "error: --resume: .*empty has no config.toml", "name the folder of a run"),
    ("sft --resume ended", "error: the run in .*ended has ended and has no checkpoint", "--config .*ended/config.toml"),
    ("ppo --resume ended", "error: `rlhf ppo` cannot take the options of .*ended:", "a run of `rlhf ppo`"),
    (f"{SFT} --apply_chat_template --dataset empty", "error: data set .*empty cannot be opened", "name .jsonl"),
    ("kto --pretrain builtin --dataset rows.jsonl --label_key output", "error: 1 of 1 rows", "repair them, or check"),
    (
        f"{SCORE} o.jsonl --output_key outptu",
        "error: --output_key: .* key `outptu`",
        "did you mean --output_key output",
    ),
    ("chat --pretrain empty", "error: .*empty has no tokenizer", "tokenizer.json"),
    ("dpo --pretrain builtin --dataset binary.jsonl", "error: ", ""),
    ("kto --pretrain builtin --dataset judged.jsonl --dry_run", "error: KTO needs at least two examples", "more rows"),
    ("sft --pretrain builtin --dataset *.jsonl", "error: data source .* is a pattern", "name its files, separated"),
    ("kto --pretrain builtin --dataset deep.jsonl", "error: ", ""),
    ("pp\x1b[2Jo", r"error: unknown command `pp\\x1b\[2Jo`", ""),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with rows, a reward and broken files."""
    write_jsonl(tmp_path / "rows.jsonl", [{"input": "one", "output": "two"}])
    write_jsonl(tmp_path / "judged.jsonl", [{"input": "one", "output": "two", "label": True}])
    (tmp_path / "reward.py").write_text(REWARD, encoding="utf-8")
    (tmp_path / "syntax.py").write_text("def reward_func(queries, prompts, labels)\n    return 1\n", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "ended/model").mkdir(parents=True)
    (tmp_path / "ended/config.toml").write_text(ENDED, encoding="utf-8")
    (tmp_path / "ended/metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    (tmp_path / "broken.toml").write_bytes(b"[reward\xff")
    (tmp_path / "masked.toml").write_text('[reward]\nremote_rm_url = "http://h/x?***"\n', encoding="utf-8")
    (tmp_path / "deep.toml").write_text(f"[training]\nseed = {'[' * 5000}", encoding="utf-8")
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "deep.jsonl").write_text("[" * 10_000, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_REMOTE_RM_TOKEN", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def run(words):
    return rlhf_data(words) if words[0] == "inspect" else rlhf(words)


@pytest.mark.parametrize(
    ("command", "first_line", "hint"), TABLE, ids=[row[0][:60].encode("ascii", "replace").decode() for row in TABLE]
)
def test_bad_input_is_refused_with_a_first_line_and_a_hint(here, capsys, command, first_line, hint):
    files = {path.name for path in here.iterdir()}
    assert run(command.split()) == 2
    said = capsys.readouterr().err
    [line] = [line for line in said.splitlines() if line.startswith("error:")]
    assert re.match(first_line, line), said
    assert "Traceback" not in said and "secret@" not in said
    assert re.search(rf"\n\nhint: .*{hint}", said) and said.count("\nhint: ") == 1, said
    assert {path.name for path in here.iterdir()} <= files


def test_line_that_is_not_utf8_typed_into_chat_is_asked_for_again(here, capsys, monkeypatch):
    typed = iter(["\ud800", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), "/exit"])

    def answer(prompt):
        line = next(typed)
        if isinstance(line, Exception):
            raise line
        return line

    monkeypatch.setattr(builtins, "input", answer)
    assert rlhf(["chat", "--engine", "fake"]) == 0
    assert capsys.readouterr().err.count("this line is not UTF-8; type it again\n") == 2
