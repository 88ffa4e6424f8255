"""Dataclasses are frozen and have slots, except for those named here."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Their fields change while they live: counts, what is waited for, and the parts of something that is being built.
CHANGING = {
    "Absent", "Answer", "Asked", "BucketInitInfo", "BucketUpdateInfo", "CallError", "Checkpointer", "Client",
    "Controller", "Draft", "EngineSupervisor", "EnvironmentAgent", "EpisodeRecorder", "Evaluator", "GatewaySession",
    "GenerationCounts", "GenerationService", "GroupMaker", "Job", "LoadBalance", "PackGraph", "Patience", "Reply",
    "Report", "Request", "Residence", "RowErrors", "Sample", "StepCounts", "StepTable", "Ticket", "Turns", "_Branch",
    "_Place", "_Request", "_Running", "_Session", "_Slot", "_Split", "_Work",
}  # fmt: skip
# With slots a class cannot have two parents that have fields, as a job has, nor attributes that are no fields.
WITHOUT_SLOTS = {
    "BucketInitInfo", "BucketUpdateInfo", "CallError", "Checkpointer", "Client", "GenerationService", "GenerationSpec",
    "LearningSpec", "OnlineJob", "Report", "RunSpec", "TokenBatch", "_Request", "_Split",
}  # fmt: skip


def declared(path: Path):
    """Yield the name and the arguments of each dataclass of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for mark in getattr(node, "decorator_list", ()):
            call = mark if isinstance(mark, ast.Call) else ast.Call(mark, [], [])
            if isinstance(node, ast.ClassDef) and ast.unparse(call.func).split(".")[-1] == "dataclass":
                yield node.name, {word.arg: ast.literal_eval(word.value) for word in call.keywords}


def test_dataclasses_are_frozen_and_have_slots_but_for_those_that_change():
    files = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("kernels/src/**/*.py")]
    found = [(name, marks) for path in files for name, marks in declared(path)]
    assert len(found) > 100
    assert {name for name, marks in found if not marks.get("frozen")} == CHANGING
    assert {name for name, marks in found if not marks.get("slots")} == WITHOUT_SLOTS
