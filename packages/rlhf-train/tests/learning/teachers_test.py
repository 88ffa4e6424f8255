"""Several teachers: which rollouts each runs on, their columns and divergences, by hand and by transformers."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from online_fakes import LocalRanks, LoggedRanks
from rlhf_data.errors import ConfigError
from rlhf_data.records import Episode, Prompt, RolloutGroup
from rlhf_models.testing import tiny_model_dir
from rlhf_train.algorithms.table import make_algorithm
from rlhf_train.algorithms.token_specs import DistributionSpec
from rlhf_train.batching import plan_batches
from rlhf_train.learning.learner import Learner
from rlhf_train.run.metrics import results
from rlhf_train.tracing.trace import WORK
from trainer_testing import exact_logprobs, lone_worker, random_rollouts, tiny_job

pytestmark = pytest.mark.usefixtures("results_stand_for_references")

TEMPERATURE = 0.7
TEACHERS = {"math": "teacher", "": "teacher 2"}
SOURCES = {"math": "math", "org/code": "org_code"}  # with their names in metrics


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    job = tiny_job(str(tiny_model_dir(folder / "model")), folder)
    models = {"actor": job.models["actor"]}
    for seed, role in enumerate(TEACHERS.values(), 1):
        path = str(tiny_model_dir(folder / role, seed=seed))
        models[role] = dataclasses.replace(job.models["reference"], path=path)
    [placed] = job.plan.trainers
    plan = dataclasses.replace(job.plan, trainers=(dataclasses.replace(placed, roles=("actor",)),))
    batch = dataclasses.replace(job.batch, micro_rollout_batch_size=3, train_batch_size=job.batch.num_rollouts)
    return dataclasses.replace(
        job,
        models=models,
        teachers=TEACHERS,
        batch=batch,
        plan=plan.joined("actor", list(TEACHERS.values())),
        algorithm=make_algorithm("reinforce", kl_coef=0.0, teacher_coef=0.5),
        sampling=dataclasses.replace(job.sampling, temperature=TEMPERATURE),
    )


def groups_of(*sources):
    """One group of four rollouts for each of these data sources."""
    rollouts = random_rollouts(4 * len(sources), vocab_size=512, seed=3)
    groups = []
    for number, source in enumerate(sources):
        group_id = f"step1/{number:05d}"
        episodes = []
        for index, rollout in enumerate(rollouts[4 * number : 4 * number + 4]):
            name = f"{group_id}/{index}"
            own = dataclasses.replace(rollout, rollout_id=name, group_id=group_id)
            episodes.append(Episode(name, group_id, (own,)))
        groups.append(RolloutGroup(group_id, Prompt(f"p{number}", np.array([1]), "p", source=source), tuple(episodes)))
    return groups


def dealt(job, worker, groups):
    """Return a learner after the step's columns are filled in, with its metrics."""
    learner = Learner(job, [LocalRanks(tuple(job.models), worker)])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if job.early_forwards:
        for group in reversed(groups):
            learner.forwards.settle(group.group_id, group)
    learner.deal(rollouts, 1, sources={group.group_id: group.prompt.source for group in groups})
    return learner, learner.fill_columns()


def distributions(job, role, rollout):
    """Return the log-probs before each token the policy wrote, [n, V] float64, and these tokens."""
    model = AutoModelForCausalLM.from_pretrained(job.models[role].path, dtype=torch.float64).eval()
    with torch.no_grad():
        return exact_logprobs(model, rollout, TEMPERATURE)


def reverse_kls(job, groups, of):
    """Return the divergences `of` policy and teacher by data source, from transformers in float64."""
    found = {source: [] for source in SOURCES}
    for group in groups:
        role = TEACHERS.get(group.prompt.source, TEACHERS[""])
        for rollout in group.rollouts:
            policy, tokens = distributions(job, "actor", rollout)
            found[group.prompt.source] += of(policy, distributions(job, role, rollout)[0], tokens).tolist()
    return found


@pytest.mark.parametrize(("is_early", "packing"), [(False, False), (False, True), (True, False)])
def test_each_teacher_runs_on_the_rollouts_of_its_sources_alone(job, is_early, packing):
    models = {role: dataclasses.replace(spec, packing=packing) for role, spec in job.models.items()}
    batch = dataclasses.replace(job.batch, micro_batch_tokens=64 if packing else None)
    job = dataclasses.replace(job, models=models, batch=batch, early_forwards=is_early)
    groups = groups_of("math", "org/code", "org/code", "math", "org/code")
    worker = lone_worker(job.models, job.algorithm, temperature=TEMPERATURE)
    WORK.take()
    learner, metrics = dealt(job, worker, groups)
    spans = WORK.take().spans
    assert "policy/entropy" in metrics
    sizes = [span.args["rollouts"] for span in spans if span.name == "forward pass"]
    assert sum(sizes) == 2 * 20  # the policy on all, and one teacher on each
    exported = worker.export_columns(["teacher_logprobs"])["teacher_logprobs"]
    for group in groups:
        role = TEACHERS.get(group.prompt.source, TEACHERS[""])
        for rollout in group.rollouts:
            logprobs, tokens = distributions(job, role, rollout)
            own = exported[rollout.rollout_id]
            expected = logprobs.gather(1, tokens[:, None])[:, 0].numpy()
            np.testing.assert_allclose(own[rollout.loss_mask], expected, atol=2e-5)
            assert not own[~rollout.loss_mask].any()
    found = learner.assign_advantages()
    of = reverse_kls(job, groups, lambda p, q, tokens: (p - q).gather(1, tokens[:, None])[:, 0])
    for source, name in SOURCES.items():
        assert found[f"kl/teacher/{name}"] == pytest.approx(np.mean(of[source]), abs=1e-5)
    assert found["kl/teacher"] == pytest.approx(np.mean([kl for own in of.values() for kl in own]), abs=1e-5)
    assert abs(found["kl/teacher/math"] - found["kl/teacher/org_code"]) > 1e-3


def test_distributions_of_several_teachers_are_compared_each_with_its_own(job):
    algorithm = make_algorithm(
        "reinforce", kl_coef=0.0, teacher_coef=0.5, distribution=DistributionSpec(top_k=512, divergence="reverse_kl")
    )
    job = dataclasses.replace(job, algorithm=algorithm)
    groups = groups_of("math", "org/code", "org/code")
    worker = lone_worker(job.models, algorithm, temperature=TEMPERATURE)
    learner, _ = dealt(job, worker, groups)
    learner.assign_advantages()
    found = results(worker.update("actor", max_epochs=1, seed=0))
    of = reverse_kls(job, groups, lambda p, q, tokens: (p.exp() * (p - q)).sum(1))
    for source, name in SOURCES.items():
        assert found[f"kl/teacher/{name}"] == pytest.approx(np.mean(of[source]), rel=1e-3)


def test_a_source_without_a_teacher_is_refused_and_one_without_rollouts_has_no_pass(job):
    log: list = []
    ranks = LoggedRanks(log, *job.models, count=2)
    rollouts = [rollout for group in groups_of("math", "math") for rollout in group.rollouts]
    Learner(job, [ranks]).deal(rollouts, 1, sources=dict.fromkeys(("step1/00000", "step1/00001"), "math"))
    for columns, plan, _ in ranks.shards:
        assert columns.sources == ("math",) * 4
        assert plan.batches_of("teacher") == plan.forward_batches == plan.batches_of("actor")
        assert plan.batches_of("teacher 2") == ()
    with pytest.raises(ConfigError, match=r"the data source art has no teacher, and code have one[^`]*hint: name one"):
        dataclasses.replace(job, teachers={"code": "teacher"}).teacher_of("art")
    with pytest.raises(ConfigError, match="the teachers of sources are teacher 3, and the models are"):
        dataclasses.replace(job, teachers={"code": "teacher 3"})


@pytest.mark.parametrize("tokens", [None, 40])
def test_passes_of_a_part_cover_it_once_on_ranks_in_step(tokens):
    lengths = [5 + row % 7 for row in range(23)]
    parts = {"first": {row for row in range(23) if row % 3 == 0}, "second": range(5), "none": ()}
    plans = plan_batches(
        lengths, [3] * 23, parts=parts, num_ranks=3, num_mini_batches=2, micro_train_batch_size=4,
        micro_rollout_batch_size=4, max_response_tokens=9, seed=1, micro_batch_tokens=tokens,
    )  # fmt: skip
    for role, part in parts.items():
        passes = [[[plan.rows[row] for row in rows] for rows in plan.batches_of(role)] for plan in plans]
        assert sorted(item for own in passes for rows in own for item in rows) == sorted(part)
        assert len({len(own) for own in passes}) == 1
        for own in passes:
            filled = [rows for rows in own if rows]
            assert all(len(rows) <= 4 if tokens is None else sum(lengths[i] for i in rows) <= 40 for rows in filled)
            # No two passes that would be one.
            assert tokens is not None or len(filled) == -(-sum(map(len, filled)) // 4)
