"""Starts several sequences at a time, so that more steps consist of decodes only."""

from typing import Any

MOST_HELD_STEPS = 16  # for which a free slot stays empty
NEEDS = ("max_num_running_reqs", "running", "schedule", "skipped_waiting", "waiting")


def patch(scheduler: Any) -> None:
    """Let sequences that wait for a slot start several at a time: once a sixteenth of all slots is free.

    A step is replayed as a CUDA graph only if all its sequences decode (see `core`), and with hundreds of sequences
    nearly every step frees a slot for another to start. Sequences start at once when as many slots are free as
    sequences wait, and after `MOST_HELD_STEPS` in any case.
    """
    schedule = scheduler.schedule
    num_slots = scheduler.max_num_running_reqs
    enough = max(1, num_slots // 16)
    num_held = 0  # steps since a slot became free for a sequence that waits

    def schedule_together(*args: Any, **options: Any) -> Any:
        nonlocal num_held
        num_running = len(scheduler.running)
        num_waiting = len(scheduler.waiting) + len(scheduler.skipped_waiting)
        is_early = num_slots - num_running < min(num_waiting, enough) and num_held < MOST_HELD_STEPS
        scheduler.max_num_running_reqs = num_running if is_early else num_slots
        step = schedule(*args, **options)
        num_held = num_held + getattr(step, "num_steps", 1) if is_early and num_running < num_slots else 0
        return step

    scheduler.schedule = schedule_together
