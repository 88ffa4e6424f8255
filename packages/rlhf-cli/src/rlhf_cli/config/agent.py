"""Options of agents: episodes of several turns."""

from collections.abc import Collection
from typing import Literal

from rlhf_data.checks import without_effect
from rlhf_data.options import Section, flag
from rlhf_rollout.agents import AgentSpec, EpisodeLimits
from rlhf_rollout.rewards.sources import CallOptions

_OPTIONS = (
    *("max_steps", "agent_max_len", "agent_max_seconds", "agent_num_workers", "agent_timeout_s"),
    *("agent_history", "agent_tool_parser", "reward_by_turn", "turn_gamma", "group_by"),
)


class AgentSection(Section, title="agent"):
    """Episodes of several turns, run by the user's agent."""

    agent_func_path: str | None = flag(
        None,
        "an agent: Python FILE.py with AgentExecutor, AgentInstance, `async def run_episode(session)`, Environment,"
        " TOOLS or MCP, module:NAME, or the command line of a program that asks OPENAI_BASE_URL; None: single turns",
    )
    max_steps: int = flag(16, "answers of the policy per episode at most", ge=1)
    agent_max_len: int | None = flag(
        None, "tokens per conversation at most; None: --prompt_max_len + --generate_max_len", ge=2
    )
    agent_max_seconds: float | None = flag(
        None, "seconds per episode, after which it ends with what it has earned; None: no limit", gt=0
    )
    agent_num_workers: int = flag(2, "processes of the agent, each of which runs many episodes", ge=1)
    agent_timeout_s: float = flag(
        60.0, "time limit of the agent's own code between two answers of the policy, in seconds", gt=0
    )

    agent_history: Literal["append", "split"] = flag(
        "append",
        "if the chat template rewrites earlier answers of a conversation over HTTP, keep them as they were written"
        " (append), or begin another rollout with the rewritten conversation (split)",
    )
    agent_tool_parser: str = flag(
        "hermes",
        "form of the tool calls in answers over HTTP: hermes (also Qwen's), llama3_json, mistral or one of vLLM's"
        " parsers; a file with TOOLS names its own",
    )

    def max_len(self, prompt_max_len: int, generate_max_len: int) -> tuple[int, str]:
        """Return the largest number of tokens of a conversation, and the flags that set it."""
        if self.agent_func_path is not None and self.agent_max_len is not None:
            return self.agent_max_len, f"--agent_max_len {self.agent_max_len}"
        flags = f"--prompt_max_len {prompt_max_len} + --generate_max_len {generate_max_len}"
        return prompt_max_len + generate_max_len, flags

    def spec(self, path: str, max_length: int, calls: CallOptions) -> AgentSpec:
        """Return the agent in the file or module `path`, with conversations of at most `max_length` tokens.

        Its processes have the memory, the variables and the time to start that `calls` gives reward functions.
        """
        seconds = {} if self.agent_max_seconds is None else {"max_seconds": self.agent_max_seconds}
        return AgentSpec(
            path=path,
            limits=EpisodeLimits(max_turns=self.max_steps, max_length=max_length, **seconds),
            num_processes=self.agent_num_workers,
            timeout_s=self.agent_timeout_s,
            success_threshold=calls.success_threshold,
            history=self.agent_history,
            tool_parser=self.agent_tool_parser,
            worker=calls.worker,
        )

    def check(self, given: Collection[str]) -> list[str]:
        """Return notices for options without effect."""
        return without_effect(given, (self.agent_func_path is None, _OPTIONS, "there is no --agent_func_path"))
