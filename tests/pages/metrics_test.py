"""The page of metrics explains what runs log, and nothing else. `tour_test.py` compares it with real runs."""

from metric_names import LOGGING, ROOT, explained, is_explained, logged
from rlhf_rollout.agents.tools.tool_agent import COUNTS
from rlhf_train.run.timeline import PHASES


def test_every_metric_in_the_code_is_explained():
    found = list(logged())
    assert len(found) > 50
    assert [(file, name) for file, name in found if not is_explained(name)] == []


def test_every_phase_and_count_of_tools_is_explained():
    names = [f"time/{name}" for name in (*PHASES, "other", "step")]
    names += [f"rollout/{name}" for name in COUNTS]
    assert [name for name in names if not is_explained(name)] == []


def test_no_metric_is_explained_that_nothing_logs():
    sources = [*LOGGING.rglob("*.py"), *(ROOT / "packages/rlhf-rollout/src").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    names = [name for name in explained() if "<" not in name]
    assert len(names) > 100
    for name in names:
        word = name.rpartition("/")[2]
        words = (word, word.removesuffix("_max"))
        assert any(f'/{word}"' in text or f'"{word}"' in text or f"{word}=" in text for word in words), name


def test_name_is_explained_by_its_row_only():
    assert is_explained("eval/gsm8k/pass@4") and is_explained("eval/pass@16_after")
    assert is_explained("eval/loss") and is_explained("eval/rejected_reward_before")
    assert not is_explained("rollout/nobody_explains_this")
    assert not is_explained("eval/nobody_explains_this")
