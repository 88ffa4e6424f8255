"""`sft`: teach a model the completions of demonstrations."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_cli.config.command_line import Parsed, parse, to_toml
from rlhf_cli.config.sft import SftConfig
from rlhf_cli.exits import SUCCESS, exit_status
from rlhf_cli.paths import check_output_folder, data_path, model_path, output_folder, user_path, with_full_paths

if TYPE_CHECKING:
    from rlhf_cli.console import Console
    from rlhf_train.offline.job import OfflineJob

DESCRIPTION = """Supervised fine-tuning: read prompts with completions, train the model on the completions, and write a
Hugging Face model folder. One process; under torchrun, one process a GPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return exit_status(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parsed = parse(SftConfig, argv, prog="rlhf sft", description=DESCRIPTION, resolve=user_path)
    folder = output_folder(parsed.config.output.save_path, "sft")
    check_output_folder(folder)

    from rlhf_cli.console import Console

    console = Console()
    for notice in parsed.notices:
        console.notice(notice)
    job = _prepare(parsed, folder, console)
    if parsed.dry_run:
        console.result(to_toml(with_full_paths(parsed.config)))
        console.result(_arithmetic(job))
        return SUCCESS
    _train(parsed, job, folder, console)
    return SUCCESS


def _prepare(parsed: Parsed[SftConfig], folder: Path, console: "Console") -> "OfflineJob":
    """Check model and data, and return what to run. No model is loaded."""
    config = parsed.config
    assert config.model.pretrain and config.data.dataset
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    _take_own_gpu(num_ranks)
    data = config.data
    options = {
        "input_key": data.input_key,
        "output_key": data.output_key,
        "apply_chat_template": data.apply_chat_template,
        "input_template": data.input_template,
    }
    from rlhf_data.sources import open_sources, read_rows

    for path in (data.dataset, data.eval_dataset):
        if path is not None:
            read_rows(data_path(path), max_rows=1)

    import torch

    from rlhf_cli.preflight import check_attention, check_context, load_model_files
    from rlhf_data.examples import load_examples
    from rlhf_data.sft import SftEncoder
    from rlhf_train.offline.job import OfflineJob
    from rlhf_train.offline.loop import OfflineSchedule
    from rlhf_train.offline.supervised import SupervisedObjective
    from rlhf_train.specs import ModelSpec

    path = model_path(config.model.pretrain)
    model_config, tokenizer = load_model_files(path)
    check_attention(config.model, model_config)
    check_context(model_config, data.max_len, "--max_len")
    encoder = SftEncoder(tokenizer=tokenizer, **options)
    loaded = [
        None
        if file is None
        else load_examples(open_sources(data_path(file), max_samples=data.max_samples), encoder, max_len=data.max_len)
        for file in (data.dataset, data.eval_dataset)
    ]
    for name, examples in zip(("--dataset", "--eval_dataset"), loaded, strict=True):
        if examples is not None and (examples.counts.num_too_long or examples.counts.num_bad) and rank == 0:
            console.notice(f"{name}: {examples.summary}")
    train, held_out = (() if examples is None else examples.examples for examples in loaded)
    training = config.training
    schedule = OfflineSchedule(
        train_batch_size=training.train_batch_size,
        micro_train_batch_size=training.micro_train_batch_size,
        max_epochs=training.max_epochs,
        seed=training.seed,
    )
    return OfflineJob(
        objective=SupervisedObjective(),
        model=ModelSpec(
            path=path,
            dtype="bfloat16" if config.model.bf16 else "float32",
            attn_implementation=config.model.attn_implementation,
            gradient_checkpointing=config.model.gradient_checkpointing,
            packing=config.model.packing_samples,
            zero_stage=training.zero_stage,
            optimizer=training.optimizer(training.learning_rate, schedule.num_steps(len(train))),
        ),
        examples=train,
        eval_examples=held_out,
        schedule=schedule,
        model_path=folder / "model",
        rank=rank,
        num_ranks=num_ranks,
        master=_master(num_ranks),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )


def _train(parsed: Parsed[SftConfig], job: "OfflineJob", folder: Path, console: "Console") -> None:
    import time

    from rlhf_cli.console import SFT_COLUMNS, StepTable, show_results
    from rlhf_train.offline.job import run_offline
    from rlhf_train.online.recorder import ARTIFACTS, Recorder

    started = time.perf_counter()
    recorder = Recorder(str(folder), to_toml(with_full_paths(parsed.config))) if job.rank == 0 else None
    final: dict[str, float] = {}

    class View:
        """Shows the run and keeps its numbers."""

        def __init__(self) -> None:
            self.table = StepTable(console, SFT_COLUMNS, min_interval_s=1.0)

        def step(self, step: int, num_steps: int, metrics: dict[str, float]) -> None:
            console.done()
            self.table.step(step, num_steps, metrics)
            recorder.metrics(step, metrics)

        def evaluation(self, step: int, metrics: dict[str, float]) -> None:
            console.done()
            console.result(f"held-out loss after step {step}: {metrics['eval/loss']:.4f}", "bold")
            recorder.metrics(step, metrics)
            final["eval/loss_after" if step else "eval/loss_before"] = metrics["eval/loss"]

    try:
        if recorder is not None:
            console.working("loading the model")
        run_offline(job, View())
    finally:
        console.done()
        if recorder is not None:
            recorder.close()
    if recorder is not None:
        final["time/total"] = time.perf_counter() - started
        artifacts = {name: path for name, path in ARTIFACTS.items() if (folder / path).exists()}
        show_results(console, str(folder), artifacts, final)


def _arithmetic(job: "OfflineJob") -> str:
    schedule, count = job.schedule, len(job.examples)
    return (
        f"{count} examples x {schedule.max_epochs} epochs = {schedule.num_steps(count)} optimizer steps of"
        f" {schedule.train_batch_size} on {job.num_ranks} process(es), {schedule.micro_train_batch_size} a pass;"
        f" learning rate {job.model.optimizer.learning_rate:g}, warm-up {job.model.optimizer.warmup_steps} steps"
    )


def _take_own_gpu(num_ranks: int) -> None:
    """Under torchrun, let this process see its own GPU only; before torch is imported."""
    local_rank = os.environ.get("LOCAL_RANK")
    if num_ranks < 2 or local_rank is None:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices: list[Any] = visible.split(",") if visible else list(range(int(local_rank) + 1))
    os.environ["CUDA_VISIBLE_DEVICES"] = str(devices[int(local_rank)])


def _master(num_ranks: int) -> tuple[str, int]:
    if num_ranks > 1:
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
