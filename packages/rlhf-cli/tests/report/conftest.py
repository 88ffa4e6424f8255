"""What the tests of the report share: its page in a real browser."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable

import pytest

BEGIN = """<body><script>
    const failures = [];
    addEventListener("error", (event) => failures.push(String(event.message)));
    function answer(value) {
      const box = document.createElement("output");
      box.textContent = JSON.stringify({value, failures});
      document.body.append(box);
      if (parent !== window) parent.postMessage(box.textContent, "*");
    }</script>"""
# A page in a frame, because no window of Chromium is narrower than 500 pixels.
FRAME = """<!doctype html><body><iframe src="{}" style="width: {}px; height: {}px; border: 0"></iframe><script>
    addEventListener("message", (event) => {{
      const box = document.createElement("output");
      box.textContent = event.data;
      document.body.append(box);
    }});</script></body>"""


def _with_script(page: str, script: str, after_ms: int = 100) -> str:
    end = f"<script>setTimeout(() => {{ {script}\n answer(result); }}, {after_ms});</script></body>"
    return page.replace("<body>", BEGIN, 1).replace("</body>", end)


@pytest.fixture
def with_script() -> Callable[..., str]:
    """Returns a page in which a script runs once it is drawn, and notes its `result`."""
    return _with_script


@pytest.fixture
def visit(tmp_path):
    """Opens an address of a page with a script; returns the script's result. No error may occur."""

    if shutil.which("chromium") is None:
        pytest.skip("there is no program `chromium` on PATH")

    def visit(address, size="1400,900", scheme="light"):
        colours = f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}"
        words = [
            "--headless",
            colours,
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--window-size={size}",
        ]
        words += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=9000", "--dump-dom", address]
        done = subprocess.run(["chromium", *words], capture_output=True, text=True, timeout=240, check=True)
        assert "CONSOLE" not in done.stderr
        [found] = re.findall(r"<output>(.*?)</output>", done.stdout, re.DOTALL)
        answered = json.loads(html.unescape(found))
        assert answered["failures"] == []
        return answered["value"]

    return visit


@pytest.fixture
def browse(tmp_path, visit):
    """Opens the page in a file at a part of it, and runs a script there; see `visit`."""

    def browse(path, script, part="", size="1400,900", scheme="light"):
        page = tmp_path / "page.html"
        page.write_text(_with_script(path.read_text(encoding="utf-8"), script), encoding="utf-8")
        address = f"file://{page}{part}"
        width, height = size.split(",")
        if int(width) < 500:
            frame = tmp_path / "frame.html"
            frame.write_text(FRAME.format(address, width, height), encoding="utf-8")
            address = f"file://{frame}"
        return visit(address, size, scheme)

    return browse
