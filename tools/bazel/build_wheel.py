"""Build the wheel of one package with the backend that its pyproject.toml names (PEP 517), without a network."""

import argparse
import importlib
import os
import pathlib
import shutil
import tempfile
import tomllib


def main() -> None:
    """Copy the sources to a scratch folder with the layout of the workspace, and build there.

    A copy is needed because backends write beside the sources. The layout matters because pyproject.toml names files
    outside of its folder (`../../tools/...`). The package gets the license of the workspace, which a wheel must hold.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--package", type=pathlib.Path, required=True, help="the folder of pyproject.toml")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder for the wheel")
    parser.add_argument("sources", type=pathlib.Path, nargs="+")
    options = parser.parse_args()
    out = options.out.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        for source in options.sources:
            target = pathlib.Path(scratch, source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        os.chdir(pathlib.Path(scratch, options.package))
        shutil.copyfile(pathlib.Path(scratch, "LICENSE"), "LICENSE")
        # A fixed date makes the wheel the same for the same sources; this is the first date that a zip file can hold.
        os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")
        system = tomllib.loads(pathlib.Path("pyproject.toml").read_text(encoding="utf-8"))["build-system"]
        importlib.import_module(system["build-backend"]).build_wheel(str(out))


if __name__ == "__main__":
    main()
