"""Reward sources by name: comma lists, weights, and names for metrics."""

import pytest

from rlhf_data.errors import ConfigError
from rlhf_rollout.rewards.sources import RewardSource, metric_names, parse_sources


def test_parse_sources_gathers_urls_at_the_place_of_the_first():
    sources = parse_sources("a.py:grade, http://one:1/r ,m.n:f,https://two/r", "org/model,dir/")
    assert sources == (
        RewardSource(kind="function", targets=("a.py:grade",)),
        RewardSource(kind="server", targets=("http://one:1/r", "https://two/r")),
        RewardSource(kind="function", targets=("m.n:f",)),
        RewardSource(kind="model", targets=("org/model",)),
        RewardSource(kind="model", targets=("dir/",)),
    )


def test_parse_sources_weights_follow_the_order():
    sources = parse_sources("http://one,a.py,http://two", "m", weights="0.5, -1,2")
    assert [(source.kind, source.weight) for source in sources] == [("server", 0.5), ("function", -1), ("model", 2)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a.py,,b.py", "`a.py,,b.py` names nothing between two commas\n\nhint: drop one"),
        ("a.py,", "names nothing"),
        (",", "names nothing"),
        ("a.py, b.py,a.py", "names a.py twice"),
        ("http://one,http://one", "names http://one twice"),
    ],
)
def test_parse_sources_empty_or_repeated_names_are_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        parse_sources(text)
    with pytest.raises(ConfigError, match=says):
        parse_sources("", text)


def test_parse_sources_knows_built_in_rewards_and_judges():
    sources = parse_sources("math,format:<a>.*://x/.*</a>, judge:dir/nice.toml ,pairwise:b.txt,length:max=9,http://s/r")
    assert [(source.kind, source.targets, source.name) for source in sources] == [
        ("function", ("math",), "math"),
        ("function", ("format:<a>.*://x/.*</a>",), "format"),
        ("judge", ("dir/nice.toml",), "nice"),
        ("pairwise", ("b.txt",), "b"),
        ("function", ("length:max=9",), "length"),
        ("server", ("http://s/r",), "s"),
    ]


@pytest.mark.parametrize(("weights", "count"), [("1", 1), ("1,1,1", 3)])
def test_parse_sources_other_number_of_weights_names_the_sources(weights, count):
    with pytest.raises(ConfigError, match=rf"{count} weights for 2 rewards: reward, host:5000\n\nhint: give one"):
        parse_sources("dir/reward.py,http://host:5000/get_reward,http://other", weights=weights)


def test_metric_names_are_plain_and_different():
    sources = parse_sources("a/reward.py,b/reward.py,c/reward.py,http://host:5000/get_reward,m.n:f", "org/a b")
    assert metric_names(sources) == ("reward", "reward_2", "reward_3", "host_5000", "m.n_f", "a_b")


def test_metric_names_stay_different_when_a_source_is_called_like_a_number():
    assert metric_names(parse_sources("a/x.py,x_2.py,b/x.py")) == ("x", "x_2", "x_3")


@pytest.mark.parametrize(
    ("kind", "targets", "says"),
    [
        ("oracle", ("x",), "unknown kind of reward `oracle`"),
        ("function", ("a.py", "b.py"), "a reward function needs one target, got a.py, b.py"),
        ("model", (), "a reward model needs one target, got none"),
    ],
)
def test_reward_source_that_is_none_is_refused(kind, targets, says):
    with pytest.raises(ConfigError, match=says):
        RewardSource(kind=kind, targets=targets)


def test_name_of_a_server_has_no_secret():
    for url in ("http://me:s3cret@far:5000/x", "http://far:5000?key=s3cret", "http://far:5000/?key=s3cret"):
        assert RewardSource(kind="server", targets=(url,)).name.removeprefix("***@") == "far:5000"
