"""Where steps end in a policy's tokens, and what a process reward model says of them, against plain transformers."""

import json

import numpy as np
import pytest
import torch

from rlhf_data.errors import ConfigError, DataError
from rlhf_models.checkpoint.files import write_fields
from rlhf_models.loading import load_config
from rlhf_models.process_reward import StepFormat, StepJudge, step_ends, stored_step_format
from rlhf_models.testing import tiny_model_dir

GOOD, BAD, PLACEHOLDER = 10, 12, 5


@pytest.mark.parametrize(
    ("pieces", "separator", "ends"),
    [
        (["a", "b", "\n", "c", ""], "\n", [2, 4]),  # the last token is a special one and belongs to the last step
        (["a", "\n", "b", "\n"], "\n", [1, 3]),
        (["a", ".\n", "\n", " ", "\n\n", "b"], "\n", [1, 5]),  # blank lines are no steps
        (["\n", "a", "\n"], "\n", [2]),
        (["a\nb\nc", "d"], "\n", [0, 1]),  # two steps end within one token
        (["a", "\n", "\n", "b"], "\n\n", [2, 3]),  # a separator of two tokens
        (["a", "##", "b", "##", "##"], "##", [1, 3]),
        (["a", "\nb", ""], "\n", [1, 2]),
        (["a", "\n", "b"], "", [2]),
        (["a", "", " ", ""], "\n", [3]),
        ([" ", "\n", ""], "\n", []),
        ([], "\n", []),
    ],
)
def test_steps_end_with_the_token_that_completes_the_separator(pieces, separator, ends):
    assert step_ends(pieces, separator) == ends


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tiny_model_dir(tmp_path_factory.mktemp("model"))
    write_fields(path, StepFormat(PLACEHOLDER, GOOD, BAD).fields)
    return path


def judge(folder, separator: str = "\n", **options) -> StepJudge:
    options = {"dtype": "float32", "attn_implementation": "auto", "device": "cpu", "batch_size": 4, **options}
    return StepJudge(str(folder), separator, **options)


def probability(folder, tokens: list[int]) -> float:
    """Return what plain transformers says after these tokens."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([tokens])).logits[0, -1].double()
    good, bad = logits[GOOD].exp(), logits[BAD].exp()
    return float(good / (good + bad))


def test_each_step_is_judged_after_a_placeholder_behind_its_tokens(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {name: tokenizer(text)["input_ids"] for name, text in (("p", "one\ntwo"), ("a", "an\n"), ("b", "be"))}
    end = tokenizer.eos_token_id
    tokens = [*ids["p"], *ids["a"], *ids["b"], end]
    mask = np.arange(len(tokens)) >= len(ids["p"])
    [found, same] = judge(folder)([(np.array(tokens), mask), (np.array(tokens), mask)])
    first = [*ids["p"], *ids["a"], PLACEHOLDER]
    second = [*first, *ids["b"], PLACEHOLDER]
    at = len(ids["p"]) + len(ids["a"]) - 1
    assert [position for position, _ in found] == [at, len(tokens) - 1]
    assert [value for _, value in found] == pytest.approx([probability(folder, first), probability(folder, second)])
    assert found == same


def test_steps_stay_within_a_turn_and_environment_tokens_are_read_but_not_judged(folder):
    # The first turn ends with two special tokens, which come after its placeholder.
    tokens = np.array([20, 30, 31, 2, 0, 40, 41, 50])
    mask = np.array([False, True, True, True, True, False, False, True])
    [found] = judge(folder, "")([(tokens, mask)])
    first = [20, 30, 31, PLACEHOLDER]
    expected = [probability(folder, first), probability(folder, [*first, 2, 0, 40, 41, 50, PLACEHOLDER])]
    assert [position for position, _ in found] == [4, 7]
    assert [value for _, value in found] == pytest.approx(expected)


def test_placeholders_of_the_policy_end_its_steps(folder):
    tokens = np.array([20, PLACEHOLDER, 30, PLACEHOLDER, 31, 32, PLACEHOLDER, 33])
    [found] = judge(folder)([(tokens, np.arange(8) >= 2)])
    assert [position for position, _ in found] == [3, 6]
    expected = [probability(folder, tokens[:4].tolist()), probability(folder, tokens[:7].tolist())]
    assert [value for _, value in found] == pytest.approx(expected)


def test_response_without_text_has_no_steps_and_stray_tokens_are_refused(folder):
    ask = judge(folder)
    empty = np.array([20, 21])
    assert ask([(empty, np.zeros(2, bool)), (np.array([20, 0]), np.array([False, True]))]) == [[], []]
    assert ask([]) == []
    with pytest.raises(DataError, match="512 embedding rows and got the token id 512"):
        ask([(np.array([20, 512]), np.ones(2, bool))])


def test_format_is_read_back_and_a_model_without_one_is_refused(folder, tmp_path):
    assert stored_step_format(load_config(folder)) == StepFormat(PLACEHOLDER, GOOD, BAD)
    plain = tiny_model_dir(tmp_path)
    assert stored_step_format(load_config(plain)) is None
    with pytest.raises(ConfigError, match=r"judges no steps: its config\.json has no process_reward"):
        judge(plain)


@pytest.mark.parametrize(
    "fields",
    [
        [5, 10, 12],
        {"placeholder": 5, "good": 10},
        {"placeholder": 5, "good": 10, "bad": 10},
        {"placeholder": 5, "good": 10, "bad": -1},
        {"placeholder": 5, "good": 10, "bad": "-"},
    ],
)
def test_format_that_cannot_work_is_refused(folder, tmp_path, fields):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"process_reward": fields}))
    with pytest.raises(ConfigError, match=r"process_reward of a model's config\.json is"):
        stored_step_format(load_config(tmp_path))


def test_placeholders_count_among_the_tokens_that_the_model_can_read(tmp_path):
    path = tiny_model_dir(tmp_path, max_position_embeddings=4)
    write_fields(path, StepFormat(PLACEHOLDER, GOOD, BAD).fields)
    asked = judge(path, "")
    three = np.array([40, 41, 42], np.int32)
    [[(end, _)]] = asked([(three, three > 40)])
    assert end == 2
    four = np.array([40, 41, 42, 43], np.int32)
    with pytest.raises(DataError, match="the process reward model has a context of 4 tokens and got a sequence of 5"):
        asked([(four, four > 40)])
