"""Starts several sequences at a time, so that more steps consist of decodes only."""

from typing import Any

from rlhf_rollout.private_names import known_name

MOST_HELD_STEPS = 16  # for which a free slot stays empty
# The names depend on vLLM's version.
SLOTS = "max_num_active_reqs|max_num_running_reqs"  # most sequences that run
WAITING_FIRST = "kv_holding_waiting|skipped_waiting"  # the second queue, whose sequences start first
NEEDS = (SLOTS, WAITING_FIRST, "running", "schedule", "waiting")


def patch(scheduler: Any) -> None:
    """Let sequences that wait for a slot start several at a time: once a sixteenth of all slots is free.

    A step is replayed as a CUDA graph only if all its sequences decode (see `core`), and with hundreds of sequences
    nearly every step frees a slot for another to start. Sequences start at once when as many slots are free as
    sequences wait, and after `MOST_HELD_STEPS` in any case.
    """
    schedule = scheduler.schedule
    slots, waiting_first = known_name(scheduler, SLOTS), known_name(scheduler, WAITING_FIRST)
    num_slots = getattr(scheduler, slots)
    enough = max(1, num_slots // 16)
    num_held = 0  # steps since a slot became free for a sequence that waits

    def schedule_together(*args: Any, **options: Any) -> Any:
        nonlocal num_held
        num_running = len(scheduler.running)
        num_waiting = len(scheduler.waiting) + len(getattr(scheduler, waiting_first))
        is_early = num_slots - num_running < min(num_waiting, enough) and num_held < MOST_HELD_STEPS
        setattr(scheduler, slots, num_running if is_early else num_slots)
        step = schedule(*args, **options)
        num_held = num_held + getattr(step, "num_steps", 1) if is_early and num_running < num_slots else 0
        return step

    scheduler.schedule = schedule_together
