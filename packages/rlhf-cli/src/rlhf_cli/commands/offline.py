"""The code that `sft`, `rm`, `dpo`, `kto`, `prm` and `kd` share: from flags to a run on fixed examples.

Under torchrun or deepspeed every process runs this code. Each of them checks and tokenizes the same data; only rank 0
prints and writes files.
"""

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_cli.commands.objectives import encoder_of, objective_of
from rlhf_cli.config.checkpoint import CheckpointSection, resumed_config
from rlhf_cli.config.offline import OfflineConfig
from rlhf_cli.config.paths import LOG_FILE, model_path, source_names, user_path, with_full_paths
from rlhf_cli.console.capture import captured
from rlhf_cli.console.exits import SUCCESS, exit_status
from rlhf_cli.console.secrets import restart_without_key
from rlhf_cli.doctor.environment import keep_environment
from rlhf_cli.openrlhf.differences import offline_differences
from rlhf_cli.openrlhf.flags import adapt, flags_of
from rlhf_cli.preflight.devices import on_cpu
from rlhf_cli.preflight.launcher import Launch, launch
from rlhf_cli.preflight.resume import (
    changed_options,
    check_can_continue,
    check_run_folders,
    keep_clock,
    nothing_is_left,
    run_folder,
    saying_how_to_resume,
    steps_of_ended_run,
    to_store,
)
from rlhf_data.errors import ConfigError, unknown
from rlhf_data.options.command_line import CommandLine, Parsed, to_toml
from rlhf_data.options.declare import matching
from rlhf_data.pretrained import set_chat_template
from rlhf_rollout.host import collection_paused, local_gpus

if TYPE_CHECKING:
    from rlhf_cli.console.views import Console
    from rlhf_data.examples.load import ExampleSet
    from rlhf_data.images.reader import ImageReader
    from rlhf_data.rows.sources import Rows
    from rlhf_train.offline.job import OfflineJob
    from rlhf_train.specs import ModelSpec

# By kind of model, the function that loads the final model, for the last line of the output.
_LOADERS = {
    "actor": "AutoModelForCausalLM.from_pretrained",
    "images actor": "AutoModelForImageTextToText.from_pretrained",
    "reward": "AutoModelForSequenceClassification.from_pretrained",
    "images reward": "AutoModel.from_pretrained",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that trains on fixed examples.

    Attributes:
        name: its name, as in `rlhf NAME`.
        description: the first paragraph of --help.
        config: the class of its configuration.
        kind: of its examples; see `make_encoder`.
        prefix: prefix of the objective's metrics.
        metrics: names of these metrics, without the prefix; the first few are shown during a run.
    """

    name: str
    description: str
    config: type[OfflineConfig]
    kind: str
    prefix: str
    metrics: tuple[str, ...]

    @property
    def command_line(self) -> CommandLine[OfflineConfig]:
        """Its command line."""
        return CommandLine(
            config=self.config,
            prog=f"rlhf {self.name}",
            description=self.description,
            resolve=user_path,
            recipe=resumed_config,
            foreign=flags_of(self.name),
            adapt=adapt,
            compare=offline_differences,
        )

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Run the command; return its exit status."""
        return exit_status(self._run_with_others, argv)

    def _run_with_others(self, argv: Sequence[str]) -> int:
        """Run the command. If it fails, tell the processes on other nodes, which would wait for this one."""
        from rlhf_train.offline.meeting import failing_together

        with failing_together():
            return self._run(argv)

    def _run(self, argv: Sequence[str]) -> int:
        parsed = self.command_line.parse(argv)
        if not parsed.dry_run:  # a dry run starts nothing that could record the command line
            restart_without_key()
        best = parsed.config.evaluation.best_metric_key
        known = [f"eval/{name}" for name in self.metrics]
        if best is not None and best not in known:
            raise ConfigError(f"--best_metric_key: {unknown('metric', best, known)}")
        saving = parsed.config.checkpoint
        folder = run_folder(saving, parsed.config.output.save_path, self.name)

        # Only rank 0 checks the folder: it may have written to it already when a slower process gets here.
        is_first = launch().rank == 0
        if is_first:
            check_run_folders(saving, folder)
            check_can_continue(saving, folder)

        from rlhf_cli.console.views import Console

        with nullcontext((None, None)) if parsed.dry_run else captured(folder) as (out, err):
            console = Console(out, err)
            notice = console.notice if is_first else lambda text: None
            if is_first and not parsed.dry_run:
                keep_environment()
            try:
                with saying_how_to_resume(self.name, saving, folder, notice):
                    self._carry_out(parsed, folder, console, is_first)
            finally:
                console.done()
        return SUCCESS

    def _carry_out(self, parsed: Parsed[OfflineConfig], folder: Path, console: "Console", is_first: bool) -> None:
        if is_first:
            console.notices(parsed.notices)
        if parsed.dry_run:
            self._show(parsed, folder, console)
            return
        changes: list[str] = []
        if is_first:
            if not local_gpus():
                console.notices(on_cpu(parsed.given))
            if parsed.config.checkpoint.continues:
                changes = changed_options(to_store(parsed.config), folder)
            console.log(f"results will be in {folder}, messages of libraries in {LOG_FILE} there")
            console.working("checking model and data")
        job, _ = _prepare(self, parsed.config, folder, console)

        from rlhf_train.engine.process_group import leave_process_group
        from rlhf_train.offline.job import join_ranks
        from rlhf_train.offline.meeting import meet

        if job.num_ranks > 1:  # before rank 0 writes anything but the log
            meet()
            join_ranks(job)
        done = _updates_of_ended_run(parsed.config.checkpoint, job)
        if done is not None and done >= job.num_updates:
            if is_first:
                console.result(nothing_is_left(folder, f"{done} update(s)", "--max_epochs"))
            leave_process_group()
            return
        console.notices(changes)
        _train(self, parsed, job, console)

    def _show(self, parsed: Parsed[OfflineConfig], folder: Path, console: "Console") -> None:
        """Show what a run would do. Models and data are checked if they are on this machine."""
        from rlhf_cli.preflight.here import absent_offline, show_lacks

        config = parsed.config
        absent, has_data = absent_offline(config)
        if absent or parsed.missing:
            if has_data:
                _open(config)
            arithmetic = _arithmetic(config, None)
        else:
            job, _ = _prepare(self, config, folder, console)
            arithmetic = _arithmetic(config, job)
        console.result(to_toml(with_full_paths(config)))
        console.result(arithmetic)
        console.result(f"results will be in {folder}")
        show_lacks(console, parsed, absent)


@collection_paused()
def _prepare(command: Command, config: OfflineConfig, folder: Path, console: "Console") -> tuple["OfflineJob", Any]:
    """Check models and data without loading a model; return the job and the tokenizer."""
    assert config.model.pretrain
    process = launch()
    training = config.training
    config.planned_model.check_ranks(process.num_ranks, "torchrun --nproc_per_node {} -m ...")
    _take_own_gpu(process)
    # Open the data before importing torch, so that a wrong path or key is reported within a second.
    sources = _open(config)

    import torch

    from rlhf_cli.preflight.models import check_context, check_trained, load_model_files
    from rlhf_data.images.reader import load_image_reader
    from rlhf_data.keys import unread_tools
    from rlhf_data.prompts import check_has_images
    from rlhf_models.loading import check_tokenizer_fits
    from rlhf_rollout.host import free_port
    from rlhf_train.offline.epochs import OfflineSchedule
    from rlhf_train.offline.job import OfflineJob

    if process.rank == 0 and hasattr(config.data, "tools_key"):
        console.notices(unread_tools(sources.values(), config.data))
    path = model_path(config.model.pretrain)
    model = config.model
    model_config, tokenizer = load_model_files(path, images=bool(config.images), packing=config.model.packing_samples)
    reader = load_image_reader(path, model_config, tokenizer) if config.images else None
    saved = _set_templates(config, tokenizer)
    clock = keep_clock(tokenizer, config.checkpoint, folder)
    checkpoints = with_full_paths(config).checkpoint.spec()
    objective = objective_of(config, tokenizer, reader)
    # All models are checked before the data is tokenized, which may take minutes.
    check_trained(model, model_config, path, has_values=objective.model_kind == "reward")
    check_context(model_config, config.data.max_len, "--max_len")
    reference = _reference(config, tokenizer, reader)
    encoder = encoder_of(command.kind, config, tokenizer, reader)
    num_ids = check_tokenizer_fits(model_config, tokenizer)
    loaded = {
        flag: _load(config, flag, rows, encoder, num_ids, console, process.rank) for flag, rows in sources.items()
    }
    train = loaded["--dataset"].examples
    if config.images:
        check_has_images(train, "--dataset", config.data.image_key)
    for held in loaded.values():
        objective.items(held.examples[:2])  # refuses, before the run, examples that are too few
    schedule = OfflineSchedule(**matching(OfflineSchedule, training))
    best = config.evaluation.best_metric_key
    optimizer = training.optimizer(training.learning_rate, schedule.num_updates(len(train)))
    job = OfflineJob(
        objective=objective,
        model=replace(
            model.spec(path, training.sharding, optimizer),
            max_length=config.data.max_len,
            images=config.images,
            **saved,
        ),
        reference=reference if objective.needs_reference or objective.needs_teacher else None,
        precompute_reference=objective.needs_reference and getattr(model, "precompute_reference", False),
        examples=train,
        examples_digest=loaded["--dataset"].counts.digest,
        eval_examples=loaded["--eval_dataset"].examples if "--eval_dataset" in loaded else (),
        eval_steps=config.evaluation.eval_steps if config.evaluation.eval_steps > 0 and len(loaded) > 1 else None,
        best_metric=best and best.removeprefix("eval/"),
        schedule=schedule,
        model_path=folder / "model",
        best_path=folder / "best_model" if best else None,
        checkpoints=replace(checkpoints, resume=config.checkpoint.continues, template_clock=clock),
        rank=process.rank,
        num_ranks=process.num_ranks,
        master=process.master or ("127.0.0.1", free_port()),
        device="cuda" if torch.cuda.is_available() else "cpu",
        timeline=config.output.timeline,
    )
    return job, tokenizer


def _set_templates(config: OfflineConfig, tokenizer: Any) -> dict[str, str]:
    """Give the tokenizer the chat template of the options, and its variables. Return what the trained model saves."""
    template = getattr(config.data, "tokenizer_chat_template", None)
    set_chat_template(tokenizer, template, user_path)
    saved = {} if template is None else {"chat_template": tokenizer.chat_template}
    # The template that is saved does not have the values of its variables.
    set_chat_template(tokenizer, variables=getattr(config.data, "chat_template_kwargs", None))
    return saved


def _updates_of_ended_run(section: CheckpointSection, job: "OfflineJob") -> int | None:
    """Return how many updates the run to continue has done, if it has ended; None if it has not, or had other examples
    in its updates. All ranks get the answer of rank 0, because other nodes may not see the run's folder. Collective."""
    if not section.continues:
        return None
    folder = job.model_path.parent
    done = steps_of_ended_run(section, folder) if job.rank == 0 else None
    if done is not None and not job.has_order_of(job.checkpoints.home(folder) / f"step-{done}"):
        done = None
    if job.num_ranks == 1:
        return done

    from rlhf_train.offline.collectives import of_all_ranks

    return of_all_ranks(done)[0]


def _open(config: OfflineConfig) -> dict[str, "Rows"]:
    """Return the rows by flag: those of --dataset, and of --eval_dataset if it is given.

    Raises:
        DataError: the first row of a source lacks a key.
    """
    from rlhf_data.keys import check_section_keys
    from rlhf_data.rows.sources import open_sources, parse_probs

    data = config.data
    assert data.dataset
    common = {"max_samples": data.max_samples, "streaming": data.streaming, "preset": data.preset_data}
    probs = parse_probs("dataset_probs", data.dataset_probs)
    train = open_sources(
        source_names(data.dataset), probs=probs, seed=config.training.seed, split=data.dataset_split, **common
    )
    sources = {"--dataset": train}
    if data.eval_dataset is not None:
        names = source_names(data.eval_dataset, held_out=True)
        sources["--eval_dataset"] = open_sources(names, split=data.eval_split, **common)
    # A row may lack the margin, which is only read with --margin_loss.
    optional = ("margin_key", "image_key")  # images may be in messages
    keys = [name for name in type(data).model_fields if name.endswith("_key") and name not in optional]
    for rows in sources.values():
        check_section_keys(data, rows, keys)
    return sources


def _load(
    config: OfflineConfig, flag: str, rows: "Rows", encoder: Any, num_ids: int | None, console: "Console", rank: int
) -> "ExampleSet[Any]":
    """Tokenize the rows of a flag; rank 0 shows progress and reports rows that were left out. See `load_examples`."""
    from rlhf_data.examples.load import load_examples

    data = config.data
    # Progress is for terminals: in a log file, its many lines would hide everything else.
    shows = rank == 0 and console.is_terminal
    examples = load_examples(
        rows,
        encoder,
        max_len=data.max_len,
        num_ids=num_ids,
        skip_bad_rows=data.skip_bad_rows,
        num_workers=data.data_num_workers,
        progress=lambda num_rows: console.working(f"{flag}: tokenizing, {num_rows} rows") if shows else None,
        cache_dir=None if data.data_cache is None else user_path(data.data_cache),
    )
    console.done()
    if (examples.counts.num_too_long or examples.counts.num_bad) and rank == 0:
        console.notice(f"{flag}: {examples.summary}")
    verdict = getattr(examples.examples[0], "is_desirable", None)
    if rank == 0 and verdict is not None and all(item.is_desirable == verdict for item in examples.examples):
        kind = "desirable" if verdict else "undesirable"
        console.notice(
            f"{flag}: all {len(examples.examples)} answers are {kind}; KTO learns from both kinds (--label_key)"
        )
    return examples


def _reference(config: OfflineConfig, tokenizer: Any, reader: "ImageReader | None") -> "ModelSpec | None":
    """Return the model of --ref_pretrain or --teacher_model, or None.

    Raises ConfigError if its tokenizer differs, or it reads images in another way than `reader` does.
    """
    from rlhf_cli.preflight.models import check_companion

    for flag in ("ref_pretrain", "teacher_model"):
        if (name := getattr(config.model, flag, None)) is not None:
            path = model_path(name)
            check_companion(flag, config.model, path, tokenizer, reader)
            spec = config.model.spec(path, config.training.sharding)
            return replace(spec, max_length=config.data.max_len, images=config.images)
    return None


def _train(command: Command, parsed: Parsed[Any], job: "OfflineJob", console: "Console") -> None:
    """Run the job. Rank 0 records and shows it; the other ranks only take part in training."""
    from rlhf_cli.console.results import show_results
    from rlhf_cli.console.views import OfflineView
    from rlhf_rollout.engines.adapter_files import ADAPTER_FOLDER
    from rlhf_train.engine.process_group import leave_process_group
    from rlhf_train.offline.job import run_offline
    from rlhf_train.run.checkpointing import find_checkpoint, resumed_step
    from rlhf_train.run.observer import Observer
    from rlhf_train.run.recorder import ARTIFACTS, Recorder
    from rlhf_train.run.trackers.start import check_trackers

    started = time.perf_counter()
    folder = job.model_path.parent
    config = to_store(parsed.config)
    output = config.output
    trackers = output.trackers(command.name, folder.name)
    if job.rank > 0:
        run_offline(job, Observer())
        leave_process_group()
        return
    check_trackers(trackers)
    view = OfflineView(console, command.prefix, command.metrics, logging_steps=output.logging_steps)
    checkpoint = find_checkpoint(job.checkpoints, folder, view)
    kept = resumed_step(job.checkpoints, checkpoint)
    with Recorder(str(folder), to_toml(config, parsed.origins), trackers, view, kept) as recorder:
        final = run_offline(job, view, recorder, checkpoint)
        summary = {"time/total": time.perf_counter() - started}
        recorder.metrics(max(job.num_updates, kept or 0), summary)  # a run that was made shorter may have done more
    leave_process_group()
    final |= summary
    known = {**ARTIFACTS, "adapter": f"{ARTIFACTS['final model']}/{ADAPTER_FOLDER}"}
    artifacts = {name: path for name, path in known.items() if (folder / path).exists()}
    show_results(
        console,
        str(folder),
        artifacts,
        final,
        loader=_LOADERS[("images " if job.model.images else "") + job.objective.model_kind],
    )


def _arithmetic(config: OfflineConfig, job: "OfflineJob | None") -> str:
    """Return the arithmetic of a run for people: examples, epochs, updates and learning rate. Without a job, the number
    of examples is not known."""
    training = config.training
    count = "examples" if job is None else f"{len(job.examples)} examples"
    num_updates = "updates" if job is None else f"{job.schedule.num_updates(len(job.examples))} updates"
    text = (
        f"{count} x {training.max_epochs} epochs = {num_updates} of {training.train_batch_size} on"
        f" {launch().num_ranks} process(es)"
    )
    rate = f"learning rate {training.learning_rate:g}"
    if job is None:
        return f"{text}; {rate}"
    per_pass = f"{training.micro_train_batch_size} per pass"
    if training.micro_batch_tokens is not None:
        per_pass = f"at most {training.micro_batch_tokens} tokens per pass"
    return f"{text}, {per_pass}; {rate}, warm-up {job.model.optimizer.warmup_steps} updates"


def _take_own_gpu(process: Launch) -> None:
    """If a launcher started several processes, make only its own GPU visible to this one.

    This must happen before torch initializes CUDA, which reads CUDA_VISIBLE_DEVICES once.
    """
    if process.local_rank is None:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[process.local_rank] if visible else str(process.local_rank)
