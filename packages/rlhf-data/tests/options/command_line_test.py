"""Flags of other programs beside a command's own: what they set, what they say, and what they refuse."""

import pytest
from pydantic import ValidationError

from rlhf_data.errors import ConfigError, FeatureError
from rlhf_data.options.command_line import CommandLine
from rlhf_data.options.declare import Config, Section, flag, one_of
from rlhf_data.options.flags import absent, mapped, moot, renamed, sets


class _Optimizer(Section, title="optimizer"):
    rate: float = flag(0.5, "peak learning rate", gt=0)
    betas: tuple[float, float] = flag((0.9, 0.95), "two betas")
    fused: bool = flag(False, "one kernel")
    kind: one_of(("adam", "muon")) = flag("adam", "which one")


class _Demo(Config):
    optimizer: _Optimizer = _Optimizer()


FOREIGN = {
    "adam.lr": renamed("rate"),
    "adam.betas": renamed("betas"),
    "adam.fused": renamed("fused"),
    "use_muon": sets(kind="muon", notice="muon has no betas"),
    "style": mapped({"quick": {"fused": "true", "rate": "0.25"}, "plain": {}}),
    "flash": moot("the quickest one is found"),
    "offload": absent("offloading", hint="use --fused"),
    "rate": absent("this flag", hint="it is the command's own"),
    "elsewhere": renamed("other_option"),
}
LINE = CommandLine(config=_Demo, prog="demo", foreign=FOREIGN)


def optimizer(*argv):
    return LINE.parse(argv).config.optimizer


def failure(*argv):
    with pytest.raises(ConfigError) as caught:
        LINE.parse(argv)
    assert "\n\nhint: " in str(caught.value)
    return str(caught.value)


def test_renamed_flag_sets_the_option_and_the_last_spelling_wins():
    assert optimizer("--adam.lr", "0.125").rate == 0.125
    assert optimizer("--adam.lr=2", "--rate", "3").rate == 3
    assert optimizer("--rate", "3", "--adam.lr=2").rate == 2
    assert optimizer("--adam.betas", "0.5", "0.75", "--adam.fused").betas == (0.5, 0.75)
    assert optimizer("--adam.fused", "false").fused is False


def test_renamed_flag_counts_as_given_by_the_options_name():
    assert LINE.parse(["--adam.lr", "0.125", "--adam.fused", "false"]).given == {"rate"}


def test_sets_gives_its_values_and_its_notice_unless_it_is_off():
    parsed = LINE.parse(["--use_muon", "--fused"])
    assert (parsed.config.optimizer.kind, parsed.config.optimizer.fused) == ("muon", True)
    assert parsed.notices == ("muon has no betas",)
    off = LINE.parse(["--use_muon", "false"])
    assert (off.config.optimizer.kind, off.notices) == ("adam", ())
    words = "--use_muon is maybe; it must be true or false\n\nhint: `demo --help` says what each flag does"
    assert failure("--use_muon", "maybe") == words


def test_mapped_word_stands_for_values():
    assert optimizer("--style", "quick") == _Optimizer(fused=True, rate=0.25)
    assert optimizer("--style", "plain") == _Optimizer()
    assert "did you mean `quick`?" in failure("--style", "quik")
    assert "known: plain, quick\n\nhint: `demo --help`" in failure("--style", "zzz")


def test_moot_flag_is_one_notice_however_often_it_is_given():
    parsed = LINE.parse(["--flash", "yes", "--flash", "yes"])
    assert parsed.notices == ("--flash has no effect: the quickest one is found",)


def test_absent_feature_is_an_error_that_names_it_unless_the_word_asks_for_nothing():
    assert failure("--offload", "cpu") == "not available: offloading (--offload cpu)\n\nhint: use --fused"
    assert "not available: offloading (--offload)\n" in failure("--offload")
    assert LINE.parse(["--offload", "-1"]).notices == ()


def test_two_flags_that_set_an_option_differently_are_refused():
    text = failure("--kind", "adam", "--use_muon")
    assert text == "--kind and --use_muon set --kind to adam and to muon\n\nhint: give one of them"
    assert "--style and --style set" not in text
    assert optimizer("--kind", "muon", "--use_muon").kind == "muon"


def test_own_flag_is_stronger_than_a_foreign_one_and_unknown_options_have_none():
    assert optimizer("--rate", "4").rate == 4
    assert "unknown flag `--elsewhere`" in failure("--elsewhere", "1")


def test_foreign_flags_are_not_in_the_help_and_not_among_the_guesses():
    assert "adam.lr" not in LINE.parser().format_help()
    assert "did you mean" not in failure("--adamlr", "1")


class _Needy(_Demo):
    def missing(self):
        return [ConfigError("--rate is missing")] if self.optimizer.rate == 0.5 else []


def test_dry_run_collects_what_is_missing_or_not_available_and_a_run_refuses_it():
    line = CommandLine(config=_Needy, prog="demo", foreign=FOREIGN)
    parsed = line.parse(["--dry_run", "--offload", "cpu", "--offload", "disk"])
    assert [str(error) for error in parsed.missing] == ["--rate is missing"]
    assert [str(error).partition("\n")[0] for error in parsed.unavailable] == [
        "not available: offloading (--offload cpu)",
        "not available: offloading (--offload disk)",
    ]
    assert isinstance(parsed.unavailable[0], FeatureError)
    with pytest.raises(FeatureError, match="--offload cpu"):
        line.parse(["--offload", "cpu"])
    with pytest.raises(ConfigError, match="--rate is missing"):
        line.parse([])
    assert line.parse(["--rate", "1"]).missing == ()


@pytest.mark.parametrize(
    ("argv", "notices"),
    [
        (["--rate", "1", "--fused"], ()),
        (["--adam.lr", "1"], ("rate: other",)),
        (["--adam.lr=1"], ("rate: other",)),
        (["--flash"], ("--flash has no effect: the quickest one is found", "none: other")),
    ],
)
def test_compare_is_asked_when_a_flag_of_the_other_program_was_given(argv, notices):
    line = CommandLine(
        config=_Demo,
        prog="demo",
        foreign=FOREIGN,
        compare=lambda config, given: [f"{' '.join(given) or 'none'}: other"],
    )
    assert line.parse(argv).notices == notices


@pytest.mark.parametrize("made", [_Optimizer(), _Demo()], ids=["section", "config"])
def test_options_cannot_be_changed_and_have_no_others(made):
    name = next(iter(type(made).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(made, name, getattr(made, name))
    with pytest.raises(ValidationError, match="not permitted"):
        type(made)(unknown=1)
    assert set(type(made)().model_dump()) == set(type(made).model_fields)
