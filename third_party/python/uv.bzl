"""Python environments for Bazel, built by uv from lock files.

Every `uv.environment` becomes a virtual environment and a Python toolchain. The hub has a target `@pypi//<package>` for
every package of the locks. Such a target has no files, because the interpreter finds the package in its own
site-packages; it declares the dependency, and a package that no lock has fails the build.
"""

_HUB_HEADER = """\
load("@rules_python//python:py_library.bzl", "py_library")

package(default_visibility = ["//visibility:public"])
"""

_LIBRARY = _HUB_HEADER + """
py_library(name = "{name}")

alias(
    name = "pkg",
    actual = ":{name}",
)
"""

_TOOLCHAIN = """
toolchain(
    name = "{name}",
    target_settings = {settings},
    toolchain = "@{repository}//:runtimes",
    toolchain_type = "@rules_python//python:toolchain_type",
)
"""

_ENVIRONMENT = """\
load("@rules_python//python:py_runtime.bzl", "py_runtime")
load("@rules_python//python:py_runtime_pair.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

py_runtime(
    name = "runtime",
    interpreter_path = "{interpreter}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtimes",
    py3_runtime = ":runtime",
)
"""

_PIP_TO_UV = {
    "cert": "SSL_CERT_FILE",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
}

# Certificates of authorities that the system trusts, those of a company among them: Debian, Red Hat, SUSE.
_SYSTEM_CERTIFICATES = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
]

# Modules that next to no test imports, half of the code. Python compiles them when a command imports them.
_NOT_COMPILED = "/site-packages/({})/".format("|".join([
    ".*/tests?",
    "torch/testing/_internal",
    "transformers/models/(?!auto/|llama/|qwen)[^/]*",
    "vllm/models",
    "ray/(autoscaler|data|llm|rllib|serve|train|tune)",
    "anthropic",
    "coreweave_evaluations",
    "databricks",
    "datasets",
    "google/(api_core|auth)",
    "huggingface_hub/(cli|inference)",
    "mlflow",
    "numba",
    "numpy/distutils",
    "openai/resources",
    "pip",
    "pyasn1_modules",
    "pygments/lexers",
    "sentry_sdk",
    "sympy/(physics|stats)",
    "textual",
    "trl/experimental",
    "vllm/benchmarks",
    "wandb/(apis|sdk/launch)",
]))

def _normalize(name):
    """Returns the name as `pip.parse` of rules_python spells it in labels."""
    return name.strip().lower().replace("-", "_").replace(".", "_")

def _locked_names(text):
    names = []
    for line in text.split("\n"):
        if line[:1] in ("", " ", "#", "-"):
            continue
        for stop in ("==", "[", "@", ";", " ", "\\"):
            line = line.split(stop)[0]
        if line:
            names.append(_normalize(line))
    return names

def _run(ctx, command, doing, environ = {}):
    result = ctx.execute(command, timeout = 3600, environment = environ)
    if result.return_code:
        fail("{} failed:\n{}{}".format(doing, result.stdout, result.stderr))
    return result.stdout.strip()

def _environ(ctx, python):
    """Returns variables for uv: the system's certificates, and pip's configuration, which uv does not read by itself."""
    environ = {}
    if not ctx.getenv("UV_SYSTEM_CERTS") and not ctx.getenv("UV_NATIVE_TLS"):
        environ = {"UV_SYSTEM_CERTS": "1", "UV_NATIVE_TLS": "1"}  # the second is its name before uv 0.11
    for option, variable in _PIP_TO_UV.items():
        if ctx.getenv(variable) or not python:
            continue
        result = ctx.execute([python, "-m", "pip", "config", "get", "global." + option])
        value = ctx.getenv("PIP_" + option.replace("-", "_").upper()) or result.stdout
        if value.strip():
            environ[variable] = ",".join([part for part in value.replace("\n", " ").split(" ") if part])
    if not ctx.attr.torch_backend:
        # A folder of wheels may hold torch's CPU build, whose version `2.13.0+cpu` satisfies the lock's `2.13.0`.
        environ["UV_FIND_LINKS"] = ""
    return environ

def _pip_environ(ctx, environ):
    """Returns a variable for pip with certificates, which pip before 24.2 does not take from the system by itself."""
    if "SSL_CERT_FILE" in environ or ctx.getenv("PIP_CERT") or ctx.getenv("REQUESTS_CA_BUNDLE"):
        return {}  # pip has its own configuration
    for file in [ctx.getenv("SSL_CERT_FILE")] + _SYSTEM_CERTIFICATES:
        if file and ctx.path(file).exists:
            return {"PIP_CERT": file}
    return {}

def _find_uv(ctx, python, environ):
    uv = ctx.which("uv")
    if uv:
        return uv
    if not python:
        fail("neither uv nor python3 is on PATH")
    _run(ctx, [python, "-m", "venv", "uv"], "creating an environment for uv")
    _run(ctx, ["uv/bin/python", "-m", "pip", "install", "--quiet", "uv=={}".format(ctx.attr.uv_version)], "installing uv", _pip_environ(ctx, environ))
    return ctx.path("uv/bin/uv")

def _sync(ctx, uv, python, environ):
    """Installs the lock. torch comes from a configured folder of wheels if it has the build, else from its own index."""
    sync = [uv, "pip", "sync", "--quiet", "--python", python, ctx.path(ctx.attr.lock)]
    backend = ["--torch-backend=" + ctx.attr.torch_backend] if ctx.attr.torch_backend else []
    if backend and (ctx.getenv("UV_FIND_LINKS") or environ.get("UV_FIND_LINKS")):
        if ctx.execute(sync, timeout = 3600, environment = environ).return_code == 0:
            return
    _run(ctx, sync + backend, "uv pip sync", environ)

def _compile(ctx, python):
    """Compiles the environment, which tests and other sandboxed actions can only read, apart from `_NOT_COMPILED`."""
    compileall = [python, "-m", "compileall", "-q", "-j", "0", "-x", _NOT_COMPILED, ctx.path(python).dirname.dirname]
    ctx.execute(compileall, timeout = 3600)  # the status is 1, because some packages hold templates that are not Python

def _digest(*parts):
    return "%x" % (hash("\n".join(parts)) & 0xffffffff)

def _environment_impl(ctx):
    python = ctx.getenv("RLHF_PYTHON")
    if not python:
        # The path contains a hash of the lock, so that a new lock invalidates every action that runs Python.
        digest = _digest(ctx.read(ctx.attr.lock), ctx.attr.python_version, ctx.attr.torch_backend)
        directory = ctx.path("env-" + digest)
        python = "{}/bin/python".format(directory)
        host_python = ctx.which("python3")
        environ = _environ(ctx, host_python)
        uv = _find_uv(ctx, host_python, environ)
        ctx.report_progress("installing " + ctx.attr.lock.name)
        create = [uv, "venv", "--quiet", "--no-project", directory, "--python"]
        preferred = create + [ctx.attr.python_version, "--no-python-downloads"]
        if ctx.execute(preferred, environment = environ).return_code:
            _run(ctx, create + [ctx.attr.python_range], "uv venv", environ)
        _sync(ctx, uv, python, environ)
        _compile(ctx, python)

    # rules_python 1 and later may start the interpreter through a link inside an environment of their own, which would
    # hide this one's site-packages; started by a script, the interpreter finds its own.
    launcher = "{}/python-{}".format(ctx.path("."), _digest(python))
    ctx.file(launcher, "#!/bin/sh\nexec \"{}\" \"$@\"\n".format(python))
    ctx.file("BUILD.bazel", _ENVIRONMENT.format(interpreter = launcher))

_environment = repository_rule(
    implementation = _environment_impl,
    attrs = {
        "lock": attr.label(mandatory = True),
        "python_range": attr.string(mandatory = True),
        "python_version": attr.string(mandatory = True),
        "torch_backend": attr.string(),
        "uv_version": attr.string(mandatory = True),
    },
)

def _hub_impl(ctx):
    for name in ctx.attr.packages:
        ctx.file(name + "/BUILD.bazel", _LIBRARY.format(name = name))
    toolchains = [
        _TOOLCHAIN.format(name = name, repository = repository, settings = repr(settings))
        for name, (repository, settings) in json.decode(ctx.attr.toolchains).items()
    ]
    ctx.file("BUILD.bazel", "".join(toolchains))

_hub = repository_rule(
    implementation = _hub_impl,
    attrs = {
        "packages": attr.string_list(),
        "toolchains": attr.string(doc = "JSON: name to [repository, [config_setting]], the most specific first."),
    },
)

def _uv_impl(module_ctx):
    hubs = [tag for module in module_ctx.modules for tag in module.tags.hub]
    environments = [tag for module in module_ctx.modules for tag in module.tags.environment]
    for hub in hubs:
        packages, toolchains = {}, {}

        # Toolchains are tried in the order of their names, so the one without a setting comes last.
        for tag in environments:
            if tag.hub != hub.name:
                continue
            repository = "{}_{}".format(hub.name, tag.name)
            _environment(
                name = repository,
                lock = tag.lock,
                python_range = hub.python_range,
                python_version = hub.python_version,
                torch_backend = tag.torch_backend,
                uv_version = hub.uv_version,
            )
            name = ("1_" if tag.setting else "2_") + tag.name
            toolchains[name] = (repository, [str(tag.setting)] if tag.setting else [])
            packages.update({name: None for name in _locked_names(module_ctx.read(tag.lock))})
        _hub(name = hub.name, packages = sorted(packages), toolchains = json.encode(toolchains))
    return module_ctx.extension_metadata(reproducible = True)

uv = module_extension(
    doc = "Environments from lock files, and one repository that names their packages.",
    implementation = _uv_impl,
    tag_classes = {
        "environment": tag_class(attrs = {
            "hub": attr.string(default = "pypi"),
            "lock": attr.label(mandatory = True, doc = "Requirements with exact versions, as `uv export` writes them."),
            "name": attr.string(mandatory = True),
            "setting": attr.label(doc = "The config_setting that selects this environment; none makes it the default."),
            "torch_backend": attr.string(doc = "The build of torch, as `uv pip --torch-backend` names it."),
        }),
        "hub": tag_class(attrs = {
            "name": attr.string(mandatory = True),
            "python_range": attr.string(mandatory = True, doc = "The versions that will do where there is no other."),
            "python_version": attr.string(mandatory = True, doc = "The version that the locks were resolved for."),
            "uv_version": attr.string(mandatory = True, doc = "The release installed when uv is not on PATH."),
        }),
    },
)
