"""Rewards for the form of a response: expressions, presets and lengths, by themselves and in worker processes."""

import asyncio
import random
import time

import pytest

from record_testing import make_prompt, make_rollout
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.form import format_reward, length_reward
from rlhf_rollout.rewards.mix import build_reward, check_reward
from rlhf_rollout.rewards.sources import CallOptions, parse_sources

OK, WRONG, TIMEOUT = VerdictKind.OK, VerdictKind.WRONG, VerdictKind.TIMEOUT


def matches(expression, response, prompt="q"):
    result = format_reward(expression)([prompt + response], [prompt], [""], responses=[response])
    assert format_reward(expression)([prompt + response], [prompt], [""]) == result  # called as users' functions are
    assert result["verdicts"] == [{1.0: "ok", 0.0: "wrong"}[result["rewards"][0]]]
    return result["rewards"][0] == 1.0


@pytest.mark.parametrize(
    ("expression", "response", "is_match"),
    [
        ("[0-9]+", "42", True),
        ("[0-9]+", "42.", False),  # as a whole
        ("a.*b", "a\nb", True),
        ("think", "<think>hm\n\nhm</think>\n4", True),
        ("think", "<think>hm</think>", False),  # no answer
        ("think", "<think>a</think>b<think>c</think>d", False),
        ("think_answer", "<think>hm</think><answer>4</answer>", True),
        ("think_answer", "<think>so <answer> comes</think><answer>4</answer>", True),
        ("think_answer", " <think>hm</think>\n<answer>4\n</answer>\n", True),
        ("think_answer", "<think>hm</think><answer>4</answer>so", False),
        ("boxed", "so it is \\boxed{4}.", True),
        ("boxed", "so it is 4", False),
        ("boxed", "\\boxed{}", False),
        ("boxed", "\\boxed{} and {4}", True),
        ("boxed", "} \\boxed{4", False),
    ],
)
def test_format_is_that_of_the_whole_response(expression, response, is_match):
    assert matches(expression, response) is is_match


def by_definition(name, text):
    """Whether a text can be cut as the presets say, by trying all places."""

    def cuts(whole, opening, closing):
        for start in range(len(whole)):
            for end in range(start, len(whole)):
                if whole.startswith(opening, start) and whole.startswith(closing, end) and end >= start + len(opening):
                    yield whole[:start], whole[start + len(opening) : end], whole[end + len(closing) :]

    def has(text, tag):
        return f"<{tag}>" in text or f"</{tag}>" in text

    for before, thought, after in cuts(text, "<think>", "</think>"):
        if before.strip() or has(thought, "think") or has(after, "think"):
            continue
        if name == "think" and after.strip():
            return True
        for ahead, answer, behind in cuts(after, "<answer>", "</answer>") if name == "think_answer" else ():
            if not (ahead.strip() or behind.strip() or has(answer, "answer") or has(behind, "answer")):
                return True
    return False


@pytest.mark.parametrize("name", ["think", "think_answer"])
def test_format_presets_are_what_their_definition_says_of_any_sequence_of_tags(name):
    rng = random.Random(0)
    pieces = ["<think>", "</think>", "<answer>", "</answer>", "a", " ", "<", "think>", "\n"]
    texts = ["".join(rng.choices(pieces, k=rng.randint(0, 8))) for _ in range(3000)]
    ordered = ["<think>", "a", "</think>", "<answer>", "b", "</answer>"]
    texts += ["".join(rng.sample(ordered, k=rng.randint(3, 6))) for _ in range(300)]
    texts += ["".join(piece for piece in ordered if rng.random() < 0.8) for _ in range(300)]
    found = [matches(name, text) for text in texts]
    assert found == [by_definition(name, text) for text in texts]
    assert sum(found) > 20


@pytest.mark.parametrize("name", ["think", "think_answer", "boxed"])
@pytest.mark.parametrize("piece", ["<think>", "</think>", "<", "\\boxed{", "<answer>", " "])
def test_format_presets_take_time_in_proportion_to_the_response(name, piece):
    started = time.perf_counter()
    matches(name, "<think>" + piece * (1_000_000 // len(piece)))
    assert time.perf_counter() - started < 5  # trying all places would take hours


def test_format_preset_counts_a_thought_that_the_prompt_opens():
    assert matches("think_answer", "hm</think><answer>4</answer>", "2+2=<think>\n")
    assert not matches("think_answer", "hm</think><answer>4</answer>", "2+2=")
    assert not matches("hm</think>", "x</think>", "2+2=<think>")


@pytest.mark.parametrize(
    ("limit", "rewards", "verdicts"),
    [
        ("max=3", [1.0, 1.0, 0.0, 0.0], ["ok", "ok", "wrong", "wrong"]),
        ("target=3", [0.0, 1.0, 1 - 1 / 3, 0.0], None),  # 0, 3, 4 and 7 tokens
    ],
)
def test_length_is_counted_in_tokens(limit, rewards, verdicts):
    result = length_reward(limit)([""] * 4, [""] * 4, [""] * 4, token_ids=[[], [1] * 3, [1] * 4, [1] * 7])
    assert result["rewards"] == pytest.approx(rewards)
    assert result.get("verdicts") == verdicts


def score(rewards, texts, **options):
    async def run():
        reward = build_reward(parse_sources(rewards), CallOptions(**options))
        prompt = make_prompt("2+2=", "4")
        try:
            return await reward.score(prompt, [make_rollout(prompt, text) for text in texts])
        finally:
            await reward.close()

    return asyncio.run(run())


def test_built_in_rewards_are_sources_like_others():
    # The tokens of a response are its bytes and <eos>.
    verdicts = score("math,format:[0-9# ]+,length:max=7", ["#### 4", "#### 5", "so: #### 4"])
    assert [v.kind for v in verdicts] == [OK, WRONG, OK]
    assert [v.reward for v in verdicts] == [3.0, 2.0, 1.0]
    assert set(verdicts[0].extra) == {"reward_math", "reward_format", "reward_length"}
    for source in parse_sources("math,format:think,length:target=7"):
        assert check_reward(source, [make_prompt()]) is None


def test_expression_that_takes_forever_is_a_timeout_of_its_response():
    started = time.monotonic()
    verdicts = score("format:(a+)+b", ["aab", "a" * 60], timeout_s=2.0)
    assert [v.kind for v in verdicts] == [OK, TIMEOUT]
    assert time.monotonic() - started < 60
