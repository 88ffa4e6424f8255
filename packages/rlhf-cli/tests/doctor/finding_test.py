"""What findings of `rlhf doctor` show, and what they do not: secrets and the name of the home folder."""

import json
import sys

import psutil
import pytest

from rlhf_cli.commands import doctor
from rlhf_cli.doctor.finding import Finding, of_error, public
from rlhf_data.errors import ConfigError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://ann:hunter22@proxy:3128", "http://***@proxy:3128"),
        ("ann:hunter22@proxy:3128", "***@proxy:3128"),
        ("socks5://proxy:3128", "socks5://proxy:3128"),
        ("the key is hf_abcdefgh, it says", "the key is ***, it says"),
        ("abc123 and abc12 in the log", "*** and abc12 in the log"),
        ("/home/ann/runs and /home/ann2/x", "~/runs and /home/ann2/x"),
        ("/home/ann", "~"),
        ("a token is asked for", "a token is asked for"),
        ("a\x1b[2Jb", "a\\x1b[2Jb"),
        ("127.0.0.1:8000 is free", "127.0.0.1:8000 is free"),
    ],
)
def test_secrets_and_home_are_not_shown(text, shown):
    environ = {"HOME": "/home/ann/", "HF_TOKEN": "hf_abcdefgh", "RAY_AUTH_MODE": "token", "api_key": "abc123"}
    assert public(text, environ) == shown


def test_report_has_no_password_of_a_proxy_and_no_variable_of_a_secret():
    environ = {
        "HOME": "/home/ann",
        "HTTPS_PROXY": "http://ann:hunter22@proxy:3128",
        "HF_TOKEN": "hf_abcdefgh",
        "HF_HOME": "/home/ann/hub",
        "WANDB_API_KEY": "0123456789",
        "OTHER": "nobody's business",
    }
    text = doctor.report(
        [Finding("disk", "fault", "/home/ann/x: 0123456789", "", "export HF_TOKEN=hf_abcdefgh")], environ
    )
    for secret in ("hunter22", "ann", "hf_abcdefgh", "0123456789", "business", "WANDB"):
        assert secret not in text
    told = json.loads(text)
    assert told["machine"]["environment"] == {"HF_HOME": "~/hub", "HTTPS_PROXY": "http://***@proxy:3128"}
    expected = {"check": "disk", "level": "fault", "found": "~/x: ***", "costs": "", "hint": "export HF_TOKEN=***"}
    assert told["findings"] == [expected]
    assert told["machine"]["memory_gib"] == pytest.approx(psutil.virtual_memory().total / GIB, abs=0.1)
    assert told["machine"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_error_becomes_a_finding_with_its_hint_and_flags():
    error = ConfigError("``num_engines`` is\nwrong", hint="lower ``num_engines``")
    expected = Finding("x", "notice", "--vllm_num_engines is wrong", "much", "lower --vllm_num_engines")
    assert of_error("x", error, "much", "notice") == expected
