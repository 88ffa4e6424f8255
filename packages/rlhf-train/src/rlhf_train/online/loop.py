"""The online algorithm, on one screen. The controller's parts know how each step is done."""

from rlhf_train.online.controller import Controller


def train(run: Controller) -> None:
    """Run every step: generate with the newest weights, learn from what was generated, repeat."""
    run.start()
    for step in range(1, run.num_steps + 1):
        run.generate(step)
        if run.can_learn():
            run.make_experience(step)
            run.assign_advantages()
            run.update(step)
            run.sync_weights()
        run.evaluate(step)
        run.record(step)
        if run.is_exhausted:
            break
