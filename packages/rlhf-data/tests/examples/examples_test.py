"""Loading examples: by processes, from the cache, with bad rows: always the same, with an account of every row."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from record_testing import write_jsonl
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.examples.load import ExampleSet, load_examples
from rlhf_data.examples.preference import PreferenceEncoder, ProcessEncoder, UnpairedEncoder
from rlhf_data.examples.sft import SftEncoder
from rlhf_data.rows.sources import open_sources
from rlhf_data.testing import ByteTokenizer

ENCODER = SftEncoder(tokenizer=ByteTokenizer())


def write(path, num_rows, bad=()):
    rows = [{"input": str(n), "output": " " if n in bad else "x" * (n % 7 + 1)} for n in range(num_rows)]
    return write_jsonl(path, rows)


def flat(data: ExampleSet):
    return [(e.example_id, e.token_ids.tolist(), e.loss_mask.tolist()) for e in data.examples]


def test_load_examples_processes_give_the_same_in_the_same_order(tmp_path):
    path = write(tmp_path / "a.jsonl", 700, bad={3, 600})
    alone, calls = load_examples(open_sources(path), ENCODER, max_len=9), []
    helped = load_examples(open_sources(path), ENCODER, max_len=9, num_workers=2, progress=calls.append)
    assert flat(helped) == flat(alone)
    assert helped.counts == alone.counts
    # Tokens of each of the 698 usable rows: <bos>, the digits, the letters, <eos>.
    too_long = sum(2 + len(str(n)) + n % 7 + 1 > 9 for n in range(700) if n not in (3, 600))
    assert (alone.counts.num_too_long, alone.counts.num_bad, alone.counts.num_rows) == (too_long, 2, 700)
    assert len(alone.examples) == 698 - too_long
    assert calls[-1] == 700 and calls == sorted(calls) and len(calls) > 1


def test_load_examples_above_one_percent_bad_is_refused_unless_skipped(tmp_path):
    rows = open_sources(write(tmp_path / "a.jsonl", 100, bad={4, 5}))
    with pytest.raises(DataError, match=r"2 of 100 rows cannot be used.*\n.*a\.jsonl:5: `output` is"):
        load_examples(rows, ENCODER)
    data = load_examples(rows, ENCODER, skip_bad_rows=True)
    assert (len(data.examples), data.counts.num_bad) == (98, 2)
    assert data.summary == (
        "98 examples, the longest read has 11 tokens; 2 of 100 cannot be used,"
        f" such as {tmp_path / 'a.jsonl'}:5: `output` is empty"
    )
    assert len(load_examples(open_sources(write(tmp_path / "b.jsonl", 100, bad={4})), ENCODER).examples) == 99


def test_load_examples_broken_lines_and_broken_cells_are_counted_together(tmp_path):
    path = write(tmp_path / "a.jsonl", 3, bad={1})
    path.write_text(path.read_text() + "{\n")
    data = load_examples(open_sources(path), ENCODER, skip_bad_rows=True)
    assert (len(data.examples), data.counts.num_bad, data.counts.num_rows) == (2, 2, 4)


def test_load_examples_without_a_usable_row_is_refused(tmp_path):
    rows = open_sources(write(tmp_path / "a.jsonl", 2, bad={0, 1}))
    with pytest.raises(DataError, match=r"2 of 2 rows cannot be used; the first:\n.*a\.jsonl:1: `output` is empty"):
        load_examples(rows, ENCODER, skip_bad_rows=True)


def test_load_examples_pair_is_as_long_as_its_longer_sequence(tmp_path):
    # <bos> + text + <eos>: 3 and 5 tokens.
    rows = open_sources(write_jsonl(tmp_path / "a.jsonl", [{"chosen": "a", "rejected": "bbb"}]))
    encoder = PreferenceEncoder(tokenizer=ByteTokenizer())
    assert len(load_examples(rows, encoder, max_len=5).examples) == 1
    with pytest.raises(DataError, match="the longest has 5 tokens"):
        load_examples(rows, encoder, max_len=4)


def test_load_examples_cache_is_read_instead_of_encoding(tmp_path):
    path = write(tmp_path / "a.jsonl", 120, bad={7})
    plain, calls = load_examples(open_sources(path), ENCODER), []
    for _ in range(2):
        cached = load_examples(open_sources(path), ENCODER, cache_dir=tmp_path / "c", progress=calls.append)
        assert flat(cached) == flat(plain)
        assert cached.counts == plain.counts
        assert cached.examples[-1].example_id == cached.examples[1:][-1].example_id == "a.jsonl:120"
        with pytest.raises(IndexError):
            cached.examples[119]
    assert calls == [120]
    assert len(os.listdir(tmp_path / "c")) == 1


PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}
STEPS = {"input": "a*b*", "label": [1, 0]}
KINDS = [
    (ENCODER, {"input": "a", "output": "b"}, {"output": "c"}),
    (ENCODER, {"input": "a", "output": "b"}, {"finish_reason": "length"}),
    (PreferenceEncoder(tokenizer=ByteTokenizer(), prompt_key="prompt"), PAIR, {"rejected": "s"}),
    (PreferenceEncoder(tokenizer=ByteTokenizer(), margin_key="m"), PAIR | {"m": 1}, {"m": 2}),
    (UnpairedEncoder(tokenizer=ByteTokenizer()), {"input": "a", "output": "b", "label": True}, {"label": False}),
    (UnpairedEncoder(tokenizer=ByteTokenizer()), {"input": "a", "output": "b", "label": True}, {"input": "b"}),
    (ProcessEncoder(tokenizer=ByteTokenizer(), placeholder="*"), STEPS, {"label": [1, 1]}),
]


@pytest.mark.parametrize(("encoder", "row", "change"), KINDS)
def test_digest_of_examples_changes_with_every_cell_that_is_read_and_with_the_order(tmp_path, encoder, row, change):
    def digest(*rows):
        return load_examples(open_sources(write_jsonl(tmp_path / "a.jsonl", rows)), encoder).counts.digest

    whole = [row, row, row | change]
    assert digest(*whole) == digest(*(one | {"note": 1} for one in whole)) != ""
    assert len({digest(*whole), digest(row, row | change, row), digest(row, row, row), digest(row, row)}) == 4


def test_load_examples_cache_depends_on_data_tokenizer_and_options(tmp_path):
    path = write(tmp_path / "a.jsonl", 20)

    def load(encoder=ENCODER, **options):
        calls = []
        load_examples(open_sources(path), encoder, cache_dir=tmp_path / "c", progress=calls.append, **options)
        return bool(calls)

    assert load()
    assert not load()
    assert load(max_len=100)
    assert load(replace(ENCODER, input_template="{}="))
    assert load(replace(ENCODER, tokenizer=ByteTokenizer(add_bos=False)))
    assert load(replace(ENCODER, tokenizer=ByteTokenizer(chat_template="other")))
    write(path, 21)
    assert load()
    assert not load()


def test_load_examples_failure_leaves_nothing_in_the_cache(tmp_path):
    (tmp_path / "a.json").write_text('[{"input": "a", "output": "b"}, {')
    with pytest.raises(DataError, match="malformed"):
        load_examples(open_sources(tmp_path / "a.json"), ENCODER, cache_dir=tmp_path / "c")
    assert os.listdir(tmp_path / "c") == []


def test_load_examples_options_out_of_range_are_refused(tmp_path):
    rows = open_sources(write(tmp_path / "a.jsonl", 1))
    with pytest.raises(ConfigError, match="num_workers must be at least 0, got -1"):
        load_examples(rows, ENCODER, num_workers=-1)
    streamed = replace(rows, sources=(replace(rows.sources[0], fingerprint=lambda: None),))
    with pytest.raises(ConfigError, match="is streamed and cannot be cached"):
        load_examples(streamed, ENCODER, cache_dir=tmp_path / "c")


def test_load_examples_config_error_in_a_process_reaches_the_caller(tmp_path):
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = None
    with pytest.raises(ConfigError, match="no EOS token"):
        load_examples(
            open_sources(write(tmp_path / "a.jsonl", 2)), replace(ENCODER, tokenizer=tokenizer), num_workers=1
        )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_load_examples_refuses_rows_with_ids_that_the_model_lacks(tmp_path, num_workers):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [{"input": "a", "output": "b"}, {"input": "~", "output": "b"}, {"input": "a", "output": "~"}],
    )
    options = {"num_ids": ord("z"), "skip_bad_rows": True, "num_workers": num_workers}
    data = load_examples(open_sources(path), ENCODER, **options)
    assert [example.example_id for example in data.examples] == ["a.jsonl:1"]
    assert data.counts.num_bad == 2 and "the token '~' has the id 126" in data.counts.bad[0]
    pairs = write_jsonl(
        tmp_path / "p.jsonl",
        [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": "~"}],
    )
    encoder = PreferenceEncoder(tokenizer=ByteTokenizer(), prompt_key="prompt")
    assert load_examples(open_sources(pairs), encoder, **options).counts.num_bad == 1


@pytest.mark.parametrize(("encoder", "row", "change"), KINDS)
def test_cached_examples_are_read_by_other_processes_in_another_folder(tmp_path, monkeypatch, encoder, row, change):
    monkeypatch.chdir(tmp_path)
    rows = open_sources(write_jsonl(tmp_path / "a.jsonl", [row, row | change]))
    plain = load_examples(rows, encoder)
    cached = load_examples(rows, encoder, cache_dir="c")
    (tmp_path / "set.pickle").write_bytes(pickle.dumps(cached))
    code = "import pickle, sys; print(*pickle.load(open(sys.argv[1], 'rb')).examples, sep='\\n')"
    words = [sys.executable, "-c", code, str(tmp_path / "set.pickle")]
    (tmp_path / "elsewhere").mkdir()
    read = subprocess.run(words, cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=True).stdout
    assert read == "".join(f"{example}\n" for example in plain.examples)


def test_pickle_of_cached_examples_names_their_folder_and_holds_none(tmp_path):
    rows = open_sources(write(tmp_path / "a.jsonl", 300))
    examples = load_examples(rows, ENCODER, cache_dir=tmp_path / "c").examples
    assert len(pickle.dumps(examples)) < 500 < len(pickle.dumps(examples[:]))
    assert str(pickle.loads(pickle.dumps(examples))[299]) == str(examples[299])


@pytest.mark.parametrize("file", ["items.bin", "counts.pickle", "starts.npy"])
def test_cache_that_cannot_be_read_says_what_to_remove(tmp_path, file):
    rows = open_sources(write(tmp_path / "a.jsonl", 3))
    load_examples(rows, ENCODER, cache_dir=tmp_path / "c")
    [folder] = (tmp_path / "c").iterdir()
    # As a class that another version had: the text of its name changes, and not its length.
    (folder / file).write_bytes(
        (folder / file).read_bytes().replace(b"SftExample", b"OldExample").replace(b"Counts", b"Totals")
    )
    if file == "starts.npy":
        (folder / file).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{folder} cannot be read: it is damaged.*\n\nhint: .*rm -r {folder}"):
        _ = load_examples(rows, ENCODER, cache_dir=tmp_path / "c").examples[0]
