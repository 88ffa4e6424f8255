"""Fixtures of the tests here; the engines of `engine_testing` are built where a test asks for them."""

import textwrap

import pytest

from engine_testing import model_dir, subject

__all__ = ["model_dir", "subject"]


@pytest.fixture
def write(tmp_path):
    """Return a function that writes the code of a module, by default of a reward, and returns its path."""

    def write(code, name="reward.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(code))
        return str(path)

    return write
