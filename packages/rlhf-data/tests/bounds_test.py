"""Bounds of the fields of a dataclass, and options that are made from them."""

import math
from dataclasses import dataclass

import pytest

from rlhf_data.bounds import bounded, check_bounds
from rlhf_data.errors import ConfigError
from rlhf_data.options.command_line import CommandLine
from rlhf_data.options.declare import Config, Section, flag_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    name: str = "none has bounds"
    count: int = bounded(1, ge=1)
    share: float | None = bounded(None, gt=0, le=1)
    betas: tuple[float, float] = bounded((0.9, 0.95), ge=0, lt=1)
    seconds: float = bounded(gt=0, lt=math.inf)
    middle: tuple[float, ...] = bounded(gt=0, lt=1)
    cold: float = bounded(lt=0)

    def __post_init__(self):
        check_bounds(self)


NEEDED = {"seconds": 0.1, "middle": (0.25,), "cold": -3.0}


class NumberSection(Section, title="numbers"):
    count: int = flag_of(Numbers.count, "how many")
    share: float | None = flag_of(Numbers.share, "of all", default=0.5)


class NumberConfig(Config):
    numbers: NumberSection = NumberSection()


@pytest.mark.parametrize(
    ("values", "message", "allowed"),
    [
        ({"count": 0}, "``count`` is 0; it must be at least 1", "count=1"),
        ({"share": 0.0}, "``share`` is 0.0; it must be above 0 and at most 1", "share=None"),
        ({"share": 1.5}, "``share`` is 1.5; it must be above 0 and at most 1", "share=None"),
        ({"share": math.nan}, "``share`` is nan; it must be above 0 and at most 1", "share=None"),
        ({"betas": (0.9, 1.0)}, "``betas`` is (0.9, 1.0); each must be at least 0 and below 1", "betas=0.9 0.95"),
        ({"betas": (-0.1, 0.5)}, "``betas`` is (-0.1, 0.5); each must be at least 0 and below 1", "betas=0.9 0.95"),
        ({"seconds": math.inf}, "``seconds`` is inf; it must be above 0 and below inf", "seconds=1"),
        ({"middle": (0.0, 0.5)}, "``middle`` is (0.0, 0.5); each must be above 0 and below 1", "middle=0.5 0.5"),
        ({"cold": 0.0}, "``cold`` is 0.0; it must be below 0", "cold=-1"),
    ],
)
def test_a_number_out_of_its_bounds_is_refused_with_one_that_is_allowed(values, message, allowed):
    with pytest.raises(ConfigError) as caught:
        Numbers(**NEEDED | values)
    assert str(caught.value) == f"{message}\n\nhint: use ``{allowed}``, for example"


@pytest.mark.parametrize("values", [{"count": 1, "share": 1.0, "betas": (0.0, 0.999)}, {"share": None}])
def test_numbers_at_their_bounds_and_none_are_taken(values):
    assert all(getattr(Numbers(**NEEDED, **values), name) == value for name, value in values.items())


def test_an_option_has_the_default_and_the_bounds_of_the_field():
    line = CommandLine(config=NumberConfig, prog="x")
    assert line.parse([]).config.numbers == NumberSection(count=1, share=0.5)
    assert line.parse(["--share", "None"]).config.numbers.share is None
    for words, message in (("--count 0", "--count is 0; it must be at least 1"), ("--share 2", "at most 1")):
        with pytest.raises(ConfigError, match=message):
            line.parse(words.split())
