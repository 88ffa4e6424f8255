"""Data presets on small files in the form of the known data sets, with what each row must become written out."""

import json

import pytest

from record_testing import write_jsonl
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.load import load_examples, make_encoder
from rlhf_data.keys import check_keys
from rlhf_data.options.sections import ExampleSection, SampleSection
from rlhf_data.prompts import load_prompts
from rlhf_data.rows.presets import boxed
from rlhf_data.rows.row import RowErrors
from rlhf_data.rows.sources import open_sources
from rlhf_data.testing import ByteTokenizer

SUMS = {"question": "How many?", "answer": "There are 600*2 = <<600*2=1200>>1,200.\n#### 1,200 "}
MATHS = {"problem": "Solve.", "level": "Level 1", "solution": r"First \boxed{1}, then $\boxed{\frac{1}{\{2\}}}$."}
TALK = "\n\nHuman: Hi\nthere\n\nAssistant: Hello\n\nHuman: And now?\n\nAssistant: "
PAIR = {"chosen": TALK + "Human: means a person", "rejected": TALK + "No\n\nAssistant: Or yes"}
ASKED = [
    {"role": "user", "content": "Hi\nthere"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "And now?"},
]
QUESTION = {"role": "user", "content": "Why?"}
FEEDBACK = {
    "prompt": "Why?",
    "prompt_id": "x",
    "chosen": [QUESTION, {"role": "assistant", "content": "Because."}],
    "rejected": [QUESTION, {"role": "assistant", "content": "No."}],
    "score_chosen": 8.5,
    "score_rejected": 6.0,
}
FUNCTION = {
    "task_id": "HumanEval/0",
    "prompt": "def one():\n",
    "canonical_solution": "    return 1\n",
    "test": "def check(f):\n    assert f() == 1\n",
    "entry_point": "one",
}
PROGRAM = {
    "question": "Double it.",
    "solutions": json.dumps(["print(2 * int(input()))", "other"]),
    "input_output": json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"], "note": 1}),
    "starter_code": "",
    "url": "u",
}
CALL = PROGRAM | {
    "solutions": "",
    "starter_code": "def f(x):\n",
    "input_output": json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [2]}),
}
# A row of peiyi9979/Math-Shepherd: the label is the text again, with + or - in place of each placeholder.
SHEPHERD = {
    "input": "What is 2*3+1? Step 1: 2*3 = <<2*3=6>>6. ки\nStep 2: 6+1 = 8. The answer is: 8 ки",
    "label": "What is 2*3+1? Step 1: 2*3 = <<2*3=6>>6. +\nStep 2: 6+1 = 8. The answer is: 8 -",
    "task": "GSM8K",
}


def candidate(text, rating):
    return {"text": text, "rating": rating, "flagged": None}


def path_of(*steps, **question):
    """A line of PRM800K. A step has its candidates, the number of the chosen one, and what a labeler wrote."""
    named = [
        {"completions": candidates, "human_completion": human, "chosen_completion": chosen}
        for candidates, chosen, human in steps
    ]
    question = {"problem": "Factor $6$.", "ground_truth_answer": "2*3"} | question
    return {"labeler": "x", "question": question, "label": {"steps": named, "finish_reason": "found_error"}}


JUDGED = path_of(
    ([candidate("Let me see.", 0)], 0, None),
    ([candidate("It is odd.", -1), candidate("It is even.", 1)], 1, None),
    ([candidate("So 2*4.", -1), candidate("So 6.", 0)], None, None),
)
WRITTEN = path_of(
    ([candidate("No.", -1)], None, {"text": "By 2:", "rating": None}),
    ([candidate("Hm.", None)], 0.0, None),  # as a table with nulls has it
    ([candidate("2*3.", 1)], 0, None),
    ([candidate("?", None)], 0, None),
    (None, None, None),
)
STEPS = {
    "prompt": "Blue light",
    "completions": [" scatters more,", " so skies are\n", " red."],
    "labels": [True, 0.5, 0],
}


def read(tmp_path, preset, *rows):
    return list(open_sources(write_jsonl(tmp_path / "data.jsonl", rows), preset=preset))


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("preset", "row", "expected"),
    [
        ("gsm8k", SUMS, {"input": "How many?", "output": SUMS["answer"], "label": "1200"}),
        ("math", MATHS, {"input": "Solve.", "output": MATHS["solution"], "label": r"\frac{1}{\{2\}}"}),
        (
            "hh",
            PAIR,
            {
                "input": ASKED,
                "output": "Human: means a person",
                "chosen": [*ASKED, answer("Human: means a person")],
                "rejected": [*ASKED, answer("No\n\nOr yes")],
            },
        ),
        (
            "hh",
            {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
            {"input": [{"role": "user", "content": "a"}], "output": "b"},
        ),
        ("ultrafeedback", FEEDBACK, {"input": [QUESTION], "output": "Because.", "margin": 2.5, "prompt": "Why?"}),
        (
            "humaneval",
            FUNCTION,
            {
                "input": "def one():\n",
                "output": "    return 1\n",
                "label": {"test": FUNCTION["test"], "entry_point": "one"},
            },
        ),
        (
            "apps",
            PROGRAM,
            {
                "input": "Double it.",
                "output": "print(2 * int(input()))",
                "label": {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]},
            },
        ),
        (
            "apps",
            CALL,
            {"input": "Double it.\n\ndef f(x):\n", "label": {"fn_name": "f", "inputs": [[1]], "outputs": [2]}},
        ),
        (
            "math_shepherd",
            SHEPHERD,
            {
                "input": [
                    "What is 2*3+1? Step 1: 2*3 = <<2*3=6>>6. ",
                    "\nStep 2: 6+1 = 8. The answer is: 8 ",
                ],
                "label": [1, 0],
            },
        ),
        ("math_shepherd", {"input": "q ки\n", "label": "q -"}, {"input": ["q "], "label": [0]}),
        ("prm800k", JUDGED, {"input": ["Factor $6$.\nLet me see.\n", "It is even.\n", "So 2*4."], "label": [1, 1, 0]}),
        # The third step is judged together with the one before, which has no rating.
        ("prm800k", WRITTEN, {"input": ["Factor $6$.\nBy 2:\n", "Hm.\n2*3."], "label": [1, 1]}),
        (
            "stepwise",
            STEPS,
            {"input": ["Blue light scatters more,\n", " so skies are\n", " red."], "label": [1, 0.5, 0]},
        ),
        ("stepwise", {"prompt": "q\n", "completions": ["a"], "labels": [False]}, {"input": ["q\na"], "label": [0]}),
        ("stepwise", {"prompt": "q", "completions": ["a"], "labels": [True]}, {"input": ["q\na"], "label": [1]}),
    ],
)
def test_preset_gives_rows_the_usual_keys(tmp_path, preset, row, expected):
    [found] = read(tmp_path, preset, row)
    assert {key: found.values[key] for key in expected} == expected
    assert row.keys() <= found.values.keys() and found.origin.endswith("data.jsonl:1")


@pytest.mark.parametrize(
    ("preset", "row", "says"),
    [
        ("gsm8k", SUMS | {"answer": "it is 3"}, "`answer` does not end in `####` and a number"),
        ("gsm8k", {"question": "q"}, "unknown key `answer`"),
        ("math", MATHS | {"solution": "it is 3"}, r"`solution` has no answer in \\boxed"),
        ("hh", PAIR | {"chosen": "Hi"}, r"`chosen` is no transcript(.|\n)*hint: turns begin with an empty line"),
        ("hh", PAIR | {"rejected": "Read this." + TALK + "x"}, "`rejected` is no transcript"),
        ("hh", PAIR | {"chosen": ["x"]}, "`chosen` must be text or a number, got a list"),
        ("ultrafeedback", FEEDBACK | {"chosen": "text"}, "`chosen` must be a list of at least two messages, got text"),
        ("ultrafeedback", FEEDBACK | {"rejected": [QUESTION]}, "`rejected` must be a list of at least two messages"),
        ("ultrafeedback", FEEDBACK | {"score_chosen": "8"}, "`score_chosen` and `score_rejected` must be numbers"),
        ("humaneval", FUNCTION | {"test": ""}, "`test` is empty"),
        ("apps", PROGRAM | {"input_output": ""}, "`input_output` is not JSON"),
        ("apps", PROGRAM | {"input_output": "[" * 100_000}, "`input_output` is not JSON"),
        ("apps", PROGRAM | {"input_output": '{"inputs": ["1"], "outputs": []}'}, "`input_output` must hold `inputs`"),
        ("apps", PROGRAM | {"solutions": '{"a": 1}'}, "`solutions` must be a list"),
        ("math_shepherd", SHEPHERD | {"label": SHEPHERD["label"][:-1] + "?"}, "`label` is not the text of `input`"),
        ("math_shepherd", {"input": "a", "label": "a"}, "`label` is not the text of `input`"),
        ("math_shepherd", SHEPHERD | {"label": ["+", "-"]}, r"`label` is a list(.|\n)*need no preset"),
        ("prm800k", JUDGED | {"question": "q"}, "`question` must hold `problem`"),
        ("prm800k", JUDGED | {"label": {}}, "`question` must hold `problem`, a text, and `label` must hold `steps`"),
        ("prm800k", JUDGED | {"label": {"steps": ["s"]}}, "a step of `label` must be an object with a list"),
        ("prm800k", path_of(({"text": "x"}, 0, None)), "a step of `label` must be an object with a list"),
        ("prm800k", path_of(([candidate("x", 2)], 0, None)), "`chosen_completion` must number a completion with"),
        ("prm800k", path_of(([candidate("x", 1)], 1, None)), "`chosen_completion` must number a completion with"),
        ("prm800k", path_of((["x"], 0, None)), "`chosen_completion` must number a completion with"),
        ("prm800k", path_of(([candidate("x", None)], 0, None)), "there must be at least one judged step"),
        ("prm800k", path_of(), "there must be at least one judged step"),
        ("prm800k", path_of(([candidate(None, 1)], 0, None)), "a step must be text, and not empty, got null"),
        ("stepwise", STEPS | {"labels": [True]}, "`completions` and `labels` must be lists of the same length"),
        ("stepwise", STEPS | {"completions": ["a", " ", "b"]}, "a step must be text, and not empty, got text"),
    ],
)
def test_row_of_another_form_is_an_error_that_names_its_line(tmp_path, preset, row, says):
    with pytest.raises(DataError, match=rf"data\.jsonl:1: {says}"):
        read(tmp_path, preset, row)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed 5", "5"),
        (r"\boxed{1} and \fbox{ 2 }.", "2"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\boxed{}", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed", None),
        ("", None),
    ],
)
def test_boxed_is_the_last_complete_box(text, expected):
    assert boxed(text) == expected


def test_bad_rows_are_counted_as_others_and_a_source_of_another_form_says_so(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [SUMS, {"question": "q"}, SUMS])
    errors = RowErrors(skip_bad_rows=True)
    assert len(list(open_sources(path, preset="gsm8k").read(errors))) == 2
    assert errors.num_bad == 1 and "data.jsonl:2: unknown key `answer`" in errors.first[0]
    with pytest.raises(DataError, match=r"no row of .*data\.jsonl can be read(.|\n)*:1: unknown key `solution`"):
        check_keys(open_sources(path, preset="math"), {"input_key": "input"})
    with pytest.raises(ConfigError, match=r"unknown data preset `gsm`(.|\n)*did you mean `gsm8k`"):
        open_sources(path, preset="gsm")
    plain, converted = open_sources(path), open_sources(path, preset="gsm8k")
    assert plain.fingerprint() != converted.fingerprint()


def test_preset_sets_the_options_that_the_user_does_not():
    class Section(ExampleSection):
        label_key: str | None = None
        chosen_key: str | None = None
        apply_chat_template: bool = False

    assert Section(preset_data="gsm8k").label_key == "label"
    assert Section(preset_data="gsm8k", label_key=None).label_key is None
    pairs = Section(preset_data="hh")
    assert (pairs.label_key, pairs.chosen_key, pairs.apply_chat_template) == (None, "chosen", True)
    assert not Section(preset_data="hh", apply_chat_template=False).apply_chat_template
    assert Section().label_key is None and SampleSection(preset_data="hh").preset_data == "hh"
    for name in ("gsm", ["gsm8k"]):
        with pytest.raises(ValueError, match="preset_data"):
            Section(preset_data=name)


def test_presets_of_every_kind_become_prompts_or_examples(tmp_path):
    """What the trainers make of the rows: tokens of the prompt, labels as the rewards receive them, and pairs."""
    rows = {"gsm8k": SUMS, "math": MATHS, "humaneval": FUNCTION, "apps": PROGRAM}
    labels = {}
    for name, row in rows.items():
        source = open_sources(write_jsonl(tmp_path / f"{name}.jsonl", [row]), preset=name)
        [prompt] = load_prompts(source, ByteTokenizer(), label_key="label")
        labels[name] = prompt.label
        section = type("Keys", (), {"input_key": "input", "output_key": "output"})()
        [example] = load_examples(source, make_encoder("sft", section, ByteTokenizer())).examples
        assert example.loss_mask.sum() == len(row.get("solution", row.get("answer", "")).encode()) + 1 or name in (
            "humaneval",
            "apps",
        )
    assert (labels["gsm8k"], labels["math"]) == ("1200", r"\frac{1}{\{2\}}")
    assert json.loads(labels["humaneval"]) == {"test": FUNCTION["test"], "entry_point": "one"}
    assert json.loads(labels["apps"]) == {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
    for name, row in {"hh": PAIR, "ultrafeedback": FEEDBACK}.items():
        source = open_sources(write_jsonl(tmp_path / f"{name}.jsonl", [row]), preset=name)
        section = type("Keys", (), {"apply_chat_template": True})()
        [pair] = load_examples(source, make_encoder("preference", section, ByteTokenizer())).examples
        [prompt] = load_prompts(source, ByteTokenizer(), apply_chat_template=True)
        for side in (pair.chosen, pair.rejected):
            assert side.token_ids[: len(prompt.token_ids)].tolist() == prompt.token_ids.tolist()
            assert not side.loss_mask[: len(prompt.token_ids)].any()


def test_placeholder_of_math_shepherd_is_that_of_its_inputs():
    class Section(ExampleSection):
        placeholder_token: str | None = None

    assert Section(preset_data="math_shepherd").placeholder_token == "ки"
    assert Section(preset_data="math_shepherd", placeholder_token="#").placeholder_token == "#"
    assert Section(preset_data="prm800k").placeholder_token is None


@pytest.mark.parametrize("preset", ["math_shepherd", "prm800k", "stepwise"])
def test_judged_steps_are_for_commands_that_know_of_steps(preset):
    with pytest.raises(ValueError, match=rf"rows of {preset} have judged steps(.|\n)*use `rlhf prm`"):
        SampleSection(preset_data=preset)
