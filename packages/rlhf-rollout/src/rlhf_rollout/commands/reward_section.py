"""Options of rewards, which `rlhf-rollout` and `rlhf` share. Each is declared once; `rlhf` adds those of training."""

from collections.abc import Collection

from rlhf_data.errors import ConfigError
from rlhf_data.options.checks import missing, without_effect
from rlhf_data.options.declare import Section, flag, flag_of, matching
from rlhf_rollout.commands.sections import ReferenceSection, words_of
from rlhf_rollout.rewards.sources import JUDGE_KINDS, CallOptions, JudgeOptions, RewardSource, parse_sources
from rlhf_rollout.rewards.user_function import EXTRAS, SAMPLE_ARGUMENTS, is_builtin
from rlhf_rollout.workers.guarded import WorkerOptions


class RewardSection(Section, title="reward"):
    """What scores responses."""

    remote_rm_url: str | None = flag(
        None,
        "what scores, separated by commas: Python FILE.py with `reward_func(queries, prompts, labels)`,"
        " module:function, http(s):// URLs of reward servers, which are asked in turn, a built-in reward (math,"
        " format:EXPRESSION, length:max=TOKENS, length:target=TOKENS, or code, which runs the label's tests in a"
        " sandbox), or a judge (judge:RUBRIC_FILE, pairwise:RUBRIC_FILE)",
    )
    reward_pretrain: str | None = flag(
        None,
        "reward models, separated by commas: Hugging Face folders or hub names of models with a scalar head",
        names_model=True,
    )
    reward_weights: str | None = flag(
        None,
        "one weight per source, separated by commas, those of --remote_rm_url first; all URLs together are one source."
        " None: 1 each. A negative first weight needs a =, as in --reward_weights=-1,1",
    )
    reward_timeout_s: float = flag_of(
        CallOptions.timeout_s,
        "time limit of a reward function per response, of all tests of a program, of one call of a reward server, and"
        " of one question to a judge with all its tries, in seconds",
    )
    reward_start_timeout_s: float = flag_of(
        WorkerOptions.start_timeout_s, "time limit of importing a reward function, in seconds"
    )
    reward_num_workers: int = flag_of(
        CallOptions.num_workers, "processes per reward function, and programs of `code`, which run at the same time"
    )
    reward_memory_gb: float | None = flag_of(
        WorkerOptions.memory_gb,
        "GiB of memory for each process of a reward function and for each program of `code`; None: half of this"
        " machine's memory for a function, 1 for a program",
    )
    reward_env: str | None = flag(
        None,
        "environment variables that reward functions receive, separated by commas, such as OPENAI_API_KEY; None: only"
        " those that say where programs, caches, devices and proxies are",
    )
    extra_keys: str | None = flag(
        None,
        "further keys of a row, separated by commas: reward functions receive their cells as keyword arguments, a list"
        " per key with an entry per response, reward servers as JSON fields, and agents as `session.extra`; None: none",
    )
    code_sandbox: str | None = flag(
        None, "URL of a SandboxFusion server that runs the programs of `code`; None: bubblewrap on this machine"
    )
    code_partial_reward: bool = flag(
        False, "the reward of `code` is the share of tests that pass, instead of 1 if all pass and else 0"
    )
    failed_reward: float | None = flag(
        None,
        "reward and score of a response whose reward or agent timed out or crashed; None: it has none and is masked in"
        " training",
    )
    success_threshold: float = flag(
        1.0,
        "lowest score of the first source that accuracy and pass@k count as right, unless the source says which"
        " responses are right, as a function does that returns `verdicts`",
    )
    reward_batch_size: int = flag_of(
        CallOptions.batch_size,
        "responses per call of a reward function, server or model, at most; a function gets all responses to a prompt"
        " in one call, together with those to as many prompts as are complete",
    )
    judge_url: str | None = flag(
        None,
        "address of the judges' OpenAI-compatible API, such as https://host/v1; its key is read from the environment"
        " variable RLHF_JUDGE_API_KEY",
    )
    judge_model: str | None = flag(None, "name of the judges' model")
    judge_num_calls: int = flag_of(JudgeOptions.num_calls, "questions that a judge is asked at the same time")
    normalize_reward: bool = flag(
        False, "shift and scale the scores of reward models by the mean and the standard deviation stored with them"
    )

    def sources(self) -> tuple[RewardSource, ...]:
        """Return the sources that the options name. Raises ConfigError unless there is one weight per source."""
        return parse_sources(self.remote_rm_url, self.reward_pretrain, self.reward_weights)

    @property
    def extra_names(self) -> tuple[str, ...]:
        """The keys of --extra_keys. Raises ConfigError for one that reward functions receive anyway."""
        names = tuple(dict.fromkeys(words_of(self.extra_keys)))
        if taken := [name for name in names if name in (*SAMPLE_ARGUMENTS, *EXTRAS)]:
            message = f"--extra_keys: every reward function receives something else called `{taken[0]}`"
            raise ConfigError(message, hint="give the column of the rows another name")
        return names

    def calls(self, step_prompts: int | None = None, num_samples: int = 1) -> CallOptions:
        """Return how the sources are called, with `num_samples` responses per prompt.

        `step_prompts` are scored together; None if nobody knows. Raises ConfigError for a bad name of a variable.
        """
        worker = WorkerOptions(
            start_timeout_s=self.reward_start_timeout_s,
            memory_gb=self.reward_memory_gb,
            env=words_of(self.reward_env),
            extra_keys=self.extra_names,
        )
        return CallOptions(
            timeout_s=self.reward_timeout_s,
            num_workers=self.reward_num_workers,
            batch_size=self.reward_batch_size,
            step_prompts=step_prompts,
            num_samples=num_samples,
            worker=worker,
            code_partial=self.code_partial_reward,
            judge=JudgeOptions(url=self.judge_url or "", model=self.judge_model or "", num_calls=self.judge_num_calls),
            **matching(CallOptions, self),
        )

    def missing(self, why: str) -> list[ConfigError]:
        """Return an error when nothing scores; `why` says what a reward is needed for."""
        if sources := self.sources():
            lacks = [] if all(source.kind not in JUDGE_KINDS for source in sources) else ["judge_url", "judge_model"]
            hint = "give --judge_url https://HOST/v1 and --judge_model NAME"
            return [missing(name, "a judge scores", hint) for name in lacks if getattr(self, name) is None]
        hint = "add --remote_rm_url FILE.py, which defines reward_func(queries, prompts, labels), or a reward server's"
        return [missing("remote_rm_url", why, f"{hint} http:// address, or --reward_pretrain MODEL")]

    def missing_label(self, data: ReferenceSection) -> list[ConfigError]:
        """Return an error when a reward cannot score without labels and rows have none."""
        names = [source.name for source in self.sources() if source.needs_label]
        if not names or data.label_key is not None:
            return []
        what = f"the reward {names[0]} compares a response with the label of its row"
        return [missing("label_key", what, "add --label_key KEY, the key of the reference answer in a row")]

    def what_is_right(self, numbers: str) -> list[str]:
        """Return a notice that says when a response counts as right in `numbers`, if users may expect something else:
        with several rewards, and with one that does not say which responses are right."""
        sources = self.sources()
        kinds = {source.kind for source in sources}
        if len(sources) < 2 and not kinds & {"model", *JUDGE_KINDS}:
            return []
        alone = "the reward model" if kinds == {"model"} else "the judge"
        which = f"the first of {len(sources)} rewards" if len(sources) > 1 else alone
        rule = f"a score of at least {self.success_threshold:g} (--success_threshold) counts as right"
        return [f"{numbers} follow {which}, {sources[0].name}: {rule}, unless it says so itself"]

    def check(self, given: Collection[str], num_samples: int = 1) -> list[str]:
        """Return notices for options of a kind of source that is not used.

        Raises ConfigError for invalid sources, and for a pairwise judge of groups with fewer than 2 responses
        (`num_samples`).
        """
        sources = self.sources()
        kinds = {source.kind for source in sources}
        if "pairwise" in kinds and num_samples < 2:
            message = "a pairwise judge compares the responses to a prompt, and here there is one"
            raise ConfigError(message, hint="with ppo and generate, give --n_samples_per_prompt 4; or use judge:FILE")
        self.calls()
        calls_own = any(source.kind == "function" and not is_builtin(source.targets[0]) for source in sources)
        takes = "server" in kinds or calls_own
        takes_batches = takes or "model" in kinds
        return without_effect(
            given,
            (not takes, ["extra_keys"], "no reward function or server of yours scores"),
            (kinds <= {"model"}, ["reward_timeout_s"], "no reward function or server scores"),
            ("function" not in kinds, ["reward_start_timeout_s", "reward_env"], "no reward function scores"),
            (not kinds & {"function", "code"}, ["reward_num_workers", "reward_memory_gb"], "no reward function scores"),
            ("code" not in kinds, ["code_sandbox", "code_partial_reward"], "--remote_rm_url does not name code"),
            (not kinds & set(JUDGE_KINDS), ["judge_url", "judge_model", "judge_num_calls"], "no judge scores"),
            (not takes_batches, ["reward_batch_size"], "no own function, server or model scores"),
            ("model" not in kinds, ["normalize_reward"], "there is no --reward_pretrain"),
        )
