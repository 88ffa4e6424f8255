"""An online run from start to final model: starts its processes, assembles its parts, trains, and saves."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from rlhf_data.errors import RewardError
from rlhf_rollout.protocols import RewardFunction, RolloutEngine
from rlhf_rollout.ray_actors import RayEngine
from rlhf_train.online.cluster import placed_bundles, ray_cluster, start_processes
from rlhf_train.online.controller import Controller
from rlhf_train.online.evaluation import Evaluator
from rlhf_train.online.job import OnlineJob, RunSummary
from rlhf_train.online.learner import Learner
from rlhf_train.online.loop import train
from rlhf_train.online.patience import Patience
from rlhf_train.online.ranks import RankSet
from rlhf_train.online.report import Report
from rlhf_train.online.rewards import make_reward
from rlhf_train.online.rollouts import Rollouts
from rlhf_train.online.stream import SampleStream
from rlhf_train.online.turns import Turns
from rlhf_train.run.best_model import BestModel
from rlhf_train.run.observer import Observer
from rlhf_train.run.recorder import Recorder, check_save_path
from rlhf_train.run.timeline import Timeline


class Parts(NamedTuple):
    """The parts of a run that its end needs: to save the models, to write the summary, and to close."""

    controller: Controller
    rollouts: Rollouts
    learner: Learner
    turns: Turns
    report: Report
    timeline: Timeline


def run_online(job: OnlineJob, observer: Observer) -> RunSummary:
    """Run `job` from start to final model.

    Raises:
        ConfigError: the job cannot run as configured.
        EngineError, RewardError, WeightSyncError: a part failed and retries did not help. On a RewardError the models
            are saved before it is raised.
    """
    timeline = Timeline(on_phase=observer.phase)
    check_save_path(job.save_path)
    with ExitStack() as stack:
        observer.starting("Ray")
        stack.enter_context(ray_cluster(job.plan, job.ray_address))
        reserved = stack.enter_context(placed_bundles(job.plan))
        observer.starting("engines and trainers")
        processes = start_processes(job, reserved)
        recorder = stack.enter_context(Recorder(job.save_path, job.config, job.trackers, observer))
        reward = make_reward(job, processes.scorers, recorder.folder / "reward.log")
        engines = [RayEngine(handle, job.engine) for handle in processes.engines]
        parts = assemble(job, engines, processes.workers, reward, recorder, observer, timeline)
        stack.callback(parts.rollouts.close)
        return train_and_save(job, parts, recorder)


def assemble(
    job: OnlineJob,
    engines: Sequence[RolloutEngine],
    rank_sets: Sequence[RankSet],
    reward: RewardFunction,
    recorder: Recorder,
    observer: Observer,
    timeline: Timeline,
) -> Parts:
    """Construct the parts of a run.

    Args:
        job: the run.
        engines: the generation engines, in the order of the plan.
        rank_sets: the training processes.
        reward: scores the rollouts.
        recorder: writes the run's folder.
        observer: shows the run on the terminal.
        timeline: made at the start of the run.
    """
    stream = SampleStream(job.batch.rollout_batch_size)
    rollouts = Rollouts(job, engines, reward, stream, timeline, observer)
    learner = Learner(job, rank_sets)
    turns = Turns(
        rollouts,
        learner,
        timeline,
        engines_sleep=job.engine.enable_sleep,
        trainers_sleep=job.trainer_sleep,
        engines_asleep=job.engine.enable_sleep and job.plan.shares_gpus,
    )
    report = Report(recorder, observer, timeline)
    best = BestModel(job.best_metric, recorder.path("best model")) if job.best_metric else None
    controller = Controller(
        job,
        rollouts=rollouts,
        stream=stream,
        learner=learner,
        turns=turns,
        evaluator=Evaluator(job, rollouts, learner, turns, report, timeline, best),
        patience=Patience(job.batch.rollout_batch_size, observer),
        report=report,
        timeline=timeline,
    )
    return Parts(controller, rollouts, learner, turns, report, timeline)


def train_and_save(job: OnlineJob, parts: Parts, recorder: Recorder) -> RunSummary:
    """Run all steps, save the models, and return the final metrics and the paths of all artifacts."""
    try:
        train(parts.controller)
    except RewardError:
        # A broken reward leaves the trainers intact, so the progress so far can be saved.
        save_models(job, parts, recorder)
        raise
    save_models(job, parts, recorder)
    parts.report.add_final({"memory/trainer_peak_bytes": float(parts.learner.peak_memory_bytes())})
    return parts.report.finish(job.num_steps)


def save_models(job: OnlineJob, parts: Parts, recorder: Recorder) -> None:
    """Save the actor and, if the job asks for them, its moving average and the critic."""
    parts.turns.give_to_trainers()
    with parts.timeline.phase("save"):
        parts.learner.save("actor", str(recorder.path("final model")))
        if job.ema_beta is not None:
            parts.learner.save_average(str(recorder.path("averaged model")))
        if job.save_critic:
            parts.learner.save("critic", str(recorder.path("critic")))
