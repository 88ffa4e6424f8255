"""Programs that do not solve their task, but look for the expected values or fake their verdict: none succeeds."""

import asyncio
import json
import subprocess
import sys

import pytest

from record_testing import make_prompt, make_rollout, named_programs
from rlhf_data.records import VerdictKind
from rlhf_rollout.rewards.code.code_reward import CodeReward
from rlhf_rollout.rewards.sources import CallOptions
from rlhf_rollout.workers.guarded import WorkerOptions

STDIN = json.dumps({"inputs": ["3\n", "4\n"], "outputs": ["482915\n", "771342\n"]})
CALL = json.dumps({"fn_name": "f", "inputs": [[3], [4]], "outputs": [482915, 771342]})
CHECK = json.dumps(
    {
        "test": "def check(candidate):\n    assert candidate(3) == 482915\n    assert abs(candidate(4) - 771342) < 1\n",
        "entry_point": "f",
    }
)
ASSERTS = json.dumps(["assert f(3) == 482915", "assert sorted(f(4)) == [1, 2, 3, 4, 7, 7] and len(f(4)) == 6"])
LOOP = json.dumps(["assert all(map(lambda x: f(x) == 1, [1, 2]))"])
LABELS = {"STDIN": STDIN, "CALL": CALL, "CHECK": CHECK, "ASSERTS": ASSERTS, "LOOP": LOOP}

# Finds the expected values in what the program can see of memory, files and its own process.
LOOK = """
import gc, glob, os, sys
def look():
    seen = []
    frame = sys._getframe()
    while frame:
        seen.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    seen += [repr(thing) for thing in gc.get_objects() if isinstance(thing, (list, tuple, dict))]
    for path in glob.glob('/proc/*/*') + glob.glob('/proc/*/fd/*') + glob.glob('/tmp/*') + glob.glob('/proc/*/mem'):
        try: seen.append(os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 2**20).decode(errors='replace'))
        except OSError: pass
    text = ''.join(seen)[::-1]  # spelled backwards, since this program is in its own memory
    return next((int(value[::-1]) for value in ('519284', '243177') if value in text), 0)
"""

# Programs that do not solve the task of the label that their name begins with: none may get a verdict but wrong.
FAKES = r"""
# STDIN: find the expected output
print(look())

# CALL: find the expected value of a call
def f(x): return look()

# CHECK: find the expected value of an assertion
def f(x): return look()

# STDIN: end early with status 0
import os
os._exit(0)

# CALL: end early in a call
import os
def f(x): os._exit(0)

# CHECK: end early before assertions
import os
os._exit(0)

# CHECK: end early in an assertion
import os
def f(x): os._exit(0)

# CHECK: leave by SystemExit
import sys
def f(x): sys.exit(0)

# STDIN: print a verdict
print('{"ready": true}\n{"passed": true}\n{"output": "482915", "why": ""}')

# ASSERTS: write a verdict to every descriptor
import os
for number in range(64):
    try: os.write(number, b'{"ready": true}\n{"passed": true, "why": ""}\n{"passed": true, "why": ""}\n')
    except OSError: pass
def f(x): return 0

# ASSERTS: write a verdict to the judge's descriptors
import glob
for path in glob.glob('/proc/1/fd/*') + ['/proc/1/fd/1', '/proc/1/fd/3', '/dev/stdout']:
    try: open(path, 'w').write('{"passed": true}\n{"passed": true}\n')
    except OSError: pass
def f(x): return 0

# CHECK: write a verdict at the end of the process
import atexit, os
atexit.register(os.write, 1, b'{"passed": true}\n')
def f(x): return 0

# CHECK: be equal to everything
class Equal:
  def __eq__(self, other): return True
  def __sub__(self, other): return 0
  __abs__ = __hash__ = lambda self: 0
def f(x): return Equal()

# CALL: be a number that is equal to everything
class Equal(int):
  def __eq__(self, other): return True
def f(x): return Equal(0)

# ASSERTS: be a list that is equal to everything
class Equal(list):
  def __eq__(self, other): return True
  def __len__(self): return 6
def f(x): return Equal()

# CHECK: replace builtin functions
import builtins
for name in ('abs', 'sorted', 'len', 'AssertionError'):
  setattr(builtins, name, lambda *a: 0)
  globals()[name] = lambda *a: 0
def f(x): return 0

# CHECK: offer other builtin functions
import json, os
line = json.dumps(['dict', ['__builtins__', ['dict', ['abs', ['remote', 0]]]], ['f', ['remote', 0]]]) + '\n'
answer = json.dumps(['tuple', 'value', 0]) + '\n'
for number in range(3, 20):
    try: os.write(number, (line + answer * 50).encode())
    except OSError: pass
def f(x): return 0

# CHECK: define the check itself
def check(candidate): pass
def f(x): return 0

# LOOP: stop the iteration of a test
def f(x): raise StopIteration

# ASSERTS: answer with what is no answer
import os
os.write(1, b'x')
def f(x):
  for number in range(3, 20):
    try: os.write(number, b'[[[[\n' * 3)
    except OSError: pass

# ASSERTS: answer with deep nesting
def f(x):
  a = []
  for _ in range(10**5): a = [a]
  return a

# CHECK: answer without an end (hangs)
def f(x):
  while True: pass

# CHECK: kill the judge, so that the sandbox seems to fail
import os, signal
for number in range(1, 65):
  try: os.kill(1, number)
  except OSError: pass
def f(x): return 0

# STDIN: fill the disk, so that the sandbox seems to fail
try:
  while True: open('/tmp/a', 'ab').write(bytes(2**20))
finally: pass
"""


@pytest.mark.parametrize("name", named_programs(FAKES))
def test_verdict_cannot_be_faked(bubblewrap, name):
    program = named_programs(FAKES)[name]
    program = LOOK + program if "look()" in program else program
    calls = CallOptions(
        timeout_s=2 if "(hangs)" in name else 120, worker=WorkerOptions(memory_gb=0.5), code_partial=True
    )
    reward = CodeReward(bubblewrap, calls)
    prompt = make_prompt(label=LABELS[name.partition(":")[0]])
    (verdict,) = asyncio.run(reward.score(prompt, [make_rollout(prompt, f"```python\n{program}\n```")]))
    assert (verdict.kind, verdict.reward, verdict.extra["passed"]) == (VerdictKind.WRONG, 0.0, 0.0), verdict
    assert "\n" not in verdict.detail and verdict.detail


def test_the_search_finds_a_value_that_a_program_can_see():
    program = LOOK + "hidden = ['482' + str(915)]\nprint(look())"
    found = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "482915\n"
