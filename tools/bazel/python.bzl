"""Python targets of this repository."""

load("@rules_python//python:py_binary.bzl", _py_binary = "py_binary")
load("@rules_python//python:py_library.bzl", _py_library = "py_library")
load("@rules_python//python:py_test.bzl", _py_test = "py_test")
load("//tools/bazel:main.bzl", "main_module")
load("//tools/bazel:wheel.bzl", "wheel")

# Attributes of a test that starts processes of Ray, vLLM or DeepSpeed. It needs a few GB. It asks for one core, though it
# uses more: other tests would overtake it, until such tests alone are left, which wait for their processes.
HEAVY = {
    "size": "large",
    "tags": ["resources:memory:3000"],
}

# Attributes of such a test that starts so many that it takes minutes: a busy machine takes several times as long.
LONG = HEAVY | {"size": "enormous"}

# Attributes of a test that waits for most of its time, for deadlines and small processes. It runs beside any others.
WAITING = {"tags": ["resources:cpu:0.2"]}

def on_gpu(gb = 4, cores = 1.5, memory = 4000, alone = False, **kwargs):
    """Attributes of a test on a GPU, so that tests run side by side as far as the GPU and the host have room.

    Args:
      gb: the most memory of the GPU that the test takes.
      cores: of the host, on average.
      memory: of the host, in MB.
      alone: whether no other test may run meanwhile, as one that measures the free memory of the GPU needs.
      **kwargs: further attributes.

    Returns:
      the attributes.
    """
    needs = [("cpu", cores), ("memory", memory), ("gpu_gb", gb)]
    tags = ["gpu"] + ["resources:{}:{}".format(*need) for need in needs] + (["exclusive"] if alone else [])
    return {"size": "large", "tags": tags} | kwargs

def py_library(name, **kwargs):
    """A py_library whose sources live under `src/`."""
    kwargs.setdefault("imports", ["src"])
    _py_library(name = name, **kwargs)

def py_binary(name, **kwargs):
    """A py_binary without the empty `__init__.py` files Bazel would add next to the sources."""
    _py_binary(name = name, legacy_create_init = 0, **kwargs)

def py_command(name, module, deps, **kwargs):
    """A binary that runs `module` as `python -m module` would, in the folder where the user typed `bazel run`.

    Args:
      name: the target's name.
      module: dotted name of the module.
      deps: libraries, the module's own among them.
      **kwargs: passed to py_binary.
    """
    main_module(
        name = name + "_main",
        module = module,
        out = name + "_main.py",
    )
    py_binary(
        name = name,
        srcs = [name + "_main.py"],
        main = name + "_main.py",
        deps = deps + ["//tools/bazel:launch"],
        **kwargs
    )

def pytest_test(name, srcs, deps = [], data = [], args = [], tags = [], **kwargs):
    """A py_test that runs its sources under pytest.

    Args:
      name: the target's name.
      srcs: test modules (`*_test.py`) and what they import: conftest.py, helpers.
      deps: libraries the tests import.
      data: files the tests read.
      args: further arguments of pytest.
      tags: Bazel tags. "gpu" also makes the test fail without a GPU.
      **kwargs: passed to py_test.
    """
    modules = [src for src in srcs if src.endswith("_test.py")]
    _py_test(
        name = name,
        srcs = srcs + ["//tools/bazel:pytest_main.py"] + (["//:conftest.py"] if "gpu" in tags else []),
        main = "//tools/bazel:pytest_main.py",
        args = ["$(rootpath {})".format(src) for src in modules] + args,
        data = data + ["//:pyproject.toml"],  # pytest's settings
        legacy_create_init = 0,
        deps = deps + ["@pypi//coverage", "@pypi//pytest"],
        tags = tags,
        **kwargs
    )

def pytest_tests(deps, folder = "", data = [], overrides = {}, also_on_gpu = {}, together = "", common = {}, imports = {}, shared = []):
    """Tests of the `*_test.py` under `folder`: a target per file, named after it, or one of several files.

    `--config=gpu` runs the targets named `*_gpu_test`, which have the tag gpu, and other builds run the rest.

    Args:
      deps: libraries the tests import.
      folder: where the tests are; other files there (conftest.py, helpers, data) go with each of them.
      data: further files the tests read.
      overrides: file in `folder` to attributes of its test, such as HEAVY. Those of a file named `*_gpu_test.py` are
        `on_gpu()` unless given.
      also_on_gpu: files in `folder` that use a GPU if there is one, to attributes of that test: `x_test.py` also becomes
        the target `x_gpu_test`.
      together: name of one target for all files without overrides that need no GPU, which run in one process. A process
        takes longer to import PyTorch than most files to run. `--test_filter=x_test` runs one file of them.
      common: attributes of that target.
      imports: file in `folder` to further libraries that it imports; if given, other tests under `folder` are left out.
      shared: further Python files that go with each test.
    """
    prefix = folder + "/" if folder else ""
    inside = prefix if imports else prefix + "**/"
    tests = native.glob([inside + "*_test.py"], allow_empty = True)
    shared = shared + native.glob([inside + "*.py"], exclude = [inside + "*_test.py"], allow_empty = True)
    files = native.glob([prefix + "**"], exclude = [prefix + "**/*.py", "**/*.pyc", "BUILD.bazel"], allow_empty = True)
    for file in list(overrides) + list(also_on_gpu):
        if prefix + file not in tests:
            fail("{} is not a test in {}/{}".format(file, native.package_name(), folder))
    grouped = []
    for test in tests:
        file = test.removeprefix(prefix)
        name = test.split("/")[-1].removesuffix(".py")
        is_on_gpu = name.endswith("_gpu_test")
        attributes = dict(overrides.get(file, on_gpu() if is_on_gpu else {}))
        if is_on_gpu and "gpu" not in attributes.get("tags", []):
            fail("the attributes of {} are not those of on_gpu()".format(file))
        attributes.setdefault("size", "medium")
        parts = dict(srcs = [test] + shared, data = data + files, deps = _union(deps, imports.get(file, [])))
        if file in also_on_gpu:
            pytest_test(name = name.removesuffix("_test") + "_gpu_test", **(parts | also_on_gpu[file]))
        if together and not is_on_gpu and file not in overrides:
            grouped.append(test)
            continue
        pytest_test(name = name, **(parts | attributes))
    if grouped:
        # Its time is the sum of those of its files, and a busy machine takes several times as long.
        needed = _union(deps, *[imports.get(test.removeprefix(prefix), []) for test in grouped])
        together_parts = dict(size = "enormous", srcs = grouped + shared, data = data + files, deps = needed)
        pytest_test(name = together, **(together_parts | common))

def _union(*lists):
    """Return the entries of lists, each once."""
    return {entry: None for entries in lists for entry in entries}.keys()

def _inside(folder, files):
    """Return the entries of files that lie right in a folder, by the rest of their paths."""
    return {file.removeprefix(folder + "/"): parts for file, parts in files.items() if file.rpartition("/")[0] == folder}

def _labels(words):
    """Return the targets that the words of a units.bzl stand for: a unit, a package, or a file of the tests' support."""
    labels = []
    for word in words:
        package, _, unit = word.partition("/")
        if package == "tests":
            labels.append("//tests/support:" + word.removeprefix("tests/support/"))
        else:
            labels.append("//packages/{}:{}".format(package, "src/" + unit if unit else package.replace("-", "_")))
    return labels

def python_package(
        name,
        deps,
        users,
        units = {},
        imports = {},
        test_deps = [],
        test_data = [],
        tests = {},
        also_on_gpu = {},
        package_test = {}):
    """An installable package: its library, its tests, `:wheel`, and `:sources` and `:pages` for checks.

    The tests of a folder `tests/x` are one target, `:x_test`, and those in `tests/` itself `:package_test`, besides the
    files that `tests` names.

    Args:
      name: the import package, `src/<name>/`.
      deps: what the package needs without its extras, as in pyproject.toml.
      users: the packages that may depend on it.
      units: UNITS of the package's units.bzl, which become the libraries `:src/<unit>`; without it there is one library.
      imports: TESTS of the package's units.bzl.
      test_deps: what only the tests need.
      test_data: files that the tests read besides those in `tests/`.
      tests: attributes of files in `tests/` that are targets of their own, as in `pytest_tests`.
      also_on_gpu: attributes of files in `tests/` that use a GPU if there is one, as in `pytest_tests`.
      package_test: attributes of the tests of a folder, such as WAITING.
    """
    junk = ["**/__pycache__/**"]
    data = native.glob(["src/**"], exclude = ["src/**/*.py"] + junk, allow_empty = True)
    own_deps = [label for label in deps if not label.startswith("//packages/")]
    for unit, (members, words) in units.items():
        py_library(
            name = "src/" + unit,
            srcs = native.glob(["src/{}/{}".format(name, member + "*.py" if member.endswith("/") else member + ".py") for member in members]),
            data = data if unit == "__init__" else [],
            visibility = users + ["//packages:__subpackages__", "//tests:__subpackages__"],
            deps = own_deps + _labels(words) + ([] if unit == "__init__" else [":src/__init__"]),
        )
    py_library(
        name = name,
        srcs = [] if units else native.glob(["src/**/*.py"]),
        data = data,
        visibility = users,
        deps = deps + [":src/" + unit for unit in units],
    )
    folders = {"": None} | {test.rpartition("/")[0]: None for test in imports}
    for folder in folders:
        prefix = folder + "/" if folder else ""
        files = {test: words for test, words in imports.items() if test.rpartition("/")[0] == folder}
        pytest_tests(
            folder = "tests/" + folder if folder else "tests",
            data = test_data,
            deps = own_deps + test_deps + ([] if imports else [":" + name]),
            overrides = _inside(folder, tests) if imports else tests,
            also_on_gpu = _inside(folder, also_on_gpu),
            together = folder.replace("/", "_") + "_test" if folder else "package_test",
            common = package_test,
            imports = {test.removeprefix(prefix): _labels(words) for test, words in files.items()},
            shared = native.glob(["tests/*.py"], exclude = ["tests/*_test.py"], allow_empty = True) if folder else [],
        )
    wheel(
        name = "wheel",
        srcs = native.glob(["src/**"], exclude = junk) + ["README.md"],
        pyproject = "pyproject.toml",
        visibility = ["//:__pkg__"],
    )
    native.filegroup(
        name = "pages",
        srcs = native.glob(["**/*.md", "bench/results/*.json"], exclude = junk),
        visibility = ["//tests/pages:__pkg__", "//tools/bench:__pkg__"],
    )
    native.filegroup(
        name = "sources",
        srcs = native.glob(["**/*.py", "src/**"], exclude = junk) + native.glob(["units.bzl"], allow_empty = True) + ["BUILD.bazel", "README.md", "pyproject.toml"],
        visibility = ["//tests/install:__pkg__", "//tests/pages:__pkg__", "//tools/lint:__pkg__"],
    )
