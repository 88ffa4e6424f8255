"""The online algorithm, on one screen. Placement, overlap, faults and bookkeeping are the run's business."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_train.online.controller import PlacedRun


def train(run: "PlacedRun") -> None:
    """Run every step: generate with the newest weights, learn from what was generated, repeat."""
    run.sync_weights()
    run.evaluate(step=0)
    for step in range(1, run.num_steps + 1):
        groups = run.generate(step)
        if run.can_learn(groups):
            run.make_experience(groups, step)
            run.assign_advantages()
            run.update(step)
            run.sync_weights()
        run.record(step)
        run.evaluate(step)
        if run.is_exhausted:
            break
