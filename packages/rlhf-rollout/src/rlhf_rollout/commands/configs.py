"""The configuration of each command of `rlhf-rollout`: its sections, and checks across several options."""

from collections.abc import Collection
from dataclasses import replace

from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import missing, without_effect
from rlhf_data.options.declare import Config, Section, flag, one_of, with_defaults
from rlhf_data.options.sections import (
    AnswerKeySection,
    ExampleSection,
    ImageSection,
    InputSection,
    PairKeySection,
    TemplateSection,
    TemplateVariableSection,
)
from rlhf_data.rows.sources import parse_probs
from rlhf_rollout.agents import AgentSpec
from rlhf_rollout.commands.outputs import GenerateFileSection, ScoreFileSection
from rlhf_rollout.commands.reward_section import RewardSection
from rlhf_rollout.commands.sections import (
    SHARE_ALONE,
    AgentSection,
    EngineModelSection,
    EngineSection,
    GroupSamplingSection,
    PromptLengthSection,
    PromptSection,
    PromptSourceSection,
    ReferenceSection,
    SamplingSection,
    TokenizerSection,
)
from rlhf_rollout.engines import ENGINE_KINDS
from rlhf_rollout.engines.adapter_files import parse_lora_modules
from rlhf_rollout.engines.places import EnginePlaces, place_engines
from rlhf_rollout.host import visible_gpus
from rlhf_rollout.mps import USE_MPS_HELP
from rlhf_rollout.protocols import SamplingParams

EngineKind = one_of(ENGINE_KINDS)
WITH_MODEL = ("transformers", "vllm")  # kinds of engines that load a model

# What only vLLM reads, and what only rewards do.
_VLLM_OPTIONS = [name for name in EngineSection.model_fields if name not in ("vllm_max_num_seqs", "engine_timeout_s")]
_REWARD_OPTIONS = [name for name in RewardSection.model_fields if name not in ("remote_rm_url", "reward_pretrain")]


class SeededSampling(Section, title="sampling"):
    """Adds a seed."""

    seed: int | None = flag(
        None,
        "makes responses repeatable, and the order that --prompt_data_probs draws; None: responses differ in each run",
        ge=0,
    )


class SlicedPromptSection(ImageSection, PromptSection):
    """Prompts from a part of the rows."""

    skip_samples: int = flag(0, "rows to leave out at the start of each source, before --max_samples counts", ge=0)


class GenerateSampling(GroupSamplingSection, SeededSampling):
    """How `generate` samples."""


class ChatSampling(with_defaults(SamplingSection, temperature=0.7), SeededSampling):
    """How `chat` samples."""


class OneEngineSection(EngineSection):
    """Any kind of engine."""

    engine: EngineKind = flag(
        "vllm", "what generates; http: a vLLM server that runs elsewhere; fake: random tokens, to try a command out"
    )
    base_url: str | None = flag(None, "address of the vLLM server, for --engine http")

    def missing(self, model: EngineModelSection) -> list[ConfigError]:
        """Return an error for each option that the engine needs and that is not set."""
        lacks = []
        if model.pretrain is None and self.engine != "fake":
            lacks.append(missing("pretrain", f"engine {self.engine} needs a model", "add --pretrain FOLDER_OR_NAME"))
        if self.engine == "http" and self.base_url is None:
            lacks.append(missing("base_url", "--engine http asks a server", "give --base_url http://HOST:8000"))
        return lacks

    def check(self, given: Collection[str], sampling: SamplingSection | None = None) -> list[str]:
        """Return notices for options that this kind of engine ignores. Raises ConfigError for unknown patches.

        `sampling` is how all responses are sampled; None if each request says that.
        """
        self.spec("", 1, SHARE_ALONE)
        drafts = self.check_drafts(given, sampling) if self.engine == "vllm" else []
        kind = f"--engine is {self.engine}"
        computes = self.engine in WITH_MODEL
        return drafts + without_effect(
            given,
            (self.engine != "http", ["base_url"], kind),
            (self.engine != "vllm", _VLLM_OPTIONS, kind),
            (not computes, ["bf16"], kind),
        )


class SeveralEnginesSection(OneEngineSection):
    """Adds how many there are."""

    vllm_num_engines: int = flag(
        1,
        "number of engines, each in a process of its own; they spread over the GPUs, several on one if there are more,"
        " or share the cores of a machine without GPUs",
        ge=1,
    )
    vllm_use_mps: bool = flag(False, USE_MPS_HELP)

    @property
    def places(self) -> EnginePlaces:
        """Where they run. Raises ConfigError if there are fewer GPUs than one of them needs."""
        if self.vllm_num_engines == 1:  # it sees all GPUs, as without this option
            return EnginePlaces(((),))
        return place_engines(self.vllm_num_engines, self.vllm_tensor_parallel_size, visible_gpus())

    @property
    def memory_share(self) -> float:
        """The share of a GPU's memory for one engine if no option sets it."""
        return SHARE_ALONE / self.places.most_per_gpu

    def check(self, given: Collection[str], sampling: SamplingSection | None = None) -> list[str]:
        """See `OneEngineSection`; a notice tells where several engines are."""
        notices = super().check(given, sampling)
        number = self.vllm_num_engines
        if number > 1 and self.engine == "http":
            message = f"--vllm_num_engines is {number}, and --engine http asks one server"
            raise ConfigError(message, hint="drop --vllm_num_engines; engines behind one address are the server's")
        most = self.places.most_per_gpu
        share = self.vllm_gpu_memory_utilization
        if share is not None and most * share > 1:
            message = f"{most} engines share a GPU, and --vllm_gpu_memory_utilization {share:g} is the share of each:"
            hint = f"use --vllm_gpu_memory_utilization {self.memory_share:.2g}, or fewer engines"
            raise ConfigError(f"{message} {most * share:g} of its memory", hint=hint)
        if self.vllm_use_mps and most == 1:
            message = "--vllm_use_mps is for engines that share a GPU, and none do"
            raise ConfigError(message, hint="use more --vllm_num_engines, or drop it")
        return [*notices, self.places.describe()] if number > 1 else notices


class GenerateConfig(Config):
    """All options of `generate`."""

    model: EngineModelSection = EngineModelSection()
    data: SlicedPromptSection = SlicedPromptSection()
    rollout: GenerateSampling = GenerateSampling()
    agent: AgentSection = AgentSection()
    engine: SeveralEnginesSection = SeveralEnginesSection()
    reward: RewardSection = RewardSection()
    output: GenerateFileSection = GenerateFileSection()

    @property
    def max_len(self) -> int:
        """Tokens of the longest conversation."""
        return self.agent.max_len(self.data.prompt_max_len, self.rollout.generate_max_len)[0]

    def sampling(self) -> SamplingParams:
        """Return how responses are sampled."""
        return self.rollout.params(self.rollout.n_samples_per_prompt, self.rollout.seed)

    def agent_spec(self) -> AgentSpec | None:
        """Return the agent; None for single turns."""
        path = self.agent.agent_func_path
        return None if path is None else self.agent.spec(path, self.max_len, self.reward.calls(), self.data)

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        lacks = self.data.missing_data()
        if self.reward.sources() or self.output.post_processor not in ("rollouts", "plain", "rendered"):
            lacks += self.reward.missing(f"--post_processor {self.output.post_processor} needs a reward")
        lacks += self.reward.missing_label(self.data)
        return lacks + self.output.missing() + self.engine.missing(self.model)

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        has_agent = self.agent.agent_func_path is not None
        self.rollout.check(has_agent=has_agent)
        kind = self.output.post_processor
        has_reward = bool(self.reward.sources())
        num_samples = self.rollout.n_samples_per_prompt
        if kind in ("best_of_n", "iter_dpo") and num_samples < 2:
            message = f"--post_processor {kind} compares responses to a prompt; --n_samples_per_prompt is {num_samples}"
            raise ConfigError(message, hint="give --n_samples_per_prompt 4")
        self.sampling()
        self.agent_spec()
        parse_probs("prompt_data_probs", self.data.prompt_data_probs)
        if kind != "rollouts" and has_agent:
            message = f"--post_processor {kind} makes rows of one prompt and one answer, and episodes of an agent have"
            raise ConfigError(f"{message} several turns", hint="drop --post_processor, or --agent_func_path")
        self.output.check_template(kind)
        self._check_images()
        if self.output.overwrite and self.output.resume:
            message = "--overwrite and --resume: a file is either replaced or continued"
            raise ConfigError(message, hint="give one of them")
        notices = self.engine.check(given, self.rollout) + self.agent.check(given)
        notices += self.data.check_chat(given, has_agent=has_agent)
        given = self.agent.beside(given)
        if has_reward:
            notices += [*self.reward.check(given, num_samples), *self.reward.what_is_right("verdicts")]
        return notices + without_effect(
            given,
            (not has_reward, [*_REWARD_OPTIONS, "min_reward"], "nothing scores the responses"),
            (has_reward and kind != "rs", ["min_reward"], f"--post_processor is {kind}"),
            (kind != "csft", ["reward_template"], f"--post_processor is {kind}"),
        )

    def _check_images(self) -> None:
        kind = self.output.post_processor
        kinds = " or ".join(WITH_MODEL)
        self.data.check_images(
            (self.engine.engine not in WITH_MODEL, "an engine that reads images", f"use --engine {kinds}"),
            (kind != "rollouts", "the record of rollouts: training data has no images", "drop --post_processor"),
            *self.agent.without_images(),
        )


class AnswerSection(PairKeySection, AnswerKeySection, ReferenceSection, InputSection, ExampleSection):
    """Answers to score: one per row, or pairs."""

    chosen_key: str | None = flag(None, "key of the preferred answer of a pair; None: rows hold one answer, not pairs")


class ScoreConfig(Config):
    """All options of `score`."""

    model: TokenizerSection = TokenizerSection()
    data: AnswerSection = AnswerSection()
    reward: RewardSection = RewardSection()
    output: ScoreFileSection = ScoreFileSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        lacks = self.data.missing("it names the answers to score") + self.output.missing()
        lacks += self.reward.missing("nothing says how answers are scored")
        return lacks + self.reward.missing_label(self.data)

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        pairs = self.data.chosen_key is not None
        kind = self.output.post_processor
        self.output.check_template(kind)
        if pairs and kind != "rows":
            message = f"--post_processor {kind} compares answers to an input, and --chosen_key says that rows are pairs"
            raise ConfigError(message, hint="drop one of them")
        notices = self.reward.check(given) + self.reward.what_is_right("verdicts") + self.data.check_chat(given)
        return notices + without_effect(
            given,
            (pairs, ["input_key", "output_key"], "--chosen_key says that rows are pairs"),
            (not pairs, ["rejected_key", "prompt_key"], "without --chosen_key a row holds one answer"),
            (kind != "rs", ["min_reward"], f"--post_processor is {kind}"),
            (kind != "csft", ["reward_template"], f"--post_processor is {kind}"),
        )


class BenchSampling(with_defaults(GroupSamplingSection, generate_max_len=128), with_defaults(SeededSampling, seed=0)):
    """How `bench` samples."""


class LoadSection(Section, title="load"):
    """What is measured, and where the report goes."""

    num_requests: int | None = flag(
        None, "requests to measure; prompts are repeated in order if there are fewer. None: one per prompt", ge=1
    )
    concurrency: int = flag(64, "requests in flight, at most", ge=1)
    warmup: int = flag(8, "requests before the measurement, with the last prompts", ge=0)
    fixed_length: bool = flag(False, "every response has --generate_max_len tokens, so that engines do the same work")
    out: str | None = flag(None, "FILE.json for the report, with hardware and versions; replaced if it exists")


class BenchConfig(Config):
    """All options of `bench`."""

    model: EngineModelSection = EngineModelSection()
    data: PromptSourceSection = PromptSourceSection()
    rollout: BenchSampling = BenchSampling()
    engine: OneEngineSection = OneEngineSection()
    load: LoadSection = LoadSection()

    def sampling(self) -> SamplingParams:
        """Return how responses are sampled; request number i has the seed of this plus i."""
        sampling = self.rollout.params(self.rollout.n_samples_per_prompt, self.rollout.seed)
        return replace(sampling, min_tokens=sampling.max_tokens) if self.load.fixed_length else sampling

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        return self.data.missing_data() + self.engine.missing(self.model)

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        self.rollout.check()
        self.sampling()
        lasts = (self.load.fixed_length, ["stop"], "--fixed_length gives every response the same length")
        return self.engine.check(given, self.rollout) + self.data.check_chat(given) + without_effect(given, lasts)


class ServerSection(Section, title="server"):
    """Where a server listens."""

    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0: all addresses of this machine")
    port: int = flag(5000, "port to listen on", ge=1, le=65535)


class QuerySection(Section, title="data"):
    """What `serve_rm` scores."""

    max_len: int | None = flag(
        None,
        "tokens per query at most; longer ones are refused. Models with LongRoPE compute by this number, as a run does"
        " by that of its longest sequence. None: the context of the reward model",
        ge=2,
    )


class ServeConfig(Config):
    """All options of `serve_rm`."""

    model: TokenizerSection = TokenizerSection()
    data: QuerySection = QuerySection()
    reward: RewardSection = RewardSection()
    server: ServerSection = ServerSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        return self.reward.missing("nothing says how answers are scored")

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        return self.reward.check(given)


class EngineServerSection(with_defaults(ServerSection, port=8000)):
    """Where `serve` listens."""


class EngineServerEngine(OneEngineSection):
    """The engine that `serve` serves."""

    max_model_len: int = flag(2048, "tokens of prompt and response together, at most", ge=2)
    lora_modules: str | None = flag(
        None,
        "LoRA adapters of the model, NAME=FOLDER for each, separated by commas: the field `model` of a request names"
        " one of them, or the model without any. None: no adapters",
    )
    vllm_enable_sleep: bool = flag(False, "let clients free the engine's GPU memory, with the call `sleep`")


class EngineServerConfig(Config):
    """All options of `serve`."""

    model: EngineModelSection = EngineModelSection()
    engine: EngineServerEngine = EngineServerEngine()
    server: EngineServerSection = EngineServerSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        return self.engine.missing(self.model)

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        modules = parse_lora_modules(self.engine.lora_modules)
        if any(module.name == self.model.pretrain for module in modules):
            message = f"--lora_modules calls an adapter {self.model.pretrain}, as --pretrain calls the model"
            raise ConfigError(message, hint="give it another name")
        if modules:
            # Refuses engines, and options of them, that go with no adapters.
            spec = self.engine.spec("", 1, SHARE_ALONE, lora_modules=modules, dtype=self.model.dtype)
            replace(spec, base_url=self.engine.base_url).check_kind(self.engine.engine)
        return self.engine.check(given)


class ConversationSection(Section, title="conversation"):
    """What a conversation begins with."""

    system: str | None = flag(None, "the system message")
    read_images: bool = flag(
        False, "read images, with a model that does: a line `/image PATH` puts one before the next question"
    )


class ConversationRows(TemplateVariableSection, PromptLengthSection, TemplateSection):
    """How a conversation becomes tokens."""


class ChatConfig(Config):
    """All options of `chat`."""

    model: EngineModelSection = EngineModelSection()
    data: ConversationRows = ConversationRows()
    conversation: ConversationSection = ConversationSection()
    rollout: ChatSampling = ChatSampling()
    engine: OneEngineSection = OneEngineSection()

    def missing(self) -> list[ConfigError]:
        """See `Config`."""
        return self.engine.missing(self.model)

    def check(self, given: Collection[str]) -> list[str]:
        """See `Config`."""
        self.rollout.check()
        given_both = self.data.input_template is not None
        reason = "--input_template takes the place of the chat template"
        if self.conversation.read_images and given_both:
            hint = "drop --input_template"
            raise ConfigError(
                "--read_images needs the chat template, which writes the tokens around an image", hint=hint
            )
        if self.conversation.read_images and self.engine.engine not in WITH_MODEL:
            raise ConfigError(f"engine {self.engine.engine} takes no images", hint="use --engine vllm or transformers")
        return self.engine.check(given, self.rollout) + without_effect(
            given, (given_both, ["chat_template_kwargs"], reason)
        )
