"""Environments of the `verifiers` library, 0.1.3 to 0.1.9. Runs in agent processes.

The environment asks the policy through the gateway, as it asks any model: the library's rollouts, tools and rubrics are
used as they are. Source: https://github.com/PrimeIntellect-ai/verifiers.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlhf_data.errors import RewardError, installs
from rlhf_rollout.agents.interface import Session


class VerifiersAgent:
    """Runs episodes of a policy in an environment of `verifiers`. The reward is its rubric's.

    A prompt is the `prompt` of a row of the environment's data set. Its label is the row's `answer`, or a JSON object
    with any of `answer`, `info` and `task`.

    Args:
        load: returns the environment.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    async def start(self) -> None:
        """Load the environment. Raises RewardError for anything else, and whatever the loading raises."""
        self._environment = self._load()  # in the main thread, because the library sets handlers of signals
        if not hasattr(self._environment, "generate") or not hasattr(self._environment, "rubric"):
            hint = f"environments of verifiers 0.1.3 to 0.1.9 can be used: {installs('rlhf-rollout[verifiers]')}"
            raise RewardError(f"`load_environment` returned {self._environment!r:.80}", hint=hint)

    async def __call__(self, session: Session) -> dict[str, Any]:
        """Run one episode; return what an agent returns."""
        from openai import AsyncOpenAI
        from verifiers import types

        environment = self._environment
        is_chat = getattr(environment, "message_type", "chat") == "chat"
        prompt = [dict(message) for message in session.messages] if is_chat else session.prompt
        row = {"prompt": prompt, "answer": "", "info": {}, "task": "default", "example_id": 0}
        row |= read_label(session.label)
        async with AsyncOpenAI(base_url=session.base_url, api_key="none", max_retries=0) as client:
            # Up to 0.1.6 `generate` is not a coroutine function, and up to 0.1.7 it takes columns.
            generate = getattr(environment, "a_generate", None) or partial(environment.generate, use_tqdm=False)
            takes_rows = hasattr(types, "RolloutInput")
            inputs = [row] if takes_rows else {name: [value] for name, value in row.items()}
            result = await generate(inputs, client, "policy")
        result = result if isinstance(result, Mapping) else vars(result)
        metrics = {name: values[0] for name, values in result["metrics"].items()}
        return {"rewards": result["reward"][0], "extra": metrics}


def read_label(label: str) -> dict[str, Any]:
    """Return the columns of a row that a label holds: `answer`, or those in a JSON object."""
    try:
        value = json.loads(label)
    except ValueError:
        return {"answer": label}
    if not isinstance(value, Mapping):
        return {"answer": label}
    return {name: value[name] for name in ("answer", "info", "task") if value.get(name) is not None}
