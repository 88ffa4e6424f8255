"""A run that continues on a later day: its chat template writes the date of the day on which the run began."""

import json
from datetime import datetime
from pathlib import Path

import pytest

from rlhf_cli.commands.examples import COMMANDS
from rlhf_cli.commands.offline import _prepare
from rlhf_cli.commands.ppo_job import make_job, make_plan
from rlhf_cli.config.ppo import PpoConfig
from rlhf_cli.console.views import Console
from rlhf_cli.preflight.inputs import check_inputs
from rlhf_data.options.command_line import CommandLine
from rlhf_models.testing import tiny_model_dir
from rlhf_train.run.checkpoint import Checkpoints

BEGAN = datetime(2025, 12, 31, 23, 59, 59, 7)
TODAY = f"{datetime.now():%Y-%m-%d}"
TEMPLATE = (
    "{{ strftime_now('%Y-%m-%d') }} {% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model_dir(path / "dated")
    settings = path / "dated/tokenizer_config.json"
    fields = json.loads(settings.read_text()) | {"chat_template": TEMPLATE}
    settings.write_text(json.dumps(fields))
    (path / "dated/chat_template.jinja").unlink(missing_ok=True)
    return str(path / "dated")


@pytest.fixture(params=[True, False], ids=["with clock", "without"])
def run(request, tmp_path, monkeypatch) -> tuple[Path, str]:
    """The folder of a run that began in 2025, whose checkpoint has the clock or not, and the date that is expected."""
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    (tmp_path / "x.jsonl").write_text(json.dumps({"input": "2+2?", "output": "4", "chosen": "4", "rejected": "5"}))
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels): ...\n")
    checkpoints = Checkpoints(tmp_path / "run/checkpoints")
    checkpoints.begin(1)
    clock = {"template_clock": BEGAN.isoformat()} if request.param else {}
    checkpoints.commit(1, {"step": 1, **clock}, [], None)
    (tmp_path / "run/config.toml").write_text("")
    return tmp_path / "run", "2025-12-31" if request.param else TODAY


@pytest.mark.parametrize("resumes", [True, False])
def test_examples_of_a_run_that_continues_have_the_date_of_its_start(run, model, resumes):
    folder, date = run
    keys = ["--apply_chat_template", "--pretrain", model, "--dataset", "x.jsonl", "--max_len", "64"]
    resume = ["--resume", str(folder)] if resumes else []
    made = COMMANDS["sft"]
    config = CommandLine(config=made.config, prog="").parse([*keys, *resume]).config
    job, tokenizer = _prepare(made, config, folder, Console())
    [example] = job.examples
    expected = date if resumes else TODAY
    assert tokenizer.decode(example.token_ids, skip_special_tokens=True) == f"{expected} 2+2?4"
    clock = job.checkpoints.template_clock  # is saved again
    assert clock == BEGAN if expected != TODAY else f"{clock:%Y-%m-%d}" == TODAY


@pytest.mark.parametrize("resumes", [True, False])
def test_prompts_of_a_run_that_continues_have_the_date_of_its_start(run, model, monkeypatch, resumes):
    folder, date = run
    monkeypatch.setattr("rlhf_cli.preflight.inputs.try_rewards", lambda *args: [])
    flags = ["--pretrain", model, "--prompt_data", "x.jsonl", "--remote_rm_url", "reward.py", "--apply_chat_template"]
    flags += ["--prompt_max_len", "32", "--generate_max_len", "8", "--rollout_batch_size", "1"]
    flags += ["--train_batch_size", "1", "--train_steps", "1", *(["--resume", str(folder)] if resumes else [])]
    config = CommandLine(config=PpoConfig, prog="").parse(flags).config
    inputs = check_inputs(config, folder if resumes else folder.parent / "new")
    expected = date if resumes else TODAY
    assert inputs.prompts.prompts[0].text.startswith(f"{expected} 2+2?")
    job = make_job(config, inputs, make_plan(config, [0]), folder)
    clock = job.checkpoints.template_clock
    assert clock == inputs.template_clock
    assert clock == BEGAN if expected != TODAY else f"{clock:%Y-%m-%d}" == TODAY
