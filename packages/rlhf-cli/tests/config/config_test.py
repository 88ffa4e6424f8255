"""The schema, its sources, and the checks across fields."""

import shlex

import pytest

from rlhf_cli.builtin import RECIPE_FILE
from rlhf_cli.commands.ppo import COMMAND_LINE, lowest_layer
from rlhf_cli.config.offline import DpoConfig, KdConfig, KtoConfig, PrmConfig, RmConfig, SftConfig
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.preflight.devices import on_cpu
from rlhf_data.errors import ConfigError
from rlhf_data.options.command_line import CommandLine, Parsed, read_toml, to_toml
from rlhf_data.options.declare import options
from rlhf_data.options.exits import with_flags

GIVEN = "--pretrain m --prompt_data p.jsonl --remote_rm_url r.py"


IMAGES = "--image_key i --apply_chat_template"


def ppo(*argv: str) -> Parsed[PpoConfig]:
    return CommandLine(config=PpoConfig, prog="rlhf ppo", recipe=lowest_layer).parse(argv)


def sft(*argv: str) -> Parsed[SftConfig]:
    return CommandLine(config=SftConfig, prog="rlhf sft").parse(argv)


def failure(*argv: str, command=ppo) -> str:
    with pytest.raises(ConfigError) as caught:
        command(*argv)
    text = with_flags(str(caught.value))
    assert "\n\nhint: " in text
    return text


# -- where values come from ---------------------------------------------------------------------------------------


def test_parse_nothing_given_takes_the_recipe():
    config = ppo().config
    assert config.model.pretrain == "builtin"
    assert config.rollout.rollout_batch_size == 32
    assert config.algorithm.lambd == 1.0  # not in the recipe: the schema's default


def test_parse_model_and_prompts_given_leaves_the_recipe_out():
    config = ppo(*GIVEN.split()).config
    assert config.rollout.rollout_batch_size == 1024
    assert config.data.eval_data is None


def test_parse_flag_beats_file_beats_recipe(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[rollout]\nrollout_batch_size = 64\nn_samples_per_prompt = 8\n[training]\nseed = 7\n")
    parsed = ppo("--config", str(file), "--rollout_batch_size", "16")
    rollout = parsed.config.rollout
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt, rollout.generate_max_len) == (16, 8, 32)
    assert parsed.config.training.seed == 7
    assert parsed.given == {"rollout_batch_size", "n_samples_per_prompt", "seed"}


def test_to_toml_says_where_a_value_comes_from(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[rollout]\nrollout_batch_size = 64\nn_samples_per_prompt = 8\n")
    words = ["--preset", "grpo", "--config", str(file), "--rollout_batch_size", "32", "--wandb_group", "# flag"]
    parsed = COMMAND_LINE.parse(words)
    lines = to_toml(parsed.config, parsed.origins).splitlines()
    assert "rollout_batch_size = 32  # flag" in lines
    assert "n_samples_per_prompt = 8  # file" in lines
    assert 'wandb_group = "# flag"  # flag' in lines
    assert any(line.endswith("  # preset") for line in lines)
    assert "temperature = 1.0" in lines  # a default
    built_in = ppo()
    assert 'pretrain = "builtin"  # recipe' in to_toml(built_in.config, built_in.origins).splitlines()
    file.write_text("\n".join(lines))
    assert ppo("--config", str(file)).config == parsed.config


@pytest.mark.parametrize("typed", [r"Q: {}\nA: ", "Q: {}\nA: "])
def test_template_typed_in_a_shell_has_newlines_and_keeps_them(tmp_path, typed):
    config = ppo("--input_template", typed).config
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert config.data.input_template == ppo("--config", str(file)).config.data.input_template == "Q: {}\nA: "


def test_recipe_file_has_only_keys_of_the_schema():
    assert set(read_toml(RECIPE_FILE, PpoConfig)) <= {option.name for option in options(PpoConfig)}


# -- flags ----------------------------------------------------------------------------------------------------------


def test_options_every_name_is_one_flag_with_a_description():
    for config_class in (PpoConfig, SftConfig, RmConfig, DpoConfig, KtoConfig, PrmConfig, KdConfig):
        found = list(options(config_class))
        flags = [flag for option in found for flag in option.flags]
        assert len(flags) == len(set(flags))
        assert all(option.info.description for option in found)


def test_help_lists_every_flag_with_its_default():
    text = CommandLine(config=PpoConfig, prog="rlhf ppo").parser().format_help()
    assert all(f"--{option.name}" in text for option in options(PpoConfig))
    assert "prompts per step (default: 1024)" in text
    metavars = ("rollout_batch_size N", "gamma X", "value_clip X", "pretrain TEXT", "adam_betas X X", "mask_stale N")
    for words in (*metavars, "kl_estimator {k1,k2,k3}", "bf16 [true|false]", "eps_clip_low_high X [X ...]"):
        assert f"--{words}" in text


@pytest.mark.parametrize(
    ("words", "value"), [([], True), (["true"], True), (["false"], False), (["False"], False)], ids=str
)
def test_parse_switch_takes_no_word_or_a_truth_value(words, value):
    config = ppo("--colocate_all_models", *words).config
    assert config.placement.colocate_all_models is value


def test_parse_flag_values_are_typed():
    config = ppo("--adam_betas", "0.8", "0.9", "--top_k", "-1", "--critic_pretrain", "None", "--gamma=0.5").config
    assert config.training.adam_betas == (0.8, 0.9)
    assert (config.rollout.top_k, config.model.critic_pretrain, config.algorithm.gamma) == (-1, None, 0.5)


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        ("--pretrian x", "unknown flag `--pretrian`", "did you mean `--pretrain`?"),
        ("--actor-learning-rate=1", "unknown flag `--actor-learning-rate`", "did you mean `--actor_learning_rate`?"),
        ("--use_zpg_now", "unknown flag `--use_zpg_now`", "`rlhf ppo --help` lists the flags"),
        (
            "--ref_nodes 1 --zzz=k --pretrian m --ref_nodes 2",
            "unknown flags `--ref_nodes`, `--zzz`, `--pretrian`",
            "nearest to `--ref_nodes` is `--ref_num_nodes`; nearest to `--pretrian` is `--pretrain`; `rlhf",
        ),
        ("stray", "`stray` belongs to no flag", "write its flag before it"),
        ("--advantage_estimator gea", "unknown value `gea`; known: dr_grpo, gae, group_norm", "did you mean `gae`?"),
        ("--advantage_estimator grpo", "unknown value `grpo`; known: dr_grpo, gae", "GRPO is `group_norm` here"),
        ("--kl_estimator k4", "--kl_estimator: unknown value `k4`; known: k1, k2, k3", ""),
        ("--seed", "--seed: expected one argument", "--help` lists the flags"),
    ],
)
def test_parse_unknown_name_fails_with_the_nearest(argv, message, hint):
    text, _, given_hint = failure(*shlex.split(argv)).partition("\n\nhint: ")
    assert message in text
    assert hint in given_hint


@pytest.mark.parametrize("flag", ["--asynchronous", "--head", "--node"])
def test_parse_flag_that_resembles_no_other_gets_no_guess(flag):
    assert "did you mean" not in failure(flag)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--rollout_batch_size many", "--rollout_batch_size is many; it must be a whole number"),
        ("--rollout_batch_size 0", "--rollout_batch_size is 0; it must be at least 1"),
        (
            "--temperature 0 --n_samples_per_prompt 1 --train_batch_size 32 --advantage_estimator reinforce",
            "--temperature is 0; it must be above 0 for training",
        ),
        ("--bf16 maybe", "--bf16 is maybe; it must be true or false"),
        ("--adam_betas 0.9 1.5", "--adam_betas is (0.9, 1.5); each must be at least 0 and below 1\n\nhint: use"),
        ("--value_clip 0", "must be above 0.0\n\nhint: --value_clip 0.5 is the default; `rlhf ppo --help` says"),
        ("--stop END ''", "--stop: a text that ends responses must not be empty"),
        ("--stop END --agent_func_path a.py", "--stop ends responses of single turns, and an agent says"),
        ("--eps_clip_low_high 1.5 0.2", "--eps_clip_low_high is 1.5; it must be below 1"),
        ("--image_key i --apply_chat_template false", "--image_key needs a chat template"),
        (f"{IMAGES} --agent_func_path a.py --group_by state", "--image_key needs another comparison"),
        (f"{IMAGES} --agent_func_path a.py --agent_history split", "--image_key needs histories as they were written"),
        (f"{IMAGES} --packing_samples --share_prompts", "a model that reads images is trained on whole"),
        (f"{IMAGES} --ds_tensor_parallel_size 2", "a model that reads images is trained on whole"),
    ],
)
def test_parse_impossible_value_says_what_is_allowed(argv, message):
    assert message in failure(*shlex.split(argv))


def test_every_value_that_an_option_refuses_is_refused_with_a_hint():
    refused = []
    for option in options(PpoConfig):
        value = "zzz" if option.choices else "-1e9"
        try:
            ppo(f"--{option.name}={value}", *[value] * (option.num_values - 1))
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert not [text for text in refused if "\n\nhint: " not in text]


def test_stop_is_one_text_or_several_on_the_command_line_and_in_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[rollout]\nstop = "END"\n')
    assert ppo("--config", str(file)).config.rollout.stop == ("END",)
    config = ppo("--stop", r"\n\nQuestion:", "a b").config
    assert config.rollout.stop == ("\n\nQuestion:", "a b")
    file.write_text(to_toml(config))
    assert ppo("--config", str(file)).config.rollout.stop == ("\n\nQuestion:", "a b")
    assert ppo("--config", str(file), "--stop", "None").config.rollout.stop is None


# -- the TOML file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ("[trainig]\nseed = 1\n", "unknown section `trainig`", "did you mean [training]?"),
        ("[training]\nsed = 1\n", "unknown key `sed` in [training]", "did you mean `seed`?"),
        ("[training]\ngamma = 1\n", "unknown key `gamma` in [training]", "a key of the section [algorithm]"),
        ("seed = 1\n", "unknown section `seed`", "a key of the section [training]"),
        ("training = 1\n", "`training` must be a section", "write [training]"),
    ],
)
def test_read_toml_unknown_name_fails_with_the_nearest(tmp_path, content, message, hint):
    file = tmp_path / "run.toml"
    file.write_text(content)
    text = failure("--config", str(file))
    assert message in text
    assert hint in text


def test_read_toml_missing_or_broken_file_is_named(tmp_path):
    (tmp_path / "broken.toml").write_text("[rollout\n")
    assert "broken.toml is not TOML" in failure("--config", str(tmp_path / "broken.toml"))
    missing = failure("--config", str(tmp_path / "brokn.toml"))
    assert "brokn.toml does not exist" in missing
    assert "did you mean" in missing


def test_cispo_has_no_lower_bound_unless_it_is_given():
    assert ppo("--policy_loss_type", "cispo").config.algorithm.clip_range == (0.999, 0.2)
    assert ppo("--policy_loss_type", "cispo", "--eps_clip", "0.1").config.algorithm.clip_range == (0.1, 0.1)


def test_parse_clip_range_of_a_flag_stands_instead_of_that_of_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[algorithm]\neps_clip_low_high = [0.1, 0.3]\n")
    assert ppo("--config", str(file)).config.algorithm.clip_range == (0.1, 0.3)
    assert ppo("--config", str(file), "--eps_clip", "0.1").config.algorithm.clip_range == (0.1, 0.1)
    file.write_text("[algorithm]\neps_clip_low_high = [0.5, 0.4]\n")
    for flag, clip_range in (("--clip_eps_low", (0.1, 0.2)), ("--clip_eps_high", (0.2, 0.1))):
        assert ppo("--config", str(file), flag, "0.1").config.algorithm.clip_range == clip_range
    file.write_text("[algorithm]\nclip_eps_low = 0.1\n")
    assert ppo("--config", str(file), "--clip_eps_high", "0.3").config.algorithm.clip_range == (0.1, 0.3)
    file.write_text("[algorithm]\neps_clip = 0.1\nclip_eps_low = 0.1\n")
    with pytest.raises(ConfigError, match="set the same clip range"):
        ppo("--config", str(file))


def test_parse_none_unsets_a_pair_of_a_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[reward]\nreward_clip_range = 5.0\n")
    assert ppo("--config", str(file)).config.reward.reward_clip_range == (-5.0, 5.0)
    assert ppo("--config", str(file), "--reward_clip_range", "None").config.reward.reward_clip_range is None


def test_sources_are_functions_one_server_and_models_with_a_weight_each():
    urls = "a.py, http://one/get_reward, math:grade, https://two/get_reward"
    argv = ["--remote_rm_url", urls, "--reward_pretrain", "m, owner/name", "--reward_weights", "1,0.5,2,-1,3"]
    found = [(source.kind, source.targets, source.weight) for source in ppo(*argv).config.reward.sources()]
    assert found == [
        ("function", ("a.py",), 1.0),
        ("server", ("http://one/get_reward", "https://two/get_reward"), 0.5),
        ("function", ("math:grade",), 2.0),
        ("model", ("m",), -1.0),
        ("model", ("owner/name",), 3.0),
    ]


# -- what concerns several fields -----------------------------------------------------------------------------------


def test_check_ppo_defaults_give_no_notice():
    assert ppo().notices == ()
    assert ppo(*GIVEN.split()).notices == ()
    assert ppo("--advantage_estimator", "group_norm").notices == ()


def test_on_cpu_names_only_what_was_given():
    assert on_cpu({"seed"}) == []
    notices = on_cpu({"seed", "enforce_eager", "critic_num_nodes", "adam_offload", "ref_reward_offload"})
    names = ["--enforce_eager", "--adam_offload", "--ref_reward_offload", "--critic_num_nodes"]
    assert [notice.split()[0] for notice in notices] == names


def test_sft_needs_a_model_and_examples():
    assert "--pretrain is missing" in failure(command=sft)
    assert "--dataset is missing" in failure("--pretrain", "builtin", command=sft)
    assert sft("--pretrain", "builtin", "--dataset", "x.jsonl").config.training.learning_rate == 5e-6
