"""Engines between two batches: nothing may be under way when they fall asleep."""

import threading
import time
from datetime import datetime

from online_fakes import SpreadReward
from rlhf_rollout.agents import AgentSpec
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.supervisor import EngineState
from rlhf_train.run.checkpoint import CheckpointSpec
from sentencepiece_testing import make_tokenizer


def test_agents_ask_with_the_values_of_the_chat_templates_variables_and_the_time_of_the_run(make_run, tmp_path):
    (tmp_path / "agent.py").write_text("async def run_episode(session):\n    return 0.0\n")
    tokenizer = make_tokenizer("bytes")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mode + strftime_now(' %Y %H') }}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    agent = AgentSpec(
        path=str(tmp_path / "agent.py"),
        limits=EpisodeLimits(),
        num_processes=1,
        chat_template_kwargs='{"mode": "/quick"}',
    )
    engine = EngineSpec(model="fake", tokenizer=str(tmp_path / "tokenizer"))
    began = CheckpointSpec(template_clock=datetime(2025, 12, 31, 23))
    rollouts = make_run(SpreadReward(), agent=agent, engine=engine, checkpoints=began).controller.rollouts
    asked = rollouts._workflow.render([{"role": "user", "content": "2+2"}], [], [], "e")
    assert tokenizer.decode(asked) == "2+2/quick 2025 23"
    assert rollouts._workflow.gives_reward is False  # the reward of the run may score what they leave open


def test_weights_that_an_engine_gets_when_the_batch_is_complete_arrive_before_it_may_sleep(make_run):
    controller = make_run(SpreadReward()).controller
    rollouts = controller.rollouts
    rollouts.synchronize(1)
    began, log = threading.Event(), []

    def send(engines):
        began.set()
        time.sleep(0.3)
        log.append("weights arrived")
        return {}

    controller.learner._send_weights = send
    rollouts._supervisor._places[0].state = EngineState.SYNCING  # as after a restart
    rollouts._watch()
    assert began.wait(60)
    rollouts._rest()
    log.append("may sleep")
    assert log == ["weights arrived", "may sleep"]
