"""What a terminal is not to obey, what is not to be written, and which addresses only this machine has."""

import urllib.request

import pytest

from record_testing import write_jsonl
from rlhf_data.errors import ConfigError
from rlhf_data.main import main
from rlhf_data.options.command_line import CommandLine, to_toml
from rlhf_data.options.declare import Config, Section, flag
from rlhf_data.safety import is_loopback, is_utf8, loopback_unproxied, visible, without_secrets


class _Server(Section, title="server"):
    url: str | None = flag(None, "addresses")
    template: str = flag("{}", "text around a question")


class _Demo(Config):
    server: _Server = _Server()


LINE = CommandLine(config=_Demo, prog="demo")


def test_everything_that_steers_a_terminal_is_shown_as_text():
    every = "".join(map(chr, [*range(0x3000), 0xD800, 0xDFFF, 0x1F600]))
    shown = visible(every)
    obeyed = [*range(9), *range(11, 32), *range(127, 160), 0x200E, 0x202E, 0x2066, 0xD800, 0xDFFF]
    assert [f"{code:#x}" for code in obeyed if chr(code) in shown] == []
    assert all(character in shown for character in "\n\tA~é\u0416\u05d0\U0001f600")
    assert visible("\x1b]52;c;cm0=\x07\x9b2J\r") == "\\x1b]52;c;cm0=\\x07\\x9b2J\\r"
    assert is_utf8(shown) and not is_utf8(every)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("http://host:5000/get_reward", "http://host:5000/get_reward"),
        ("http://me:secret@host/x", "http://***@host/x"),
        ("http://secret@host", "http://***@host"),
        ("postgresql://me:se@cret@host/db", "postgresql://***@host/db"),
        ("http://host/x?key=secret&b=c", "http://host/x?***"),
        ("http://host?key=secret#secret", "http://host?***"),
        ("http://a/x?k=secret,https://b/y,http://u:secret@c/z", "http://a/x?***,https://b/y,http://***@c/z"),
        ("no answer from http://host/x?k=secret within 3 s", "no answer from http://host/x?*** within 3 s"),
        ("me@host, why?", "me@host, why?"),
    ],
)
def test_urls_are_written_without_user_password_and_query(text, written):
    assert without_secrets(text) == without_secrets(written) == written


def test_configuration_holds_no_secret_of_a_url_and_says_so_when_it_is_read_again(tmp_path):
    words = ["--url=http://u:secret@a/x?k=secret,https://b/y", "--template=why? see http://a/?b {} \x7f\x80"]
    file = tmp_path / "config.toml"
    file.write_text(to_toml(LINE.parse(words).config), encoding="utf-8")
    assert "secret" not in file.read_text(encoding="utf-8") and "https://b/y" in file.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"(?s)--url is http://\*\*\*@a.*never saved.*hint: give --url the whole URL"):
        LINE.parse(["--config", str(file)])
    again = LINE.parse(["--config", str(file), words[0]]).config
    assert again == LINE.parse(words).config


def test_option_that_is_not_utf8_is_refused():
    with pytest.raises(ConfigError, match=r"(?s)--template is 'a\\udcff', which is not UTF-8.*hint"):
        LINE.parse(["--template", "a\udcff"])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "localhost", "::1", "[::1]"])
def test_loopback_addresses(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "127.0.0.1.nip.io", "1"])
def test_addresses_that_others_may_have(host):
    assert not is_loopback(host)


def test_inspect_shows_escape_sequences_as_text(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", [{"in\x1b[2Jput": "o\x1b]0;owned\x07ne \x9b31m \ud800"}])
    assert main(["inspect", "--dataset", str(path)]) == 0
    out = capsys.readouterr().out
    assert "in\\x1b[2Jput: o\\x1b]0;owned\\x07ne \\x9b31m \\ud800" in out
    assert not set(out) & {"\x1b", "\x07", "\x9b", "\ud800"}


@pytest.mark.parametrize(
    ("given", "exceptions"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": ".corp, localhost"}, ".corp, localhost,127.0.0.1,::1"),
        ({"no_proxy": ".a", "NO_PROXY": ".b"}, ".a,localhost,127.0.0.1,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_programs_ask_this_machine_without_a_proxy(given, exceptions, monkeypatch):
    made = loopback_unproxied(given)
    assert made == {"no_proxy": exceptions, "NO_PROXY": exceptions}
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    assert all(urllib.request.proxy_bypass_environment(f"{host}:80") for host in ("localhost", "127.0.0.1"))
