"""The sandbox of the tests here."""

import os

import pytest

from rlhf_data.errors import ConfigError
from rlhf_rollout.rewards.code.sandbox import Bubblewrap, check_sandbox


@pytest.fixture(scope="session")
def bubblewrap():
    """Return a sandbox. Where none works, tests are skipped; with RLHF_REQUIRE_SANDBOX=1, as in Bazel, they fail."""
    try:
        check_sandbox(None)
    except ConfigError as error:
        if os.environ.get("RLHF_REQUIRE_SANDBOX") == "1":
            raise
        pytest.skip(str(error))
    return Bubblewrap()
