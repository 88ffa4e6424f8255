"""A user's agent as plain data, and the workflow made from it."""

import asyncio
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_data.chat.tokens import Tokenizer
from rlhf_data.own_code import is_trusted
from rlhf_rollout.agents.base import Workflow
from rlhf_rollout.agents.conversation import History
from rlhf_rollout.agents.hosted import HostedAgent
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.agents.single_turn import SingleTurn
from rlhf_rollout.agents.user_agent import parse_agent
from rlhf_rollout.engines.stopping import answer_decoder
from rlhf_rollout.rewards.user_function import SUCCESS_THRESHOLD
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.workers.guarded import DEFAULT_WORKER, WorkerOptions
from rlhf_rollout.workers.pool import WorkerPool
from rlhf_rollout.workers.rpc import UserCode

if TYPE_CHECKING:
    from rlhf_data.images.reader import ImageReader


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """A user's agent and how it runs.

    Attributes:
        path: `FILE.py`, `FILE.py:NAME`, `module`, `module:NAME` or a command line; see `user_agent`.
        limits: the limits of each episode.
        num_processes: processes, each of which runs many episodes.
        timeout_s: seconds that the agent's code may take between two answers of the policy.
        failed_reward, success_threshold: see `HostedAgent`.
        history: what the gateway does with histories that the chat template rewrites; see `Conversations`.
        tool_parser: form of the tool calls that the gateway reads; see `make_parser`.
        chat_template_kwargs: values of variables of the chat template, as a JSON object; see `set_chat_template`.
        worker: how the processes run.
    """

    path: str
    limits: EpisodeLimits
    num_processes: int = 2
    timeout_s: float = 60.0
    failed_reward: float | None = None
    success_threshold: float = SUCCESS_THRESHOLD
    history: History = "append"
    tool_parser: str = "hermes"
    chat_template_kwargs: str | None = None
    worker: WorkerOptions = DEFAULT_WORKER


def make_pool(spec: AgentSpec, tokenizer_path: str | None, log_path: Path | None = None) -> WorkerPool:
    """Return the processes of an agent, not started yet. Raises ConfigError for an agent that cannot be found."""
    code = UserCode(
        target=parse_agent(spec.path),
        program="rlhf_rollout.agents.user_agent",
        name="the agent",
        process="the agent's process",
        is_shared=True,
        settings={"tokenizer": tokenizer_path, "trust_remote_code": is_trusted(tokenizer_path)},
    )
    options = {"num_processes": spec.num_processes, "timeout_s": spec.timeout_s, "log_path": log_path}
    return WorkerPool(code, spec.worker, **options)


def make_workflow(
    spec: AgentSpec | None,
    router: EngineRouter,
    tokenizer: Tokenizer,
    *,
    tokenizer_path: str | None = None,
    gives_reward: bool = True,
    log_path: Path | None = None,
    reader: "ImageReader | None" = None,
) -> Workflow:
    """Return the workflow that runs an agent or, without an agent, single turns.

    Args:
        spec: the agent; None for single turns.
        router: answers the workflow's requests.
        tokenizer: the policy's, loaded.
        tokenizer_path: its folder or hub name, for agents that load it.
        gives_reward: see `HostedAgent`.
        log_path: file for what the agent prints; None for standard error.
        reader: of the images that agents get and give; None for text alone.
    """
    if spec is None:
        return SingleTurn(router, answer_decoder(tokenizer))
    if reader is not None:
        from rlhf_data.images.reader import PartsTokenizer

        tokenizer = PartsTokenizer(tokenizer, reader, has_marks=False)
    pool = make_pool(spec, tokenizer_path, log_path)
    return HostedAgent(
        router,
        pool,
        tokenizer,
        spec.limits,
        gateway=_make_gateway(spec, tokenizer),
        gives_reward=gives_reward,
        failed_reward=spec.failed_reward,
        success_threshold=spec.success_threshold,
        reader=reader,
    )


def _make_gateway(spec: AgentSpec, tokenizer: Tokenizer) -> Any:
    """Return the gateway for an agent that speaks HTTP; None without the server's library, which is an extra."""
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        return None
    from rlhf_rollout.agents.gateway import Gateway

    return Gateway(tokenizer, history=spec.history, tool_parser=spec.tool_parser)


def check_agent(spec: AgentSpec) -> None:
    """Import an agent in a process of its own, before anything expensive starts.

    Raises ConfigError or RewardError for one that cannot be found or imported.
    """

    async def start() -> None:
        pool = make_pool(spec, None)
        try:
            await pool.start()
        finally:
            await pool.close()

    asyncio.run(start())
