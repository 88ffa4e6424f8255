"""An agent written with the `openai` library alone: it asks for a sum, and asks again after a wrong answer.

    rlhf ppo --agent_func_path examples/openai_client.py --max_steps 3 --agent_max_len 192 --train_steps 20

With each of the seeds 1, 2 and 3 it reaches a held-out accuracy of at least 0.60 within three attempts.

`run_episode` serves many episodes per process. The file is also a program that knows nothing of training, which
`--agent_func_path 'python examples/openai_client.py'` starts for each episode: it finds the policy at OPENAI_BASE_URL,
reads its task from standard input and prints its reward. Importing `openai` then takes most of a second per episode.
"""

import asyncio
import json
import re
import sys

from openai import AsyncOpenAI

AGAIN = {"role": "user", "content": "That is wrong. Try again."}


async def solve(client, question, label):
    """Return 1 for a right answer less 0.1 per wrong one, in at most three attempts."""
    messages = [{"role": "user", "content": question}]
    for attempt in range(3):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        answer = completion.choices[0].message
        found = re.findall(r"####\s*(-?\d+)", answer.content or "")
        if found and found[-1] == label:
            return {"reward": 1 - 0.1 * attempt, "score": 1, "extra": {"attempts": attempt + 1}}
        messages += [answer, AGAIN]
    return {"reward": -0.3, "score": 0, "extra": {"attempts": 3}}


client = None


async def run_episode(session):
    """Run one of many episodes in this process, which share a pool of connections."""
    global client
    client = client or AsyncOpenAI(base_url=session.base_url, api_key="none")
    question = session.messages[-1]["content"]
    return await solve(client.with_options(base_url=session.base_url), question, session.label)


async def main():
    """Run one episode."""
    task = json.load(sys.stdin)
    async with AsyncOpenAI() as one:
        print(json.dumps(await solve(one, task["messages"][-1]["content"], task["label"])))


if __name__ == "__main__":
    asyncio.run(main())
