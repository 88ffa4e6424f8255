"""The command line of the scripts that write a page."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path


def parser(description: str) -> ArgumentParser:
    """Return the parser of a script that writes a page."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page differs")
    return parser


def write(page: Path, renew: Callable[[str], str], args: Namespace) -> int:
    """Write a page whose text `renew` makes from the old one, or check it with --check; return the exit status."""
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    new = renew(old)
    if args.check:
        return int(old != new)
    page.write_text(new, encoding="utf-8")
    return 0
