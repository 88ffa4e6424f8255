"""`doctor`: look at this machine and its libraries, and say what is wrong, what it costs, and what to type."""

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from rlhf_cli.config.paths import user_folder, user_path
from rlhf_cli.console.exits import SUCCESS, exit_status
from rlhf_cli.doctor.finding import FAULT, Finding, of_error, public
from rlhf_data.options.command_line import CommandLine, show_parsed
from rlhf_data.options.declare import Config, Section, flag
from rlhf_data.options.exits import FAILURE
from rlhf_rollout.commands.terminal import TERMINAL
from rlhf_train.run.interrupts import Interrupts

DESCRIPTION = """`rlhf doctor` looks at this machine and its libraries. Each finding is ok, a notice (something costs
time, or cannot be used) or a fault (runs end), with what it costs and what to type. At last the built-in model
generates, is trained and is synced once, in about half a minute. The status is 1 if there is a fault."""

# Variables that change what a run does, and may be shown; their values are shown as `public` leaves them.
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR", "OMP_NUM_THREADS", "LD_LIBRARY_PATH"),
    *("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HOME", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"),
    *("NO_PROXY", "no_proxy", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_P2P_DISABLE", "NCCL_DEBUG"),
)
_LIBRARIES = ("torch", "transformers", "vllm", "deepspeed", "ray")
_WIDTH = len("shared memory")


class DoctorSection(Section, title="doctor"):
    """What is looked at, and how it is told."""

    quick: bool = flag(False, "leave out the run of the built-in model")
    as_json: bool = flag(
        False,
        "write JSON for a report of a bug: without passwords, tokens and the name of the home folder",
        aliases=["json"],
    )
    save_path: str | None = flag(None, "folder whose disk is looked at; None: ./rlhf-output, where runs write")


class DoctorConfig(Config):
    """All options of `doctor`."""

    doctor: DoctorSection = DoctorSection()


COMMAND_LINE = CommandLine(config=DoctorConfig, prog="rlhf doctor", description=DESCRIPTION, resolve=user_path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return exit_status(_run, argv)


def _run(argv: Sequence[str]) -> int:
    parsed = COMMAND_LINE.parse(argv)
    show_parsed(parsed)
    if parsed.dry_run:
        return SUCCESS
    section = parsed.config.doctor
    folder = user_folder() / "rlhf-output" if section.save_path is None else user_path(section.save_path)
    found: list[Finding] = []
    ended = None

    def tell(finding: Finding) -> None:
        found.append(finding)
        if not section.as_json:
            TERMINAL.progress.clear()
            print(describe(finding), flush=True)

    with Interrupts() as interrupts:
        try:
            with closing(interrupts):  # `timeout` sends its signal twice: the second one must not keep back the report
                for finding in findings(folder, with_run=not section.quick):
                    tell(finding)
        except KeyboardInterrupt as interrupt:
            ended = interrupt
            hint = "give it more time, or --quick, without the run of the built-in model"
            tell(Finding("doctor", FAULT, f"{interrupt} ended it", "what follows was not looked at", hint))
        if section.as_json:
            print(report(found), flush=True)
        else:
            levels = [finding.level for finding in found]
            print(f"\n{levels.count('fault')} fault(s), {levels.count('notice')} notice(s), {levels.count('ok')} ok")
        if ended is not None:
            raise ended
    return FAILURE if any(finding.level == FAULT for finding in found) else SUCCESS


def findings(folder: Path, *, with_run: bool) -> Iterator[Finding]:
    """Yield what is found on this machine, for runs that write to `folder`, as soon as it is known."""
    from rlhf_cli.doctor import libraries, machine
    from rlhf_cli.doctor.trial import trial_run

    ahead_s: list[float | None] = [None]

    def hub() -> Finding:
        finding, ahead_s[0] = machine.hub()
        return finding

    # Libraries take seconds to import, each in a process of its own: two at a time.
    pool = ThreadPoolExecutor(2)
    with ExitStack() as at_end, TERMINAL.progress.doing("looking at libraries and this machine"):
        at_end.callback(pool.shutdown, wait=False, cancel_futures=True)  # a signal waits for none of them
        waiting = [pool.submit(partial(checked, name, partial(libraries.library, name))) for name in _LIBRARIES]
        yield from checked("versions", libraries.versions)
        for name, check in {
            "GPU": machine.gpus,
            "shared memory": machine.shared_memory,
            "disk": partial(machine.disk, folder),
            "open files": machine.open_files,
            "ports": machine.ports,
            "sandbox": machine.sandbox,
            "hub": hub,
            "clock": lambda: machine.clock(folder, ahead_s[0]),
        }.items():
            yield from checked(name, check)
        for future in waiting:
            yield from future.result()
    with TERMINAL.progress.doing("adding up numbers over ranks"):
        yield from checked("ranks", libraries.ranks)
    if with_run:
        with TERMINAL.progress.doing("training the built-in model for one step"):
            yield from checked("trial run", trial_run)


def checked(name: str, check: Callable[[], Finding | Iterable[Finding]]) -> list[Finding]:
    """Return the findings of a check. One that raises is a fault itself, and does not end the others."""
    try:
        found = check()
    except Exception as error:
        return [of_error(name, error, "nothing is known of it")]
    return [found] if isinstance(found, Finding) else list(found)


def describe(finding: Finding) -> str:
    """Return a finding for people: a line, and one each for what it costs and what to type."""
    shown = finding.shown()
    lines = [f"{shown['level']:<6}  {shown['check']:<{_WIDTH}}  {shown['found']}"]
    lines += [
        f"{'':8}{title:<{_WIDTH}}  {shown[key]}"
        for title, key in (("  costs", "costs"), ("  type", "hint"))
        if shown[key]
    ]
    return "\n".join(lines)


def report(found: Iterable[Finding], environ: Mapping[str, str] = os.environ) -> str:
    """Return findings as JSON, with what else explains a fault and is nobody's secret."""
    machine = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "environment": {name: public(environ[name], environ) for name in _VARIABLES if name in environ},
    }
    return json.dumps({"findings": [finding.shown(environ) for finding in found], "machine": machine}, indent=2)
