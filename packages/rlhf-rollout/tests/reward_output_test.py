"""What a reward function prints: it belongs in a log, cut, or is shown without escape sequences, cut."""

import asyncio
import subprocess
import sys

from record_testing import make_prompt, make_rollout
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.function import FunctionReward

PRINTS = """
    import os
    def reward_func(queries, prompts, labels):
        os.write(1, "\\x1b[31mbe\\tgin\\x7f\\x9b2J caf\\xe9 \\u202eit\\n".encode())
        for _ in range(440):
            print("x" * 10**5)
        return {"rewards": [1.0] * len(queries)}
"""


def test_output_of_a_function_is_cut_in_the_log(write, tmp_path):
    log = tmp_path / "reward.log"

    async def run():
        function = FunctionReward(write(PRINTS), num_workers=1, log_path=log)
        prompt = make_prompt()
        try:
            return await function.score(prompt, [make_rollout(prompt, "4")])
        finally:
            await function.close()

    assert asyncio.run(run())[0].kind is VerdictKind.OK  # it prints 44 MB
    text = log.read_text()
    assert "gin" in text
    assert text.endswith("x\n[further output of the reward function is left out]\n")
    assert 10 * 2**20 <= len(text) < 10 * 2**20 + 100


def test_output_of_a_function_cannot_flood_or_steer_the_terminal(write):
    reward = write(PRINTS)
    program = f"""
import sys
sys.path[:] = {sys.path!r}
from record_testing import make_prompt
from rlhf_rollout.rewards.function import check_reward_function
assert check_reward_function({reward!r}, [make_prompt()]) is None
"""
    text = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True).stderr
    assert text.startswith("[31mbe\tgin2J caf\xe9 it\n")  # without the characters that steer a terminal
    assert 2**14 <= len(text) < 2**14 + 100
