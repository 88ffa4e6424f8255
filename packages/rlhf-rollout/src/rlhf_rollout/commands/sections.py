"""Options that `rlhf-rollout` and `rlhf` share. Each is declared once; `rlhf` adds those of training."""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import lacking, without_effect
from rlhf_data.options.declare import Section, flag, flag_of, matching, one_of
from rlhf_data.options.sections import SOURCES, SPLIT, ChatSection, InputSection, RowSection, TemplateText, TrustSection
from rlhf_rollout.agents.agent_spec import AgentSpec
from rlhf_rollout.agents.recorder import EpisodeLimits
from rlhf_rollout.engines import EngineSpec
from rlhf_rollout.engines.spec import DRAFTS, OF_SINGLE_TOKENS, QUANTIZATIONS, VLLM_PATCHES
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.rewards.sources import CallOptions

# Options of reward functions that also say how an agent's processes run and what counts as right.
_SHARED_WITH_AGENTS = {
    *("reward_start_timeout_s", "reward_env", "reward_memory_gb"),
    *("failed_reward", "success_threshold", "extra_keys"),
}


def _stop_texts(value: Any) -> Any:
    """Return the texts of --stop; one may stand alone, as in OpenAI's API. Raises ValueError for an empty text."""
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list | tuple) and not all(texts):
        raise ValueError("a text that ends responses must not be empty")
    return texts


StopTexts = Annotated[tuple[TemplateText, ...], BeforeValidator(_stop_texts)]
SHARE_ALONE = 0.9  # share of a GPU's memory for an engine that has the GPU to itself


def words_of(text: str | None) -> tuple[str, ...]:
    """Return what commas separate, without spaces around it."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


class PrecisionSection(Section, title="model"):
    """The data type of computations."""

    bf16: bool = flag(False, "compute in bfloat16 instead of float32; trained weights keep a float32 copy")

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Torch's name of the data type."""
        return "bfloat16" if self.bf16 else "float32"


class ModelSection(PrecisionSection, TrustSection):
    """Adds the model."""

    pretrain: str | None = flag(
        None,
        "the model: a Hugging Face folder or hub name; with `rlhf` also `builtin`, a tiny model that ships",
        names_model=True,
    )


class TokenizerSection(PrecisionSection, TrustSection):
    """Adds a tokenizer."""

    tokenizer: str | None = flag(None, "folder or hub name of the tokenizer; None: the model's own", names_model=True)


class EngineModelSection(TokenizerSection, ModelSection):
    """A model that generates, with a tokenizer."""


class PromptLengthSection(Section, title="data"):
    """How long a prompt may be."""

    prompt_max_len: int = flag(
        1024, "tokens per prompt at most; longer prompts are left out and counted, never cut", ge=1
    )


class ReferenceSection(Section, title="data"):
    """The reference answer of a row."""

    label_key: str | None = flag(
        None, "key of the reference answer in a row, handed to the reward function; None: no reference answers"
    )


class PromptSourceSection(PromptLengthSection, InputSection, RowSection):
    """Where prompts come from."""

    prompt_data: str | None = flag(
        None, f"prompts: {SOURCES}; with `rlhf` also `builtin`, the prompts that ship with the built-in model"
    )
    prompt_data_probs: str | None = flag(
        None, "one probability per source of --prompt_data, separated by commas; None: one source after the other"
    )
    prompt_split: str = flag("train", f"--prompt_data: {SPLIT}")

    def missing_data(self) -> list[ConfigError]:
        """Return an error if no source of prompts is named."""
        hint = "add --prompt_data FILE.jsonl and --input_key KEY"
        return lacking(self, "prompt_data", "it names the prompts", hint)


class PromptSection(ReferenceSection, PromptSourceSection):
    """Prompts with reference answers."""


class SamplingSection(Section, title="sampling"):
    """How responses are sampled."""

    generate_max_len: int = flag(1024, "tokens per response at most", aliases=["max_new_tokens"], ge=1)
    temperature: float = flag_of(SamplingParams.temperature, "sampling temperature, which log-probs include; 0: greedy")
    top_p: float = flag_of(SamplingParams.top_p, "probability mass of the most likely tokens to sample from")
    top_k: int = flag_of(SamplingParams.top_k, "number of most likely tokens to sample from; -1: all")
    min_p: float = flag_of(
        SamplingParams.min_p,
        "leave out tokens less likely than this share of the most likely token's probability; 0: none",
    )
    repetition_penalty: float = flag_of(
        SamplingParams.repetition_penalty,
        "divide logits of tokens that prompt or response hold by this, and multiply negative ones; 1: no penalty",
    )
    stop: StopTexts | None = flag(
        None,
        r"texts that end a response, one word each, in quotes if they hold spaces; \n is a newline. The response's text"
        " ends before such a text, and its tokens, which are trained, end with it. None: only end tokens end it",
    )

    def params(self, num_samples: int, seed: int | None) -> SamplingParams:
        """Return how an engine samples `num_samples` responses to a prompt."""
        own = {"num_samples": num_samples, "max_tokens": self.generate_max_len, "seed": seed, "stop": self.stop or ()}
        return SamplingParams(**matching(SamplingParams, self) | own)

    def check(self, *, has_agent: bool = False) -> None:
        """Raise ConfigError for options of sampling that cannot work, with or without an agent."""
        if has_agent and self.stop:
            message = "--stop ends responses of single turns, and an agent says itself where answers end"
            hint = "drop --stop; agents ask by `session.reply(sampling={'stop': [...]})`, or by `stop` over HTTP"
            raise ConfigError(message, hint=hint)
        if self.top_k == 0:
            raise ConfigError("--top_k is 0, which leaves no token to sample", hint="use -1 for all tokens")


class GroupSamplingSection(SamplingSection):
    """Adds the number of responses."""

    n_samples_per_prompt: int = flag(1, "responses per prompt", ge=1)


class EngineSection(Section, title="generation engine (vLLM)"):
    """One vLLM engine."""

    vllm_tensor_parallel_size: int = flag_of(EngineSpec.tensor_parallel_size, "GPUs per engine")
    vllm_gpu_memory_utilization: float | None = flag_of(
        EngineSpec.gpu_memory_utilization,
        "share of a GPU's memory that an engine may take; None: 0.9, or beside trained models 0.6 if the engine sleeps,"
        " else 0.4",
        default=None,
    )
    vllm_max_num_seqs: int = flag_of(EngineSpec.max_num_seqs, "responses that an engine decodes at the same time")
    vllm_quantization: one_of(QUANTIZATIONS) | None = flag(
        None,
        "fp8: engines round weights and activations of linear layers to FP8 while they load and at each weight update;"
        " needs --bf16 and an Ada, Hopper or newer GPU (on a CPU it works, slowly). None: no rounding",
    )
    vllm_speculative: one_of(DRAFTS) | None = flag(
        None,
        "ngram: engines draft the tokens that followed the last 2 to 4 where these stood before, in prompt or response,"
        " and check them in one pass of the model; responses have the same distribution. mtp: engines draft with the"
        " model's own layers that predict several tokens, which stay as they are. None: no drafts",
    )
    vllm_draft_model: str | None = flag(
        None,
        "a smaller model with the policy's vocabulary, a folder or hub name: its most likely tokens are drafts, which"
        " engines check as with --vllm_speculative. None: no such drafts",
        names_model=True,
    )
    vllm_speculative_tokens: int = flag_of(EngineSpec.speculative_tokens, "tokens per draft at most")
    vllm_skip_patches: str | None = flag(
        None,
        "speed-ups of vLLM to do without, separated by commas, in case that one is suspected of a fault; generation is"
        f" then slower: {', '.join(VLLM_PATCHES)}. None: all are used that the installed version has a place for",
    )
    engine_timeout_s: float = flag(
        1800.0,
        "seconds for which an engine that has requests may write nothing before another one goes on with them; a"
        " response that gets no further there either ends, cut by its length. Waiting for a place does not count."
        " With --engine http, the server's /metrics tell whether it writes; without them: seconds of a whole request",
        gt=0,
    )
    enforce_eager: bool = flag(False, "no CUDA graphs: faster start, slower generation")
    enable_prefix_caching: bool = flag(
        True, "keep the KV cache of prefixes that prompts share, and of earlier turns, until the next weight update"
    )

    def check_drafts(self, given: Collection[str], sampling: SamplingSection | None = None) -> list[str]:
        """Return notices about drafts. Raises ConfigError if they do not go with how responses are sampled.

        None for `sampling`: each request says that itself.
        """
        if self.vllm_speculative is None and self.vllm_draft_model is None:
            unused = "there is no --vllm_speculative or --vllm_draft_model"
            return without_effect(given, (True, ["vllm_speculative_tokens"], unused))
        kind = self.vllm_speculative
        name = f"--vllm_speculative {kind}" if kind else f"--vllm_draft_model {self.vllm_draft_model}"
        if sampling is not None and sampling.min_p:
            message = f"{name} drafts tokens, which vLLM cannot with --min_p {sampling.min_p:g}"
            raise ConfigError(message, hint="drop one of them")
        return [f"{name}: engines do without the speed-ups of single tokens, {', '.join(OF_SINGLE_TOKENS)}"]

    def spec(self, model: str, max_model_len: int, memory_share: float, **options: Any) -> EngineSpec:
        """Return how an engine is built.

        Args:
            model: a folder or hub name.
            max_model_len: tokens of prompt and response together.
            memory_share: share of a GPU's memory if --vllm_gpu_memory_utilization is not set.
            options: further fields of the specification.
        """
        return EngineSpec(
            model=model,
            max_model_len=max_model_len,
            max_num_seqs=self.vllm_max_num_seqs,
            gpu_memory_utilization=self.vllm_gpu_memory_utilization or memory_share,
            tensor_parallel_size=self.vllm_tensor_parallel_size,
            quantization=self.vllm_quantization,
            speculative=self.vllm_speculative,
            draft_model=self.vllm_draft_model,
            speculative_tokens=self.vllm_speculative_tokens,
            skip_patches=words_of(self.vllm_skip_patches),
            request_timeout_s=self.engine_timeout_s,
            enforce_eager=self.enforce_eager,
            enable_prefix_caching=self.enable_prefix_caching,
            **options,
        )


class AgentSection(Section, title="agent"):
    """Episodes of several turns, run by the user's agent."""

    agent_func_path: str | None = flag(
        None,
        "an agent: Python FILE.py with AgentExecutor, AgentInstance, `async def run_episode(session)`, Environment,"
        " TOOLS or MCP, module:NAME, or the command line of a program that asks OPENAI_BASE_URL; None: single turns",
    )
    max_steps: int = flag_of(EpisodeLimits.max_turns, "answers of the policy per episode at most")
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

    def spec(self, path: str, max_length: int, calls: CallOptions, data: ChatSection) -> AgentSpec:
        """Return the agent in the file or module `path`, with conversations of at most `max_length` tokens.

        Its processes have the memory, the variables and the time to start that `calls` gives reward functions.
        """
        seconds = {} if self.agent_max_seconds is None else {"max_seconds": self.agent_max_seconds}
        return AgentSpec(
            path=path,
            limits=EpisodeLimits(max_turns=self.max_steps, max_length=max_length, **seconds),
            num_processes=self.agent_num_workers,
            timeout_s=self.agent_timeout_s,
            failed_reward=calls.failed_reward,
            success_threshold=calls.success_threshold,
            history=self.agent_history,
            tool_parser=self.agent_tool_parser,
            chat_template_kwargs=data.chat_template_kwargs,
            worker=calls.worker,
        )

    def without_images(self) -> list[tuple[Any, str, str]]:
        """Return what excludes images, for `ImageSection.check_images`."""
        is_split = self.agent_func_path is not None and self.agent_history == "split"
        reason = "histories as they were written, and --agent_history split has them rendered again"
        return [(is_split, reason, "drop --agent_history")]

    def check(self, given: Collection[str], *more: str) -> list[str]:
        """Return notices for options without effect; `more` are further ones that only agents use."""
        own = [name for name in AgentSection.model_fields if name != "agent_func_path"]
        return without_effect(given, (self.agent_func_path is None, [*own, *more], "there is no --agent_func_path"))

    def beside(self, given: Collection[str]) -> Collection[str]:
        """Return `given` for the checks of rewards: an agent uses some options that would have no effect otherwise."""
        return given if self.agent_func_path is None else set(given) - _SHARED_WITH_AGENTS
