"""The environment's set-up gives uv and pip the certificates that the system trusts, unless the machine names others.

The module extension is Starlark that is also Python, so its functions run here with a stand-in for Bazel's context.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "third_party/python/uv.bzl"
DEBIAN = "/etc/ssl/certs/ca-certificates.crt"
RED_HAT = "/etc/pki/tls/certs/ca-bundle.crt"
SYSTEM = {"UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}


class Anything:
    """The builtins of Bazel that only declare: each call and each attribute is another one."""

    def __call__(self, *words: Any, **options: Any) -> "Anything":
        return self

    def __getattr__(self, name: str) -> "Anything":
        return self


@pytest.fixture(scope="module")
def uv() -> dict[str, Any]:
    declared = ("attr", "module_extension", "repository_rule", "tag_class")
    functions: dict[str, Any] = dict.fromkeys(declared, Anything())
    exec(compile(SOURCE.read_text(encoding="utf-8"), SOURCE, "exec"), functions)
    return functions


def machine(variables: dict[str, str], files: tuple[str, ...], pip_cert: str) -> SimpleNamespace:
    """A context of a repository rule, on a machine with these variables, files and pip's configured certificates."""
    return SimpleNamespace(
        getenv=variables.get,
        path=lambda file: SimpleNamespace(exists=file in files),
        execute=lambda command: SimpleNamespace(stdout=pip_cert if command[-1] == "global.cert" else ""),
        attr=SimpleNamespace(torch_backend="cpu"),
    )


@pytest.mark.parametrize(
    ("variables", "files", "pip_cert", "for_uv", "for_pip"),
    [
        ({}, (DEBIAN,), "", SYSTEM, {"PIP_CERT": DEBIAN}),
        ({}, (RED_HAT,), "", SYSTEM, {"PIP_CERT": RED_HAT}),
        ({}, (), "", SYSTEM, {}),
        ({"UV_SYSTEM_CERTS": "0"}, (), "", {}, {}),
        ({"UV_NATIVE_TLS": "0"}, (), "", {}, {}),
        ({}, (DEBIAN,), "/own.pem\n", SYSTEM | {"SSL_CERT_FILE": "/own.pem"}, {}),
        ({"PIP_CERT": "/own.pem"}, (DEBIAN,), "", SYSTEM | {"SSL_CERT_FILE": "/own.pem"}, {}),
        ({"REQUESTS_CA_BUNDLE": "/own.pem"}, (DEBIAN,), "", SYSTEM, {}),
        ({"SSL_CERT_FILE": "/own.pem"}, (DEBIAN, "/own.pem"), "", SYSTEM, {"PIP_CERT": "/own.pem"}),
    ],
)
def test_uv_and_pip_trust_what_the_machine_trusts(
    uv: dict[str, Any],
    variables: dict[str, str],
    files: tuple[str, ...],
    pip_cert: str,
    for_uv: dict[str, str],
    for_pip: dict[str, str],
) -> None:
    context = machine(variables, files, pip_cert)
    environ = uv["_environ"](context, "python3")
    assert environ == for_uv
    assert uv["_pip_environ"](context, environ) == for_pip
