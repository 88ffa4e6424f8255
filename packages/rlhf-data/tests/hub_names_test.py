"""Tokenizers and data sets by the names of a hub: revisions, the cache, and errors, against a stand-in for the hub."""

import pytest

from hub_stand_in import TOKEN, Repository, answers, commit_of, running_hub
from rlhf_data.hub_names import HubName, hub_name, hub_problem

ASK = """
import json, os, sys
from rlhf_data.errors import RlhfError
from rlhf_data.pretrained import load_tokenizer
from rlhf_data.rows.sources import open_sources

for name in json.loads(sys.argv[1]):
    if name.startswith("token:"):
        os.environ["HF_TOKEN"] = name[6:]
        continue
    try:
        if name.startswith("data:"):
            said = [row.values["prompt"] for row in open_sources(name[5:])]
        else:
            said = load_tokenizer(name).chat_template
    except RlhfError as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps(said))
"""
FIRST, SECOND = commit_of("first"), commit_of("second")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("owner/name", HubName("owner/name", None)),
        ("owner/name@v1", HubName("owner/name", "v1")),
        ("owner/name@refs/pr/3", HubName("owner/name", "refs/pr/3")),
        ("owner/name@", None),
        ("name", None),
        ("name@v1", None),
        ("a/b/c@v1", None),
        ("./owner/name", None),
        ("~/name@v1", None),
        ("/name@v1", None),
    ],
)
def test_hub_name_is_an_owner_a_name_and_perhaps_a_revision(text, name):
    assert hub_name(text) == name


def test_errors_that_the_hub_did_not_cause_are_not_explained_by_it():
    assert hub_problem(ValueError("sizes differ"), "owner/name") is None
    assert hub_problem(OSError("no such file"), "owner/name") is None


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub with a tokenizer in two revisions, one that its owner shares with some users, and a data set."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    revisions = {}
    for commit, template in ((FIRST, "first"), (SECOND, "second")):
        folder = tmp_path_factory.mktemp(template)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        revisions[commit] = {path.name: path.read_bytes() for path in folder.iterdir()}
        revisions[commit]["config.json"] = b'{"model_type": "llama"}'
    with running_hub() as hub:
        hub.models["org/open"] = Repository(revisions, {"v1": FIRST})
        hub.models["org/gated"] = Repository(revisions, is_gated=True)
        hub.models["org/slow"] = Repository(revisions, delay_s=0.3)
        weights = {"model.safetensors": b"1", "original/model.safetensors": b"2", "pytorch_model.bin": b"3"}
        weights |= {"value_head.bin": b"4", "code.py": b"5"}
        hub.models["org/weights"] = Repository({FIRST: revisions[FIRST] | weights}, {"v1": FIRST})
        pickled = revisions[FIRST] | {"pytorch_model.bin": b"3", "original/pytorch_model.bin": b"6"}
        hub.models["org/pickled"] = Repository({FIRST: pickled}, {"v1": FIRST})
        hub.datasets["org/rows"] = Repository({FIRST: {"train.jsonl": b'{"prompt": "a"}\n{"prompt": "b"}\n'}})
        yield hub


def test_names_are_loaded_in_their_revisions_and_then_without_a_network(hub, tmp_path):
    names = ["org/open", "org/open@v1", f"org/open@{FIRST}", "org/open@main", "org/slow@main", "data:org/rows"]
    loaded = ["second", "first", "first", "second", "second", ["a", "b"]]
    assert answers(hub, tmp_path, ASK, names) == loaded
    num_asked = len(hub.asked)
    said = answers(hub, tmp_path, ASK, [*names, "org/other", "org/open@v2", "data:org/none"], HF_HUB_OFFLINE="1")
    assert said[:6] == loaded
    assert len(hub.asked) == num_asked
    for text, name, command in zip(
        said[6:],
        ("org/other", "org/open@v2", "org/none"),
        ("org/other`", "org/open --revision v2`", "org/none"),
        strict=True,
    ):
        assert f"{name} is not in this machine's cache of the hub, and HF_HUB_OFFLINE forbids" in text, text
        assert "hint: unset HF_HUB_OFFLINE, or, to stay offline, load it where" in text
        assert f"`hf download {command}" in text
    assert said[8].endswith("`hf download org/none --repo-type dataset`")


WEIGHTS = """
import json, sys
from pathlib import Path
from rlhf_data.pretrained import located

for name in json.loads(sys.argv[1]):
    for with_weights in (False, True):
        folder = Path(located(name, with_weights=with_weights)[0])
        files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json")
        print(json.dumps(sorted(str(path.relative_to(folder)) for path in files)))
"""


def test_weights_are_loaded_once_and_only_when_they_are_wanted(hub, tmp_path):
    said = answers(hub, tmp_path, WEIGHTS, ["org/weights@v1", "org/pickled@v1"])
    template = "chat_template.jinja"
    assert said == [
        [template],
        [template, "model.safetensors", "value_head.bin"],
        [template],
        [template, "pytorch_model.bin"],
    ]


@pytest.fixture(scope="module")
def said(hub, tmp_path_factory):
    """What one process is told: without a token, with that of a user who was not admitted, and with another one's."""
    names = ["org/none", "org/gated", "org/gated@main", "org/open@v9", "data:org/none"]
    names += ["token:hf_stranger", "org/gated", "org/none", f"token:{TOKEN}", "org/gated", f"org/gated@{FIRST}"]
    return answers(hub, tmp_path_factory.mktemp("home"), ASK, names)


def test_what_the_hub_refuses_a_stranger_is_told_with_what_to_do(said):
    unknown = "the hub has no model org/none that this user may see"
    log_in = "hint: check the name; for a private one, type `hf auth login`, or set HF_TOKEN"
    assert said[0] == f"ConfigError: cannot load the tokenizer org/none: {unknown}\n\n{log_in}"
    for text, kind in zip(said[1:3], ("tokenizer org/gated", "model org/gated@main"), strict=True):
        assert text.startswith(f"ConfigError: cannot load the {kind}: the hub gives org/gated only to users whom")
        assert "hint: ask for access on its page of the hub; then type `hf auth login`, or set HF_TOKEN" in text
    assert "org/open has no such revision v9\n\nhint: name a branch, a tag or a whole commit" in said[3]
    assert (
        said[4] == f"DataError: data set org/none cannot be opened: {unknown.replace('model', 'data set')}\n\n{log_in}"
    )


def test_a_token_opens_a_gated_model_only_if_its_user_was_admitted(said):
    assert "the hub gives org/gated only to users whom its owner admits" in said[5]
    assert "the hub has no model org/none" in said[6]
    assert said[7:] == ["second", "first"]
