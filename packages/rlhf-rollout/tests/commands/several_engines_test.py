"""`generate --vllm_num_engines`: what is refused, where engines are, and that they answer every prompt once."""

import asyncio

import pytest

from record_testing import read_jsonl, write_jsonl
from rlhf_data.errors import ConfigError
from rlhf_data.options.exits import with_flags
from rlhf_rollout.commands.main import COMMANDS, main
from rlhf_rollout.commands.parts import make_engine
from rlhf_rollout.engines import process
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.mps import MpsDaemon
from rollout_testing import generate_words

MODEL = "--pretrain m --prompt_data p.jsonl --output_path o.jsonl"


def parse(words):
    return COMMANDS["generate"].command_line("x").parse(f"{MODEL} {words}".split())


@pytest.mark.parametrize(
    ("gpus", "words", "says"),
    [
        ("", "--vllm_num_engines 0", "--vllm_num_engines is 0; it must be at least 1"),
        (
            "0",
            "--engine http --base_url http://h:1 --vllm_num_engines 2",
            "--vllm_num_engines is 2, and --engine http asks one server\n\nhint: drop --vllm_num_engines",
        ),
        (
            "0,1",
            "--vllm_num_engines 3 --vllm_gpu_memory_utilization 0.7",
            "2 engines share a GPU, and --vllm_gpu_memory_utilization 0.7 is the share of each: 1.4 of its memory\n\n"
            "hint: use --vllm_gpu_memory_utilization 0.45, or fewer engines",
        ),
        (
            "0,1",
            "--vllm_num_engines 2 --vllm_tensor_parallel_size 4",
            "an engine needs 4 GPUs, and 2 are visible\n\nhint: lower --vllm_tensor_parallel_size",
        ),
        ("0,1", "--vllm_num_engines 2 --vllm_use_mps", "--vllm_use_mps is for engines that share a GPU, and none do"),
        ("", "--vllm_num_engines 2 --vllm_use_mps", "hint: use more --vllm_num_engines, or drop it"),
    ],
)
def test_several_engines_that_cannot_be_are_refused_with_a_hint(monkeypatch, gpus, words, says):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    with pytest.raises(ConfigError) as refused:
        parse(words)
    assert says in with_flags(str(refused.value))


@pytest.mark.parametrize(
    ("gpus", "words", "notices", "share"),
    [
        ("0", "", (), 0.9),
        ("0,1", "--vllm_gpu_memory_utilization 0.95", (), 0.95),
        ("0,1", "--vllm_num_engines 2", ("2 engines are on the GPUs 0, 1",), 0.9),
        ("3", "--vllm_num_engines 2", ("2 engines are on the GPUs 3, 3",), 0.45),
        ("3", "--vllm_num_engines 2 --vllm_use_mps", ("2 engines are on the GPUs 3, 3",), 0.45),
        ("3", "--vllm_num_engines 3 --vllm_gpu_memory_utilization 0.3", ("3 engines are on the GPUs 3, 3, 3",), 0.3),
    ],
)
def test_engines_on_one_gpu_divide_its_memory_and_a_notice_tells_where_they_are(
    monkeypatch, gpus, words, notices, share
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    parsed = parse(words)
    assert parsed.notices == notices
    config = parsed.config
    job = make_engine(config.model, config.engine, 100, memory_share=config.engine.memory_share)
    assert job.spec.gpu_memory_utilization == pytest.approx(share)


def test_generate_starts_them_under_mps_and_keeps_all_of_them_busy(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    events = []

    class Engine(FakeEngine):
        async def generate(self, *arguments, **options):
            events.append((self._spec.seed, "begins"))
            await asyncio.sleep(0.01)
            try:
                return await super().generate(*arguments, **options)
            finally:
                events.append((self._spec.seed, "ends"))

        async def close(self):
            events.append("closed")

    async def start(kind, spec, environ):
        events.append((environ, spec.gpu_memory_utilization))
        return Engine(spec)

    monkeypatch.setattr(process, "start_engine", start)
    monkeypatch.setattr(MpsDaemon, "start", lambda daemon: {"PIPE": "there"})
    monkeypatch.setattr(MpsDaemon, "stop", lambda daemon: events.append("stopped"))
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"input": f"{n}+1="} for n in range(12)])
    out = tmp_path / "out.jsonl"
    more = ["--vllm_num_engines", "2", "--vllm_use_mps", "--vllm_max_num_seqs", "2"]
    assert main(generate_words(prompts, out, *more)) == 0
    assert events[:2] == [({"CUDA_VISIBLE_DEVICES": "0", "PIPE": "there"}, 0.45)] * 2
    assert events[-3:] == ["closed", "closed", "stopped"]
    # Twice what the two engines decode at once is in flight before any of it has ended.
    assert [event[1] for event in events[2:11]] == ["begins"] * 8 + ["ends"]
    assert len({record["prompt_id"] for record in read_jsonl(out)}) == 12
