"""What a person sees, as plain text and on a terminal."""

import io
import json
import math

import numpy as np
import pytest

from rlhf_cli.console.results import show_results
from rlhf_cli.console.views import DOING, Console, OfflineView, RunView, sparkline
from rlhf_data.errors import EngineError
from rlhf_data.options.progress import Progress
from rlhf_data.records import FinishReason, Prompt, Rollout, Span, SpanSource, Verdict, VerdictKind
from rlhf_train.run.timeline import PHASES

METRICS = {
    "rollout/reward": 0.25,
    "kl/reference": 0.0125,
    "policy/loss": -0.5,
    "rollout/response_tokens": 20.0,
    "throughput/response_tokens": 1234.0,
    "time/generate": 0.2,
}


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return io.StringIO(), io.StringIO()


def rollout(text: str, verdict: Verdict | None) -> Rollout:
    spans = (
        Span(SpanSource.PROMPT, np.array([1])),
        Span(SpanSource.POLICY, np.array([2]), np.array([-0.1]), policy_version=0),
    )
    return Rollout("r", "g", spans, FinishReason.STOP, text=text, verdict=verdict)


def test_tables_have_all_columns_in_their_widths_and_decimals_and_others_none_that_they_need_not(streams):
    out, err = streams
    RunView(Console(out, err), 10).step(1, 10, METRICS | {"kl/teacher": 0.5, "samples/filtered": 3.0})
    assert not {"filtered", "teacher"} & {*out.getvalue().split()}
    out.truncate(out.seek(0))
    numbers = {"kl/teacher": 0.5, "samples/filtered": 3.0, "value/loss": 0.125, "policy/entropy": 2.0, "time/step": 9.0}
    numbers |= {f"time/{name}": 1.25 for name in ("generate", "reward", "experience", "train", "sync")}
    RunView(Console(out, err), 10, dynamic_sampling=True, has_teacher=True).step(1, 10, METRICS | numbers)
    numbers = {"dpo/loss": 1.0, "dpo/reward_margin": 2.0, "train/grad_norm": 1.5, "train/learning_rate": 1e-5}
    numbers |= {"throughput/tokens": 1234.0, "time/update": 1.0}
    OfflineView(Console(out, err), "dpo", ["loss", "reward_margin", "x"]).update(1, 6, numbers)
    assert out.getvalue() == (
        "  step reward filtered teacher      KL  policy   value length entropy  tok/s"
        " generate reward exper. train  sync  rest\n"
        "  1/10  0.250        3  0.5000  0.0125 -0.5000  0.1250   20.0   2.000   1234"
        "     1.25   1.25   1.25  1.25  1.25  2.75\n"
        " update    loss reward margin       x grad norm       rate   tok/s seconds\n"
        "    1/6  1.0000        2.0000       -     1.500  0.0000100    1234    1.00\n"
    )


def test_run_view_shows_samples_on_one_line_each_with_verdict_and_label(streams):
    out, err = streams
    prompt = Prompt("p", np.array([1]), "What\nis 1 + 1?", label="2")
    good = rollout("2", Verdict(VerdictKind.OK, 1.0))
    lost = rollout("x" * 401, Verdict(VerdictKind.TIMEOUT))
    RunView(Console(out, err), 10).samples("Before", [(prompt, good), (prompt, lost), (prompt, rollout("?", None))])
    text = out.getvalue()
    assert "1. ok, reward 1, label 2" in text
    assert "prompt    What is 1 + 1?" in text
    assert "2. timeout, label 2" in text
    assert "x" * 400 + " ... (401 characters)\n" in text
    assert "3. not scored" in text


def test_run_view_evaluation_says_when_and_how_well(streams):
    out, err = streams
    view = RunView(Console(out, err), 10)
    view.evaluation(0, {"eval/accuracy": 0.25, "eval/reward": 0.5, "eval/response_tokens": 20.0})
    view.evaluation(10, {"eval/accuracy": 1.0, "eval/response_tokens": 20.0})
    view.evaluation(20, {})
    view.evaluation(30, {"eval/response_tokens": 20.0})
    assert out.getvalue().splitlines() == [
        "held-out accuracy before training: 0.250  (reward 0.500, 20.0 tokens per response)",
        "held-out accuracy after step 10: 1.000  (20.0 tokens per response)",
        "held-out accuracy after step 20: no response came back",
        "held-out accuracy after step 30: nothing scores responses",
    ]


def test_what_models_rewards_and_servers_wrote_does_not_steer_the_terminal(streams):
    out, err = streams
    evil = "a\x1b[2J\x1b]0;t\x07\x9b1m\u202e\ud800b"
    prompt = Prompt("p", np.array([1]), evil, label=evil)
    view = RunView(Console(out, err), 10)
    view.samples(evil, [(prompt, rollout(evil, Verdict(VerdictKind.CRASH, detail=evil)))])
    view.notice(evil)
    view.warning(evil)
    shown = "a\\x1b[2J\\x1b]0;t\\x07\\x9b1m\\u202e\\ud800b"
    assert out.getvalue().count(shown) >= 3 and err.getvalue().count(shown) == 2
    assert not set(out.getvalue() + err.getvalue()) & {"\x1b", "\x07", "\x9b", "\u202e", "\ud800"}


def test_warnings_name_flags_and_responses_stay_as_they_are(streams):
    out, err = streams
    view = RunView(Console(out, err), 10)
    view.warning("``CheckpointSpec.every=N`` saves them")
    view.waiting("see ``seed``")
    view.samples("Before", [(Prompt("p", np.array([1]), "``seed``"), rollout("``seed``", None))])
    assert err.getvalue() == "warning: --save_steps N saves them\nsee --seed\n"
    assert out.getvalue().count("``seed``") == 2


def test_run_view_evaluation_with_several_samples_and_sources_shows_pass_at_k_of_each(streams):
    out, err = streams
    metrics = {"eval/accuracy": 0.5, "eval/response_tokens": 20.0, "eval/pass@1": 0.5, "eval/pass@2": 0.75}
    for source, right in (("aime", 0.25), ("gsm8k", 0.5)):
        metrics |= {f"eval/{source}/pass@1": right, f"eval/{source}/pass@2": 2 * right}
        metrics |= {f"eval/{source}/response_tokens": 30.0, f"eval/{source}/truncated": 0.1}
    RunView(Console(out, err), 10).evaluation(0, metrics)
    assert out.getvalue().splitlines() == [
        "held-out accuracy before training: 0.500  (pass@2 0.750, 20.0 tokens per response)",
        "  aime   pass@1 0.250, pass@2 0.500, 30.0 tokens per response, 10% cut off",
        "  gsm8k  pass@1 0.500, pass@2 1.000, 30.0 tokens per response, 10% cut off",
    ]


def test_run_view_evaluation_shows_the_first_sources_of_many(streams):
    out, err = streams
    metrics = {"eval/accuracy": 0.5, "eval/response_tokens": 20.0}
    for number in range(8):
        metrics |= {f"eval/s{number}/{name}": 0.5 for name in ("pass@1", "response_tokens", "truncated")}
    RunView(Console(out, err), 10).evaluation(0, metrics)
    _, *sources = out.getvalue().splitlines()
    assert [line.split()[0] for line in sources] == ["s0", "s1", "s2", "s3", "s4", "s5", "and"]
    assert sources[-1] == "  and 2 more"


def test_run_view_evaluation_without_rewards_does_not_look_like_a_worse_policy(streams):
    out, err = streams
    view = RunView(Console(out, err), 10)
    view.evaluation(0, {"eval/accuracy": 0.5, "eval/response_tokens": 20.0, "eval/failed": 0.0})
    assert err.getvalue() == ""
    view.evaluation(5, {"eval/accuracy": 0.0, "eval/response_tokens": 20.0, "eval/failed": 0.375})
    text = "notice: 37.5 % of the held-out answers have no reward and count as wrong\n"
    assert err.getvalue() == text


def test_run_view_failed_samples_are_a_notice_on_stderr(streams):
    out, err = streams
    RunView(Console(out, err), 10).step(3, 10, METRICS | {"samples/failed": 2.0})
    assert err.getvalue() == "notice: step 3: 2 samples have no reward and were not trained on\n"


@pytest.mark.parametrize(("fill", "told"), [(0.5, ""), (0.2449, "notice: training passes are 24 % full: ")])
def test_run_view_passes_of_the_first_step_that_are_not_half_full_are_told(streams, fill, told):
    out, err = streams
    view = RunView(Console(out, err), 10)
    for step in (3, 4):
        view.step(step, 10, METRICS | {"throughput/pass_fill": fill})
    assert err.getvalue() == (f"{told}--micro_batch_tokens fills them\n" if told else "")


def test_run_view_on_a_pipe_an_early_end_is_a_line(streams):
    out, err = streams
    RunView(Console(out, err), 10).ending(EngineError("a process is gone"))
    assert err.getvalue() == "ending the processes of the run ...\n"


def test_show_results_names_accuracy_and_every_place(streams):
    out, err = streams
    parts = {"startup": 15.0, "first_evaluation": 2.0, "steps": 40.0, "final_save": 2.96, "remainder": 0.04}
    metrics = {"eval/accuracy_before": 0.25, "eval/accuracy_after": 0.99, "time/total": 60.0}
    metrics |= {f"time/{name}": value for name, value in parts.items()}
    metrics |= {"eval/loss_before": 1.5, "eval/loss_after": 0.25, "memory/trainer_peak_bytes": 3 * 2**30}
    show_results(Console(out, err), "/runs/a b", {"tensorboard": "tensorboard", "final model": "model"}, metrics)
    text = out.getvalue()
    assert "held-out accuracy  0.250 -> 0.990\n  held-out loss      1.5000 -> 0.2500\n" in text
    assert "trainer memory     3.00 GiB at most on one GPU\n" in text
    assert "60.0: starting 15.0, first evaluation 2.0, steps 40.0, saving 3.0, rest 0.0\n" in text
    assert "/runs/a b/model" in text
    assert "tensorboard --logdir '/runs/a b'" in text
    assert "AutoModelForCausalLM.from_pretrained('/runs/a b/model')" in text


@pytest.mark.parametrize("has_code", [False, True])
@pytest.mark.parametrize("has_head_file", [False, True])
def test_show_results_says_how_python_loads_the_model_that_was_saved(streams, tmp_path, has_code, has_head_file):
    model = tmp_path / "model"
    model.mkdir()
    auto_map = {"auto_map": {"AutoModel": "modeling_mine.MineModel"}} if has_code else {}
    (model / "config.json").write_text(json.dumps(auto_map))
    if has_head_file:  # which plain transformers does not read
        (model / "value_head.safetensors").touch()
    out, err = streams
    show_results(Console(out, err), str(tmp_path), {"final model": "model"}, {}, loader="AutoModelForX.from_pretrained")
    lines = {
        (False, False): f"AutoModelForX.from_pretrained('{model}')",
        (True, False): f"AutoModelForX.from_pretrained('{model}', trust_remote_code=True)",
        (False, True): f"rlhf_models.loading.load_reward_model('{model}', dtype='float32')",
        (True, True): "rlhf_models.loading.load_reward_model("
        f"rlhf_data.own_code.TrustedModel('{model}'), dtype='float32')",
    }
    assert out.getvalue().splitlines()[-1].partition("to load it:")[2].strip() == lines[has_code, has_head_file]


def test_live_line_has_a_text_for_every_phase(streams):
    assert DOING.keys() == PHASES.keys()
    assert not {text for name, text in DOING.items() if text == name}
    terminal = Terminal()
    view = RunView(Console(Terminal(), terminal), 10)
    for name, text in DOING.items():
        view.phase(name)
        assert text in terminal.getvalue()


def test_console_pipe_has_no_control_codes_and_does_not_wrap(streams, monkeypatch):
    out, err = streams
    assert Console(out, Terminal()).is_terminal and not Console(Terminal(), io.StringIO()).is_terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = Console(out, err)
    console.result("word " * 100, "bold red")
    console.row([("[b]:smile: ", "red"), ("word " * 100, "")])
    console.log("word " * 100, "red")
    assert out.getvalue() == "word " * 100 + "\n[b]:smile: " + "word " * 100 + "\n"
    assert err.getvalue() == "word " * 100 + "\n"


def test_console_terminal_has_colours_unless_no_color_is_set(monkeypatch, streams):
    coloured, plain = Terminal(), Terminal()
    Console(coloured, Terminal()).result("text", "red")
    good, bad = (rollout("2", Verdict(kind, 0.0)) for kind in (VerdictKind.OK, VerdictKind.WRONG))
    prompt = Prompt("p", np.array([1]), "?")
    RunView(Console(coloured, Terminal()), 10).samples("Before", [(prompt, good), (prompt, bad)])
    monkeypatch.setenv("NO_COLOR", "1")
    Console(plain, Terminal()).result("text", "red")
    assert "\x1b[31m" in coloured.getvalue()
    assert "1. \x1b[32mok\x1b[0m" in coloured.getvalue() and "2. \x1b[31mwrong\x1b[0m" in coloured.getvalue()
    assert "\x1b[31m" not in plain.getvalue()


def test_run_view_estimates_the_first_phases_by_their_parts_and_later_steps_by_the_steps(streams, monkeypatch):
    shown = []
    monkeypatch.setattr(Progress, "show", lambda self, text, **more: shown.append((text, more)))
    view = RunView(Console(*streams), 10)
    view.phase("evaluate")
    view.progress(3, 8)
    view.phase("generate")
    view.progress(5, 16)
    view.phase("train")
    common = {"ends_in_s": None, "announce": False, "above": []}
    assert shown == [
        ("answering held-out prompts", common),
        ("answering held-out prompts", common | {"done": 3, "total": 8}),
        ("step 1/10: generating", common),
        ("step 1/10: generating", common | {"done": 5, "total": 16}),
        ("step 1/10: training", common),
    ]
    view.step(1, 10, METRICS | {"time/step": 20.0})
    view.phase("generate")
    text, more = shown[-1]
    assert text == "step 2/10: generating"
    assert more["ends_in_s"] == pytest.approx(180, abs=1)
    view.step(2, 10, METRICS | {"time/step": 10.0})
    view.phase("generate")
    assert shown[-1][1]["ends_in_s"] == pytest.approx(120, abs=1)


class Above(Console):
    """Keeps what is shown above the live line, and on it."""

    def __init__(self, streams):
        super().__init__(*streams)
        self.shown = []
        self.working = lambda text, above=(), **_: self.shown.append((list(above), text))


def test_run_view_shows_curves_phases_and_the_queue_above_the_live_line(streams):
    console = Above(streams)
    view = RunView(console, 10)
    view.phase("generate")
    assert console.shown == [([], "step 1/10: generating")]
    seconds = {"time/generate": 6.0, "time/train": 3.0, "time/sync": 0.95, "time/write": 0.05, "time/step": 10.0}
    for step, (reward, accuracy) in enumerate([(0.0, 0.5), (0.5, 0.5), (1.0, 0.5)], start=1):
        view.step(step, 10, METRICS | seconds | {"rollout/reward": reward, "rollout/accuracy": accuracy})
    view.phase("train")
    assert console.shown[-1] == (
        [
            "  reward 1.000 \u2581\u2585\u2588  accuracy 0.500 \u2581\u2581\u2581",
            "  last step 10 s: generate 60%, train 30%, sync 10%",
        ],
        "step 4/10: training",
    )
    queue = {"async/waiting_groups": 12.0, "async/groups_in_flight": 64.0}
    view.step(4, 10, seconds | queue)
    view.phase("generate")
    assert console.shown[-1][0][-1] == "  queue: 12 groups waited and 64 were generated when it was taken"
    view.stopping()
    view.phase("save")
    assert console.shown[-1] == ([], "saving the model")


def test_sparkline_has_the_last_values_between_the_least_and_the_largest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
    assert sparkline([9.0, -1.0, 1.0], width=2) == "\u2581\u2588"
    assert sparkline([1.0, math.nan, 2.0, math.inf]) == "\u2581 \u2588 "
    assert sparkline([]) == "" and sparkline([3.0, 3.0]) == "\u2581\u2581"
