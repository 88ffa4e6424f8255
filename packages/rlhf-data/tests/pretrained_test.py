"""Tokenizers by folder or hub name: what is found, what is refused, and that nobody waits for a hub that is away."""

import json
import time
from types import SimpleNamespace

import pytest

from rlhf_data import pretrained
from rlhf_data.errors import ConfigError, DataError
from rlhf_data.pretrained import ids_without_token, load_tokenizer, located_model, masked_ids_notice, set_chat_template
from rlhf_data.rows.sources import open_sources
from sentencepiece_testing import make_tokenizer


@pytest.fixture
def folder(tmp_path):
    """A folder with a tokenizer of two words that has no padding token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path / "t")
    return tmp_path / "t"


@pytest.fixture
def nobody_there(monkeypatch):
    """A hub of which nothing listens; the hub's client alone takes 1 + 2 + 4 + 8 + 8 s before it gives up."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    pretrained.hub_answers.cache_clear()
    yield
    pretrained.hub_answers.cache_clear()


def test_load_tokenizer_without_padding_token_pads_with_the_end(folder):
    assert load_tokenizer(folder).pad_token_id == load_tokenizer(str(folder)).eos_token_id == 1


def test_ids_without_token_are_those_in_gaps_and_behind_the_last(folder):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "a": 1, "b": 4, "c": 5, "d": 7}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)), unk_token="<unk>")
    assert ids_without_token(tokenizer, 12) == (range(2, 4), range(6, 7), range(8, 12))
    assert ids_without_token(tokenizer, 7) == (range(2, 4), range(6, 7))
    tokenizer.add_tokens(["e"])  # which takes the next id
    assert tokenizer.convert_tokens_to_ids("e") in (5, 8)
    whole = load_tokenizer(folder)
    assert ids_without_token(whole, 2) == ids_without_token(whole, 1) == ()
    assert ids_without_token(whole, 128) == (range(2, 128),)


def test_ids_without_token_leaves_out_the_second_id_of_a_token(monkeypatch):
    class Twice:
        """The token of id 3 is that of id 1, too, which the vocabulary names."""

        def get_vocab(self):
            return {"<unk>": 0, "a": 1, "b": 2}

        def convert_ids_to_tokens(self, index):
            if index > 4:
                raise IndexError("piece id is out of range.")
            return {3: "a"}.get(index)

    assert ids_without_token(Twice(), 7) == (range(4, 7),)


def test_masked_ids_notice_counts_the_ids():
    assert masked_ids_notice((), 128) is None
    assert "no token for 5 of the 128 ids" in masked_ids_notice((range(2, 4), range(125, 128)), 128)


def test_load_tokenizer_without_end_token_hints_at_the_file(folder):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": None}))
    with pytest.raises(ConfigError, match=r"t has no end-of-sequence token\n\nhint: .*tokenizer_config\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("config", ["{}", '{"model_type": "qwen2"}', '{"model_type": "llama"}'])
def test_load_tokenizer_folder_without_one_says_so(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    # Of some families transformers makes an empty tokenizer, of others it says itself that there is none.
    ours, theirs = "has no tokenizer that makes tokens of text", "cannot load the tokenizer"
    with pytest.raises(ConfigError, match=rf"({ours}|{theirs})[^\n]*\n\nhint: "):
        load_tokenizer(tmp_path)


def test_load_tokenizer_broken_file_is_named(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot load the tokenizer .*t: .*\n\nhint: its files may be damaged"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (OSError("no such file"), "check the path, or the hub name and the network; "),
        (ImportError("needs optimum"), "install the package that it needs"),
        (ImportError("needs timm: `pip install timm`. Please"), "pip install timm, or use a model that needs none"),
        (ValueError("sizes differ"), "its files may be damaged, or need another version of transformers than "),
    ],
)
def test_only_errors_about_path_and_network_hint_at_them(error, hint):
    with pytest.raises(ConfigError) as caught, pretrained.clear_errors("model", "m"):
        raise error
    assert str(caught.value).startswith(f"cannot load the model m: {error}\n\nhint: {hint}")


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "nowhere", "a/b/c"])
def test_load_tokenizer_missing_folder_is_refused_and_the_hub_not_asked(path, monkeypatch):
    monkeypatch.setattr(pretrained, "hub_answers", lambda: pytest.fail("the hub was asked"))
    with pytest.raises(ConfigError, match=rf"no model folder {path}\n\nhint: .*`owner/name`"):
        load_tokenizer(path)


def test_hub_name_beside_a_folder_of_its_owners_name_is_looked_for_on_the_hub(nobody_there, monkeypatch, tmp_path):
    (tmp_path / "owner").mkdir()
    monkeypatch.chdir(tmp_path)
    assert pretrained.located("owner/model") == ("owner/model", True)
    (tmp_path / "owner" / "model").mkdir()
    assert pretrained.located("owner/model") == ("owner/model", True)  # the folder, which exists


def test_hub_names_with_nobody_there_are_looked_for_in_the_cache_at_once(nobody_there, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    from transformers import AutoTokenizer  # noqa: F401 - which takes seconds itself

    started = time.perf_counter()
    with pytest.raises(ConfigError, match=r"cannot load the tokenizer no/such-name: .*\n\nhint: .*offline"):
        load_tokenizer("no/such-name")
    with pytest.raises(
        DataError, match=r"no/such-data cannot be opened: .* not in .* cache .*\n\nhint: .*to stay offline"
    ):
        open_sources("no/such-data")
    assert time.perf_counter() - started < 20.0


def test_hub_that_never_answers_is_given_up_after_a_while(nobody_there, monkeypatch):
    monkeypatch.setattr(pretrained, "_HUB_TIMEOUT_S", 0.2)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: time.sleep(60))
    started = time.perf_counter()
    assert not pretrained.hub_answers()
    assert time.perf_counter() - started < 20.0


def test_hub_that_answers_is_asked_once(nobody_there, monkeypatch):
    asked = []
    date = "Sun, 06 Nov 1994 08:49:37 GMT"

    def head(*_, **__):
        asked.append(1)
        return SimpleNamespace(headers={"date": date})

    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=head))
    assert pretrained.hub_answers() is True
    assert pretrained.located("owner/model") == ("owner/model", False)
    assert asked == [1]
    assert pretrained.hub_date() == date


MESSAGES = [{"role": "user", "content": "hi"}]
VALUES = [
    False,
    True,
    None,
    3,
    -2.5e-07,
    "",
    "it's \"é☃\n\t\\ %} {{ x }} {% y %}",
    ["a", 1, None],
    {"a": {"b": [True, "'"]}},
]
LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        LOOP + "[{{ value }}]",
        "\n  {% if value is defined %}[{{ value }}]{% endif %}\n " + LOOP,
        "{%- macro say() %}<{{ value }}>{% endmacro %}" + LOOP + "{{ say() }}",
        "{% set value = value if value is defined else 'none' %}" + LOOP + "{{ value }}",
    ],
)
@pytest.mark.parametrize("value", VALUES)
def test_template_variables_render_as_transformers_renders_them(template, value):
    expected, tokenizer = make_tokenizer("bytes"), make_tokenizer("bytes")
    expected.chat_template = tokenizer.chat_template = template
    set_chat_template(tokenizer, variables=json.dumps({"value": value}))
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert text == expected.apply_chat_template(MESSAGES, tokenize=False, value=value)


def test_template_variables_reach_all_named_templates_and_a_template_that_is_given(tmp_path):
    tokenizer = make_tokenizer("bytes")
    tokenizer.chat_template = {"default": LOOP, "tool_use": LOOP + "{{ value }}"}
    set_chat_template(tokenizer, variables='{"value": 7}')
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False, tools=tools) == "hi7"
    file = tmp_path / "chat.jinja"
    file.write_text(LOOP + "{{ value }}{{ other }}")
    set_chat_template(tokenizer, str(file), variables='{"value": 8, "other": 9}')
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "hi89"
    set_chat_template(tokenizer, str(file))
    assert tokenizer.chat_template == file.read_text()


@pytest.mark.parametrize(
    ("template", "name", "says"),
    [
        (LOOP, "value", "does not read `value`"),
        (LOOP + "{{ values }}", "value", "does not read `value`"),
        (None, "value", "does not read `value`"),
        (LOOP, "messages", "`messages` is set by what is rendered\n\nhint: leave out messages"),
    ],
)
def test_template_variables_that_have_no_effect_are_refused(template, name, says):
    tokenizer = make_tokenizer("bytes")
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=r"^``chat_template_kwargs``: ") as caught:
        set_chat_template(tokenizer, variables=json.dumps({name: 1}))
    assert says in str(caught.value)


@pytest.mark.parametrize(("file", "hint"), [("x", "a model folder holds"), ("adapter_config.json", "it holds an ada")])
def test_located_model_without_a_config_says_what_the_folder_is(tmp_path, file, hint):
    (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=f"the model folder {tmp_path} has no config.json\n\nhint: {hint}"):
        located_model(tmp_path)
    (tmp_path / "config.json").touch()
    assert located_model(tmp_path) == (str(tmp_path), True)
