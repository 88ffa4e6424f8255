"""A user's own function in a Python file: a policy loss or advantages of named tensors, or one of rollout groups, which
`own_groups` calls. docs/own_losses.md has the contract.

    def policy_loss(logprobs, old_logprobs, advantages, loss_mask): return [B, T] losses of tokens
    def advantages(rewards, group_ids): return [B] or [B, T] advantages
"""

import ast
import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_data.errors import ConfigError, missing_file
from rlhf_rollout.workers.user_code import Target, bound_names, explain

FOLDER = "own_code"  # in the folder of a run
# Function to the tensors, or groups, that it may take, by name.
INPUTS: Mapping[str, tuple[str, ...]] = {
    "policy_loss": ("logprobs", "old_logprobs", "advantages", "loss_mask", "rollout_logprobs"),
    "advantages": ("rewards", "group_ids", "loss_mask", "token_rewards", "rollout_logprobs", "truncated"),
    "keep_group": ("group",),
    "step_metrics": ("groups", "left_out"),
}
_WITHOUT_TRACE = ("step_metrics",)  # in what a run learns: one that continues may have another content of these


class OwnCodeError(ConfigError):
    """A function of the user's own fails, or returns what it must not."""


@dataclass(frozen=True, slots=True)
class OwnCode:
    """One function of a user's file. The source travels to the ranks, which all run what was checked.

    Attributes:
        function: a name of `INPUTS`.
        path: absolute, of the file.
        source: its content.
    """

    function: str
    path: str
    source: str

    @classmethod
    def read(cls, function: str, path: Path) -> "OwnCode":
        """Read a file. Raises ConfigError if there is none, or it is no Python in UTF-8 or lacks the function."""
        names = top_names(path)
        if function not in names and "*" not in names:
            raise _missing(function, str(path))
        try:
            source = path.read_bytes().decode("utf-8-sig")  # without the mark that some editors begin a file with
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8: {error}", hint="save it in UTF-8") from None
        return cls(function, str(path.absolute()), source)

    @property
    def digest(self) -> str:
        """The SHA-256 of the source, in hex."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    def check_recorded(self, folder: Path) -> None:
        """Raise ConfigError if the run in `folder` has learned with another content of the file."""
        copy = folder / FOLDER / f"{self.function}.py"
        if self.function not in _WITHOUT_TRACE and copy.is_file() and copy.read_bytes() != self.source.encode():
            message = f"{self.path} (SHA-256 {self.digest[:12]}...) is not the file that the run in {folder} began with"
            raise ConfigError(message, hint=f"copy {copy} to {self.path}, or start a new run with this file")

    def record(self, folder: Path) -> None:
        """Copy the file to the folder of a run, and list it in SHA256SUMS there. Raises like `check_recorded`."""
        self.check_recorded(folder)
        home = folder / FOLDER
        home.mkdir(exist_ok=True)
        (home / f"{self.function}.py").write_bytes(self.source.encode())
        sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(home.glob("*.py"))]
        (home / "SHA256SUMS").write_text("".join(sums))

    def call(self, tensors: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Call the function with those of `tensors` that it takes; return its tensor, and metrics by name.

        Raises:
            ConfigError: the file cannot be imported, the function raises, or it returns something else than the
                contract says.
            torch.OutOfMemoryError: the device has too little memory, which is no fault of the function.
        """
        result = self.run(tensors)
        result, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        self._check(result, metrics, tensors["loss_mask"].shape)
        return result, metrics

    def run(self, inputs: Mapping[str, Any], place: str = "") -> Any:
        """Return what the function returns for those of `inputs` that it takes. Raises like `call`.

        `place` is where the function was called, for the error.
        """
        import torch

        try:
            function, names = _load(self)
            return function(**{name: inputs[name] for name in names})
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as error:
            raise self.error(f"failed{place}: {explain(error, Target(self.path))}", "mend it there") from error

    def error(self, problem: str, hint: str) -> OwnCodeError:
        """Return the error that says what is wrong with the function."""
        return OwnCodeError(f"{self.function} of {self.path} {problem}", hint=hint)

    def _check(self, result: Any, metrics: Any, shape: tuple[int, ...]) -> None:
        import torch

        shapes = {"[B, T]": shape} | ({"[B]": shape[:1]} if self.function == "advantages" else {})
        allowed = " or ".join(shapes)
        if not isinstance(result, torch.Tensor):
            raise self.error(f"returned {type(result).__name__}, not a tensor", f"return a tensor {allowed}")
        if result.shape not in shapes.values():
            message = f"returned a tensor {list(result.shape)}, and [B, T] is {list(shape)}"
            raise self.error(message, f"return {allowed}, without a sum or mean over tokens")
        if result.dtype != torch.float32:
            raise self.error(f"returned {result.dtype}", "return float32: convert with .float()")
        if metrics and self.function == "advantages":
            raise self.error("returned metrics, which a policy loss alone may return", "return the tensor alone")
        if not isinstance(metrics, dict):
            raise self.error(f"returned metrics as {type(metrics).__name__}", "return a dictionary of tensors [B, T]")
        for name, values in metrics.items():
            if not str(name).isidentifier() or not isinstance(values, torch.Tensor) or values.shape != shape:
                hint = "return {name: tensor [B, T]}, with names of letters, digits and _"
                raise self.error(f"returned a metric `{name}` that is no tensor {list(shape)}", hint)


def top_names(path: Path) -> set[str]:
    """Return the names of functions, assignments and imports at the top of a file, which is not imported.

    Raises ConfigError if there is no such file, or it is not Python.
    """
    if not path.is_file():
        raise ConfigError(missing_file("file of your own code", path))
    bound_names(path, "file")  # the error of a file that is not Python
    names: set[str] = set()
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@cache
def _load(code: OwnCode) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Import the code; return its function, and the names of what it takes."""
    name = f"rlhf_own_{code.digest[:16]}"
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__file__ = code.path
        if (folder := str(Path(code.path).parent)) not in sys.path:
            sys.path.append(folder)  # at the end: no file there takes the place of a library
        sys.modules[name] = module  # dataclasses and pickle look there
        try:
            exec(compile(code.source, code.path, "exec"), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    function = getattr(sys.modules[name], code.function, None)
    if not callable(function):
        raise _missing(code.function, code.path)
    known = INPUTS[code.function]
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function, known
    if unknown := [p.name for p in parameters if p.name not in known and p.default is p.empty]:
        raise code.error(f"takes `{unknown[0]}`, which it is not given", f"take some of {', '.join(known)}")
    return function, tuple(parameter.name for parameter in parameters if parameter.name in known)


def _missing(function: str, path: str) -> ConfigError:
    hint = f"write def {function}({', '.join(INPUTS[function])}), with those of them that it uses"
    return ConfigError(f"{path} has no function `{function}`", hint=hint)
