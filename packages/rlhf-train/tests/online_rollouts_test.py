"""Engines between two batches: nothing may be under way when they fall asleep."""

import threading
import time

from online_fakes import SpreadReward
from rlhf_rollout.supervisor import EngineState


def test_weights_that_an_engine_gets_when_the_batch_is_complete_arrive_before_it_may_sleep(make_run):
    rollouts = make_run(SpreadReward()).parts.rollouts
    rollouts.synchronize(1)
    began, log = threading.Event(), []

    def send(engines):
        began.set()
        time.sleep(0.3)
        log.append("weights arrived")
        return 11, {}

    rollouts._send_weights = send
    rollouts._supervisor._places[0].state = EngineState.SYNCING  # as after a restart
    rollouts._watch()
    assert began.wait(60)
    rollouts._rest()
    log.append("may sleep")
    assert log == ["weights arrived", "may sleep"]
