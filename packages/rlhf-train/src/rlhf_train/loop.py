"""The online algorithm on one screen. The parts behind `Controller` implement each call."""

from rlhf_train.controller import Controller


def train(run: Controller) -> None:
    """Run all steps: generate rollouts with the newest weights, and update the weights from them."""
    run.start()
    for step in range(run.first_step, run.num_steps + 1):
        run.generate(step)
        if run.can_learn():
            run.make_experience(step)
            run.assign_advantages()
            run.update(step)
            run.sync_weights()
        run.evaluate(step)
        run.record(step)
        run.checkpoint(step)
        if run.is_exhausted:
            break
