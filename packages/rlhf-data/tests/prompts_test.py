"""Loading prompts: values, what is left out and counted, and a real Hugging Face tokenizer."""

import pickle

import numpy as np
import pytest

from record_testing import write_jsonl
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.prompts import load_prompts
from rlhf_data.rows.row import Row
from rlhf_data.rows.sources import open_sources
from rlhf_data.testing import BOS_ID, ByteTokenizer

ROWS = [{"q": "1+1", "a": 2}, {"q": "10+10", "a": "20"}, {"q": "100+100", "a": 200}]


def test_load_prompts_gives_tokens_text_label_and_id(tmp_path):
    path = write_jsonl(tmp_path / "math.jsonl", ROWS[:1])
    prompts = load_prompts(
        open_sources(path), ByteTokenizer(), input_key="q", label_key="a", input_template="{}=", source="sums"
    )
    assert len(prompts) == 1
    prompt = prompts[0]
    assert prompt.token_ids.tolist() == [BOS_ID, *b"1+1="]
    assert prompt.token_ids.dtype == np.int32
    assert (prompt.prompt_id, prompt.text, prompt.label, prompt.source) == ("math.jsonl:1", "1+1=", "2", "sums")


def test_load_prompts_source_key_names_the_source_of_each_row(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [row | {"set": name} for row, name in zip(ROWS, "xyx", strict=True)])
    assert [p.source for p in load_prompts(open_sources(path), ByteTokenizer(), input_key="q", source_key="set")] == [
        "x",
        "y",
        "x",
    ]
    with pytest.raises(DataError, match=r"a\.jsonl:1: unknown key `sets`; known: a, q, set"):
        load_prompts(open_sources(path), ByteTokenizer(), input_key="q", source_key="sets")


def digest_of(path, rows, **options):
    options = {"input_key": "q", "label_key": "a", "input_template": "{}="} | options
    return load_prompts(open_sources(write_jsonl(path, rows)), ByteTokenizer(), **options).counts.digest


def test_digest_of_prompts_is_that_of_the_cells_in_their_order(tmp_path):
    path = tmp_path / "a.jsonl"
    first = digest_of(path, ROWS)
    assert len(first) == 16
    # Neither the place of the rows nor what is written around them, such as today's date, nor other columns.
    assert digest_of(tmp_path / "b.jsonl", [dict(reversed(row.items())) for row in ROWS]) == first
    assert digest_of(path, ROWS, input_template="28 Nov 2026: {}=") == first
    assert digest_of(path, [{"note": "x"} | row for row in ROWS]) == first
    changed = {
        "order": digest_of(path, ROWS[::-1]),
        "label": digest_of(path, [*ROWS[:2], ROWS[2] | {"a": 201}]),
        "labels of two rows": digest_of(path, [ROWS[0] | {"a": "20"}, ROWS[1] | {"a": 2}, ROWS[2]]),
        "key": digest_of(path, [row | {"r": row["q"] + "+0"} for row in ROWS], input_key="r"),
        "no labels": digest_of(path, ROWS, label_key=None),
        "tools": digest_of(path, [row | {"q": [{"role": "user", "content": row["q"]}], "t": []} for row in ROWS],
                           apply_chat_template=True, input_template=None, tools_key="t"),
        "source": digest_of(path, [row | {"s": "x"} for row in ROWS], source_key="s"),
        "fewer": digest_of(path, ROWS[:2]),
        "too long": digest_of(path, ROWS, prompt_max_len=7),
    }  # fmt: skip
    assert len({first, *changed.values()}) == len(changed)  # "fewer" and "too long" leave the same rows
    assert changed["fewer"] == changed["too long"]


def test_digest_of_cells_that_json_lacks_does_not_change(tmp_path):
    rows = [Row({"q": "1", "a": 1, "t": [object()]}, "a", number) for number in range(2)]
    assert rows[0].digest(["q", "t"]) == rows[1].digest(["q", "t"]) != rows[0].digest(["q", "a"])
    assert rows[0].digest(["q", None]) == Row({"q": "1"}, "b", 9).digest(["q", None]) != rows[0].digest([None, "q"])


def test_load_prompts_drops_and_counts_too_long_and_cuts_nothing(tmp_path):
    # Tokens, with <bos>: 4, 6, 8. A limit of 6 keeps the first two whole.
    prompts = load_prompts(
        open_sources(write_jsonl(tmp_path / "a.jsonl", ROWS)), ByteTokenizer(), input_key="q", prompt_max_len=6
    )
    assert [len(prompt.token_ids) for prompt in prompts] == [4, 6]
    assert (prompts.counts.num_rows, prompts.counts.num_too_long, prompts.counts.longest_tokens) == (3, 1, 8)
    assert prompts.summary == "2 prompts, the longest read has 8 tokens; 1 of 3 left out as too long"


def test_load_prompts_all_too_long_says_how_long_they_are(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError) as caught:
        load_prompts(open_sources(path), ByteTokenizer(), input_key="q", prompt_max_len=3)
    assert str(caught.value) == (
        f"all 3 prompts of {path} are longer than ``prompt_max_len=3``\n\n"
        "hint: the shortest has 4 tokens, the longest 8: raise ``prompt_max_len``"
    )


def test_load_prompts_refuses_rows_with_ids_that_the_model_lacks(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "abc"}, {"q": "a~"}, {"q": "b"}])
    last = ByteTokenizer().encode("c")[-1]
    prompts = load_prompts(
        open_sources(path), ByteTokenizer(), input_key="q", input_template="{}", num_ids=last + 1, skip_bad_rows=True
    )
    assert [prompt.text for prompt in prompts] == ["abc", "b"]
    assert (prompts.counts.num_rows, prompts.counts.num_bad, prompts.counts.num_too_long) == (3, 1, 0)
    assert (
        prompts.counts.bad[0]
        == f"{path}:2: the token '~' has the id {ord('~')}, and the model's embedding ends at {last}"
    )
    with pytest.raises(DataError, match=r"3 of 3 rows cannot be used[\s\S]*embedding ends at 97"):
        load_prompts(
            open_sources(path), ByteTokenizer(), input_key="q", num_ids=98, skip_bad_rows=True, input_template="{}b"
        )


def test_load_prompts_options_that_cannot_work_fail_before_the_file_is_read(tmp_path):
    rows = open_sources(write_jsonl(tmp_path / "a.jsonl", ["broken"]))
    with pytest.raises(ConfigError, match="prompt_max_len must be at least 1, got 0"):
        load_prompts(rows, ByteTokenizer(), prompt_max_len=0)
    [prompt] = load_prompts(
        open_sources(write_jsonl(tmp_path / "b.jsonl", [{"input": "x"}])),
        ByteTokenizer(add_bos=False),
        prompt_max_len=1,
    )
    assert prompt.token_ids.tolist() == [*b"x"]
    with pytest.raises(ConfigError, match="exactly once"):
        load_prompts(rows, ByteTokenizer(), input_template="x")


def test_load_prompts_input_without_tokens_names_file_and_line(tmp_path):
    class Silent(ByteTokenizer):
        def encode(self, text, *, add_special_tokens=True):
            return []

    with pytest.raises(DataError, match=r"a\.jsonl:1: the tokenizer makes no token of '1\+1'"):
        load_prompts(open_sources(write_jsonl(tmp_path / "a.jsonl", ROWS)), Silent(), input_key="q")


def test_prompt_set_pickle_round_trip(tmp_path):
    prompts = load_prompts(
        open_sources(write_jsonl(tmp_path / "a.jsonl", ROWS)), ByteTokenizer(), input_key="q", label_key="a"
    )
    again = pickle.loads(pickle.dumps(prompts))
    assert [prompt.text for prompt in again] == [prompt.text for prompt in prompts]
    assert again[2].token_ids.tolist() == prompts[2].token_ids.tolist()
    assert again.summary == prompts.summary


@pytest.fixture(scope="module")
def hf_tokenizer():
    """A Hugging Face tokenizer that adds <s> and </s>, with a chat template that writes <s> itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "user", "assistant", "two", "plus"]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] + ' ' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' assistant' }}{% endif %}"
    )
    return tokenizer


def test_load_prompts_hugging_face_chat_template_has_special_tokens_once(tmp_path, hf_tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "two plus two"}])
    prompt = load_prompts(open_sources(path), hf_tokenizer, input_key="q", apply_chat_template=True)[0]
    # <s> user two plus two </s> assistant
    assert prompt.token_ids.tolist() == [1, 3, 5, 6, 5, 2, 4]
    assert prompt.text == "<s>user two plus two</s> assistant"
    assert prompt.messages == ({"role": "user", "content": "two plus two"},)


def test_load_prompts_hugging_face_plain_text_is_begun_and_not_ended(tmp_path, hf_tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "two plus two"}, {"q": "<s> two"}])
    prompts = load_prompts(open_sources(path), hf_tokenizer, input_key="q")
    assert [prompt.token_ids.tolist() for prompt in prompts] == [[1, 5, 6, 5], [1, 5]]
    assert [prompt.messages for prompt in prompts] == [None, None]
