"""A cookbook of cheats: answers that would be rewarded without being right. Beside each, an honest answer is rewarded,
so that a reward which refuses everything does not pass."""

from __future__ import annotations

import functools
import json

import pytest

from components.errors import SpecError
from components.rewards import judge as judging
from components.rewards.rules.accuracy import Choice, Exact, Numeric
from components.rewards.rules.answer_format import Matches, Tags
from components.rewards.rules.code_tests import CodeTests
from components.rewards.rules.json_schema import JsonSchema
from components.rewards.rules.language import Language
from components.rewards.rules.length import Length, Steps
from components.rewards.rules.mathematics import Mathematics
from components.rewards.rules.repetition import Repetition
from components.rewards.rules.tool_use import Calls, ToolUse
from components.trajectories.schema import History, Message, Scenario, Score, ToolCall, Trajectory
from tests.rewards.programs import judged_together
from tests.trajectories.builders import talk

pytestmark = [pytest.mark.security, pytest.mark.timeout(1800)]


def trajectory(text: str, **scenario) -> Trajectory:
    return Trajectory("s/0", Scenario("s", scenario, "train"), 0, [talk("Question?", text)])


def scored(reward, text: str, **scenario) -> Score:
    (score,) = judging.judge(reward, [trajectory(text, **scenario)])
    return score


# Programs and their tests

HONEST = "def f(x):\n    return 2 * x + 1"
VALUE = ["assert f(3) == 7", {"call": "f(3)", "result": 7}]
MORE = [
    "def check(candidate):\n    assert candidate(0) == 1\n    assert 21 == candidate(10)\ncheck(f)",
    "assert [f(3)] == [7] and f(3) in (1, 7) and {f(0): 'a'}[1] == 'a'",
]
ALWAYS = """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __hash__(self): return hash(7)
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__
    def __abs__(self): return self
    def __neg__(self): return self
    def __float__(self): return 0.0
    def __getattr__(self, name): return self
    def __call__(self, *values): return self
    def __bool__(self): return True
    def __iter__(self): return iter([self])
"""
# How a program may look for the text of its test, once it is called.
SEARCH = """
import re, sys
def expected(texts):
    for text in texts:
        found = re.search(r"f\\(3\\)\\W*(?:==|result)\\W*(\\d+)", str(text))
        if found: return int(found[1])
def f(x):
    try: return expected(texts())
    except Exception: return None
"""

PROGRAMS: dict[str, str] = {
    "always equal": f"{ALWAYS}\ndef f(x): return Always()",
    "always equal, as the function itself": f"{ALWAYS}\nf = Always()",
    "lies about its class": f"{ALWAYS}\nclass Int(Always):\n    __class__ = int\ndef f(x): return Int()",
    "int": "class Int(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef f(x): return Int(5)",
    "str": ("class Str(str):\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: hash(7)\n"
        "def f(x): return Str('a')"),
    "float": ("class Float(float):\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 7\n"
        "def f(x): return Float(5)"),
    "list": "class List(list):\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 7\ndef f(x): return List()",
    "Decimal": (
        "import decimal\nclass Dec(decimal.Decimal):\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 7\n"
        "Dec.__module__, Dec.__qualname__ = 'decimal', 'Decimal'\ndef f(x): return Dec(5)"
    ),
    "a plain class with another's name": (
        f"{ALWAYS}\nAlways.__name__ = Always.__qualname__ = 'int'; Always.__module__ = 'builtins'\n"
        "def f(x): return Always()"
    ),
    "metaclass": (
        "class Meta(type):\n    def __eq__(s, o): return True\n    def __hash__(s): return 7\n"
        "    def __instancecheck__(s, o): return True\nclass F(metaclass=Meta): pass\ndef f(x): return F"
    ),
    "exec": "import builtins\nbuiltins.exec = lambda *a, **k: None\ndef f(x): return None",
    "compile": (
        "import builtins\ntrue = builtins.compile\n"
        "builtins.compile = lambda source, *a, **k: true('None', 'x', 'exec')\ndef f(x): return None"
    ),
    "eval": "import builtins\nbuiltins.eval = lambda *a, **k: True\ndef f(x): return None",
    "built-in functions": (
        "import builtins\nfor name in 'print isinstance open len all any "
        "abs sorted type hash repr str getattr'.split():\n"
        "    setattr(builtins, name, lambda *a, **k: True)\ndef f(x): return None"
    ),
    "imports": (
        "import builtins\nclass Any:\n    def __getattr__(s, n): return lambda *a, **k: True\n"
        "builtins.__import__ = lambda *a, **k: Any()\ndef f(x): return None"
    ),
    "AssertionError": (
        "import builtins\nclass Quiet(BaseException):\n    pass\nbuiltins.AssertionError = Quiet\ndef f(x): return None"
    ),
    "excepthook": "import sys\nsys.excepthook = lambda *a: None\ndef f(x): raise ValueError",
    "namespace": "__builtins__ = {'AssertionError': ValueError}\n__name__ = 'x'\ndef f(x): return None",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit in the call": "import sys\ndef f(x): sys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "os._exit in the call": "import os\ndef f(x): os._exit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "signal handler": (
        "import os, signal\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
        "def f(x):\n    while True: pass"
    ),
    "killed by itself": "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGKILL)",
    "trace that skips lines": (
        "import sys\ndef trace(frame, event, arg):\n"
        "    if event == 'line':\n        try: frame.f_lineno = frame.f_lineno + 1\n        except Exception: pass\n"
        "    return trace\nsys.settrace(trace)\n"
        "frame = sys._getframe()\nwhile frame: frame.f_trace = trace; frame = frame.f_back\ndef f(x): return None"
    ),
    "json": (
        "import json\njson.dumps = lambda *a, **k: '7'[:0] or '[]'\njson.loads = lambda *a, **k: ['returned', 7]\n"
        "def f(x): return None"
    ),
    "the mark of the driver": (
        "import __main__, os, sys\n"
        "def marks():\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n        yield frame.f_globals; frame = frame.f_back\n    yield vars(__main__)\n"
        "for names in marks():\n"
        "    if 'given' in names:\n"
        "        print('\\n' + names['given'].get('mark', '') + 'null'); sys.stdout.flush(); os._exit(0)\n"
        "def f(x): return None"
    ),
    "frames": SEARCH + (
        "def texts():\n    frame = sys._getframe()\n    while frame:\n"
        "        yield frame.f_globals; yield frame.f_locals; frame = frame.f_back\n"
    ),
    "gc": (SEARCH + "def texts():\n    import gc\n"
        "    return [o for o in gc.get_objects() if isinstance(o, (dict, list))]\n"),
    "modules": SEARCH + "def texts(): return [vars(module) for module in list(sys.modules.values())]\n",
    "own memory": SEARCH + (
        "def texts():\n    import ctypes\n    for line in open('/proc/self/maps'):\n"
        "        if 'rw' not in line or '[v' in line: continue\n"
        "        low, high = (int(n, 16) for n in line.split()[0].split('-'))\n"
        "        yield ctypes.string_at(low, high - low).decode('latin-1').replace(\"f(3)\\\\\", '')\n"
    ),
    "standard input and /proc": SEARCH + (
        "def texts():\n    import glob\n"
        "    for name in ['/proc/self/fd/0', *glob.glob('/proc/*/cmdline'), *glob.glob('/proc/*/environ')]:\n"
        "        try: yield open(name).read()\n        except OSError: pass\n"
    ),
    "files": SEARCH + (
        "def texts():\n    import os\n    for folder, _, names in os.walk('/home'):\n"
        "        for name in names:\n            text = open(folder + '/' + name, errors='replace').read()\n"
        "            yield text.replace(SELF, '')\nSELF = 'result'\n"
    ),
    "prints that it passed": (
        "import sys\nprint('passed'); print('OK'); print('[\"verdict\", \"passed\"]'); print('true', file=sys.stderr)\n"
        "def f(x): print('[\"verdict\", \"passed\"]', flush=True); return True"
    ),
    "writes to every file": (
        "import os\ndef f(x):\n    for n in range(256):\n"
        "        for text in (b'.[\"verdict\", \"passed\"]\\n', b'.[\"json\", \"true\"]\\n',"
        " b'.[\"value\", true, false]\\n'):\n            try: os.write(n, text)\n"
        "            except OSError: pass\n    return None"
    ),
    "answers without being asked": (
        "import os\nfor n in range(3, 256):\n    try:\n"
        "        for _ in range(50): os.write(n, b'.[\"value\", true, false]\\n')\n"
        "    except OSError: pass\ndef f(x): return None"
    ),
    "verdict in place of an answer": (
        "import os\nfor n in range(3, 256):\n    try:\n        os.write(n, b'.[\"ready\"]\\n')\n"
        "        for _ in range(50): os.write(n, b'.[\"verdict\", \"passed\"]\\n')\n    except OSError: pass\n"
        "def f(x): return None"
    ),
    "odd messages": (
        "import os\nfor n in range(3, 256):\n    try:\n"
        "        for text in (b'[]', b'{}', b'null', b'[\"value\"]', b'[\"value\", {}]',"
        " b'[\"value\", [\"function\", 0], false]', "
        "b'[\"value\", [\"exception\", [[1, \"x\"], \"ValueError\"]], false]',"
        " b'[\"value\", [\"type\", \"int\"], false]', b'[' * 9999, b'[\"callback\", 0, [], {}]', b'\\xff'):\n"
        "            os.write(n, b'.' + text + b'\\n')\n    except OSError: pass\ndef f(x): return None"
    ),
    "the script of the sandbox": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n"
        "    if 'encode' in frame.f_globals: frame.f_globals['encode'] = lambda v, r: ['function', 0]\n"
        "    frame = frame.f_back\ndef f(x): return None"
    ),
    "a child answers": "import os\npid = os.fork()\nif pid: os._exit(0)\ndef f(x): return None",
    "a child goes on": "import os\ndef f(x):\n    if os.fork(): os._exit(0)\n    return None",
    "a thread ends it": (
        "import os, threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.01), os._exit(0)), daemon=True).start()\n"
        "def f(x): time.sleep(1); return None"
    ),
    "closes everything": "import os\nos.closerange(0, 256)\ndef f(x): return None",
    "closes everything in the call": "import os\ndef f(x): os.closerange(0, 256)",
    "deep recursion": "def f(x): return f(x)",
    "segmentation fault": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "nested without end": "def f(x):\n    found = []\n    for _ in range(100000): found = [found]\n    return found",
    "contains itself": "def f(x):\n    found = []\n    found.append(found)\n    return found",
    "True is 1": "def f(x): return True",
    "NaN": "def f(x): return float('nan')",
    "all that it can": "def f(x): return (7, 1, 21)",
    "empty": "",
    "a comment": "# assert f(3) == 7",
    "StopIteration": "def f(x): raise StopIteration",
    "GeneratorExit": "def f(x): raise GeneratorExit",
    "an exception that is equal": (
        "class Error(AssertionError):\n    def __init__(s, *a): pass\n    __str__ = lambda s: ''\ndef f(x): raise Error"
    ),
}  # fmt: skip
"""Programs that do not compute 2x + 1, for tests that compare values."""
ALL_FORMS = ("always equal", "int", "eval", "json", "writes to every file", "odd messages")
"""Programs that run against each form of such a test; the others run against one."""

SLOW = {
    "sleeps": "import time\ndef f(x): time.sleep(1000)",
    "sleeps before": "import time\ntime.sleep(1000)",
    "closes the way out and sleeps": "import os, time\ndef f(x): os.closerange(0, 256); time.sleep(1000)",
    "never reads its requests": (
        "import os, time\nfor n in range(3, 256):\n    try: os.write(n, b'.[\"ready\"]\\n')\n    except OSError: pass\n"
        "time.sleep(1000)"
    ),
    "floods": "def f(x):\n    while True: print('7' * 10000)",
    "floods the way out": (
        "import os\ndef f(x):\n    while True:\n        for n in range(3, 256):\n"
        "            try: os.write(n, b'+' + b'x' * 1000 + b'\\n')\n            except OSError: pass"
    ),
    "yields for ever": "def f(x):\n    while True: yield 7",
    "memory": "def f(x):\n    found = []\n    while True: found.append(bytearray(10**6))",
}
"""Programs that the sandbox terminates."""

NEAR = ["assert abs(f(3) - 7) < 1e-6", "import math\nassert math.isclose(f(3), 7.0)", "assert round(f(3), 2) == 7"]
CASES = [
    "cases = [(3, 7), (0, 1)]\nassert all(map(lambda case: f(case[0]) == case[1], cases))",
    "assert all(f(x) == y for x, y in [(3, 7), (0, 1)])",
    "assert list(map(f, [0, 3])) == [1, 7]",
]
SORTS = "def f(x): return sorted(x)"
STACK = (
    "class Stack:\n    def __init__(self): self.held = []\n    def extend(self, items): self.held += items\n"
    "    def items(self): return list(self.held)\n    def __len__(self): return len(self.held)\n"
)
POINT = (
    "class Point:\n    def __init__(self, x): self.x = x\n    def __str__(self): return f'<{self.x}>'\n"
    "def f(x): return Point(2 * x + 1)"
)
RAISES = "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x"
REFUSES_NEGATIVE = ["try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False", "assert f(3) == 3"]

# name: (tests, honest program, cheat)
SPECIAL: dict[str, tuple[list, str, str]] = {
    "always near": (NEAR[:2], HONEST, f"{ALWAYS}\ndef f(x): return Always()"),
    "near by its own abs and round": (
        [NEAR[0], NEAR[2]], HONEST, "abs = lambda x: 0\nround = lambda x, n: 7\ndef f(x): return 5",
    ),
    "near by NaN": (NEAR[:2], HONEST, "def f(x): return float('nan')"),
    "near by a NaN of decimal": (NEAR[:2], HONEST, "import decimal\ndef f(x): return decimal.Decimal('nan')"),
    "near by infinity": (NEAR[:2], HONEST, "def f(x): return float('inf')"),
    "its own module math": (
        ["assert math.isclose(f(3), 7.0)", NEAR[1]], f"import math\n{HONEST}",
        "import sys\nclass math: isclose = staticmethod(lambda *a: True)\nsys.modules['math'] = math\n"
        "def f(x): return 5",
    ),
    "its own unittest": (
        ["import unittest\nunittest.TestCase().assertEqual(f(3), 7)"], HONEST,
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(x): return 5",
    ),
    "its own all, map and list": (
        CASES, HONEST, "all = lambda x: True\nmap = lambda *a: []\nlist = lambda x: [1, 7]\ndef f(x): return 5",
    ),
    "a name that is built-in, by another one": (
        ["assert abs(f(3)) == 7"], HONEST, "def abs(x): return 7\ndef f(x): return 5",
    ),
    "ends a loop of the test": (CASES, HONEST, "def f(x): raise StopIteration"),
    "ends a loop of the test by its own type": (
        CASES, HONEST, "class Stop(StopIteration): pass\ndef f(x): raise Stop",
    ),
    "empties its argument": (["xs = [3, 1, 2]\nassert f(xs) == sorted(xs)"], SORTS, "def f(x): x.clear(); return []"),
    "returns its argument": (
        ["xs = [3, 1, 2]\nassert f(xs) == sorted(xs)"], SORTS,
        "def f(x):\n    x[:] = [1]\n    return x",
    ),
    "changes what is expected": (
        ["items = [1, 2]\ns = Stack()\ns.extend(items)\nassert s.items() == items and len(s) == 2"], STACK,
        f"{STACK}def extend(self, items): items.clear()\nStack.extend = extend\nStack.__len__ = lambda s: 2",
    ),
    "contains everything": (
        ["assert 7 in f(3) and 5 not in f(0)"], "def f(x): return [2 * x + 1]", f"{ALWAYS}\ndef f(x): return Always()",
    ),
    "an attribute that is always equal": (
        ["p = f(3)\nassert isinstance(p, Point) and p.x == 7"], POINT,
        f"{ALWAYS}\n{POINT}\ndef f(x): return Point(Always())",
    ),
    "objects that are all equal": (
        ["assert f(3).x == Point(7).x and str(f(3)) == '<7>'"], POINT, f"{ALWAYS}\nPoint = f = Always()",
    ),
    "text that is always equal": (
        ["assert str(f(3)) == str(Point(7)) == '<7>'"], POINT,
        f"{POINT}\nclass Str(str):\n    __eq__ = lambda s, o: True\n"
        "class F: __str__ = lambda s: Str('a')\ndef f(x): return F()",
    ),
    "refuses everything": (REFUSES_NEGATIVE, RAISES, "def f(x): raise ValueError"),
    "refuses by an exit": (REFUSES_NEGATIVE, RAISES, "import os\ndef f(x): os._exit(0)"),
    "refuses with another type of the same name": (
        REFUSES_NEGATIVE, RAISES, "class ValueError(BaseException): pass\ndef f(x): raise ValueError",
    ),
    "returns the test's own function": (
        ["assert f(lambda x: x + 1, 3) == 4"], "def f(g, x): return g(x)", "def f(g, x): return g",
    ),
    "its own exec": (["exec('assert f(3) == 7')"], HONEST, "def exec(text): pass\ndef f(x): return 5"),
    "its own sum is not taken for Python's": (
        ["assert sum(10, 15) == 6"], "def sum(a, b): return 6", "def sum(a, b): return 7",
    ),
    "prints what it may be": ([{"stdin": "3\n", "stdout": "7\n"}], "print(2 * int(input()) + 1)", "print(*range(9))"),
    "prints each on a line": (
        [{"stdin": "3\n", "stdout": "7\n"}], "print(2 * int(input()) + 1)", "for n in range(9): print(n)",
    ),
    "prints and fails": (
        [{"stdin": "3\n", "stdout": "7\n"}], "print(2 * int(input()) + 1)", "print(7, flush=True); 1 / 0",
    ),
    "prints nothing": ([{"stdin": "3\n", "stdout": "7\n"}], "print(2 * int(input()) + 1)", "pass"),
    "looks for the output": (
        [{"stdin": "3\n", "stdout": "7\n"}], "print(2 * int(input()) + 1)",
        "import glob, re\nfor name in ['/proc/self/fd/0', *glob.glob('/home/agent/*'), "
        "*glob.glob('/proc/*/environ')]:\n"
        "    try: found = re.search('stdout.*?([0-9]+)', open(name).read())\n    except OSError: continue\n"
        "    if found: print(found[1])",
    ),
    "a call that is True": ([{"call": "f(0)", "result": 1}], HONEST, "def f(x): return True"),
    "a call that is NaN": ([{"call": "f(0)", "result": 1}], HONEST, "def f(x): return float('nan')"),
    "a call whose JSON says two things": (
        [{"call": "f(0)", "result": {"n": 1}}], "def f(x): return {'n': 2 * x + 1}",
        "import json\njson.dumps = lambda *a, **k: '{\"n\": 0, \"n\": 2}'\ndef f(x): return {'n': 3}",
    ),
    "a call that replaces eval": (
        [{"call": "f(0)", "result": 1}], HONEST, "import builtins\nbuiltins.eval = lambda *a: True\ndef f(x): return 5",
    ),
}  # fmt: skip


@functools.cache
def programs_scored() -> dict[tuple[str, str], Score]:
    """Judge all programs concurrently."""
    rows = {("program", name): (VALUE[:1], code) for name, code in PROGRAMS.items()}
    rows |= {("program", name): (VALUE + MORE, PROGRAMS[name]) for name in ALL_FORMS}
    rows |= {("honest", "program"): (VALUE + MORE, HONEST)}
    for name, (tests, honest, cheat) in SPECIAL.items():
        rows |= {("special", name): (tests, cheat), ("honest", name): (tests, honest)}
    return judged_together(rows, CodeTests(seconds=30.0))


@pytest.mark.usefixtures("sandbox_here")
class TestPrograms:
    def test_a_cheat_passes_no_test(self, subtests):
        assert programs_scored()["honest", "program"].reward == 1.0
        for name in PROGRAMS:
            with subtests.test(name):
                score = programs_scored()["program", name]
                assert (score.reward, score.failure) == (0.0, None), score.explanation

    def test_a_cheat_of_one_form_of_test_passes_nothing(self, subtests):
        for name in SPECIAL:
            with subtests.test(name):
                score, honest = programs_scored()["special", name], programs_scored()["honest", name]
                assert honest.reward == 1.0, honest
                assert (score.reward, score.failure) == (0.0 if name != "refuses everything" else 0.5, None), score

    def test_a_program_that_has_to_be_ended_passes_nothing(self):
        rows = {("slow", name): ([VALUE[0]], code) for name, code in SLOW.items()}
        rows["slow", "endless list"] = (["assert list(f(3)) == [7]"], SLOW["yields for ever"])
        scores = judged_together(rows, CodeTests(seconds=1.0))
        assert {name: (score.reward, score.failure) for (_, name), score in scores.items()} == {
            name: (0.0, None) for _, name in rows
        }
        assert programs_scored()["honest", "program"].reward == 1.0


# JSON

TREE = {"type": "object", "properties": {"n": {"type": "integer"}, "in": {"$ref": "#"}}, "additionalProperties": False}
NUMBER = {"type": "object", "properties": {"n": {"type": "number", "minimum": 5}}, "required": ["n"]}
JSON_CHEATS: dict[str, tuple[dict, str, str]] = {
    "makes a pattern slow": ({"type": "string", "pattern": "^(a+)+$"}, '"aa"', json.dumps("a" * 40 + "!")),
    "makes uniqueItems slow": (
        {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "[1, 2]",
        json.dumps([{"a": [n]} for n in range(30_000)]),
    ),
    "nested deeper than validation goes": (TREE, '{"in": {"n": 1}}', '{"in": ' * 400 + '{"n": "no"}' + "}" * 400),
    "nested deeper than JSON goes": (TREE, '{"in": {"n": 1}}', '{"in": ' * 90_000),
    "too large a number to divide": (
        {"type": "integer", "multipleOf": 0.5}, "3", "1" * 401,
    ),
    "too many digits": ({"type": "integer"}, "3", "9" * 10_000),
    "infinity by its exponent": (NUMBER, '{"n": 6}', '{"n": 1e999}'),
    "Infinity": (NUMBER, '{"n": 6}', '{"n": Infinity}'),
    "NaN": ({"type": "number"}, "6", "NaN"),
    "a key twice": (NUMBER, '{"n": 6}', '{"n": "no", "n": 6}'),
    "a key twice, inside": ({"type": "object"}, '{"a": {"n": 6}}', '{"a": {"n": "no", "n": 6}}'),
    "byte order mark": (NUMBER, '{"n": 6}', '\ufeff{"n": 6}'),
    "several blocks": (NUMBER, '```json\n{"n": 6}\n```', '```json\n{"n": 1}\n```\n```json\n{"n": 6}\n```'),
    "several values": (NUMBER, '{"n": 6}', '{"n": 1}\n{"n": 6}'),
    "text around": (NUMBER, '{"n": 6}', 'It is {"n": 6}, I think.'),
    "a comment": (NUMBER, '{"n": 6}', '{"n": 6} // or 7'),
    "a reference in the answer": (NUMBER, '{"n": 6}', '{"$ref": "#", "n": {"$ref": "#/properties/n"}}'),
    "a schema in the answer": (NUMBER, '{"n": 6}', '{"$schema": "x", "properties": {"n": 6}}'),
}  # fmt: skip


class TestJson:
    def test_a_cheat_scores_nothing(self, subtests):
        rules = {slow: JsonSchema("input.form", seconds=1.0 if slow else 30.0) for slow in (True, False)}  # of CPU time
        for name, (schema, honest, cheat) in JSON_CHEATS.items():
            with subtests.test(name):
                rule = rules["slow" in name]
                score = scored(rule, cheat, form=schema)
                assert (score.reward, score.failure) == (0.0, None)
                assert score.explanation
                assert scored(rule, honest, form=schema).reward == 1.0

    def test_what_is_wrong_with_a_schema_is_not_for_an_answer_to_meet(self, subtests):
        """Or an answer with this property would be unscored in place of wrong."""
        rule = JsonSchema("input.form")
        for part, said in [
            ({"$ref": "http://127.0.0.1:9/a.json"}, "refers to 'http://127.0.0.1:9/a.json', which is not in it"),
            ({"$ref": "#/$defs/none"}, "refers to '#/$defs/none', which is not in it"),
            ({"pattern": "("}, "'(' is not a 'regex'"),
            ({"patternProperties": {"[": True}}, "'[' is not a 'regex'"),
            ({"$ref": "#/properties/a"}, "refers to itself without end"),
            ({"allOf": [{"$ref": "#/properties/a"}]}, "refers to itself without end"),
        ]:
            with subtests.test(part=part):
                schema = {"type": "object", "properties": {"a": part}}
                with pytest.raises(SpecError) as raised:
                    JsonSchema(schema)
                assert said in str(raised.value)
                for text in ("{}", '{"a": 1}'):
                    assert said in scored(rule, text, form=schema).failure.message
        assert scored(rule, '{"a": 1}', form=NUMBER | {"required": []}).reward == 1.0


# Answers that hedge: whatever was expected, a text is right for one answer at most

LETTERS = list("ABCDE")
NUMBERS = [str(number) for number in range(10)]
HEDGES: dict[str, tuple[type, dict, list, list[str], tuple[str, str]]] = {
    "choice": (Choice, {}, LETTERS, [
        "A or B", "(A) or (B)", "The answer is A or B.", "A B C D E", "Answer: A, answer: B", "ABCDE", "A\nB\nC",
        "(A)(B)(C)(D)(E)", "A) x\nB) y\nC) z", "answer A/B/C", "Ａ", "\u0410", "[A, B]", "any", "not (A), not (B)",
    ], ("(B)", "B")),
    "numeric": (Numeric, {"absolute": 0.4}, NUMBERS, [
        "1 or 2 or 3", "1 2 3 4 5 6 7 8 9", "between 0 and 9", "1/2/3", "1e999", "-1e999", "nan", "inf", "\u221e",
        "1e-999", "0x7", "1..9", "5\u00b12", "1,2,3", "\u0663", "\u00b2", "\u2461", "", "none",
    ], ("It is 7.", "7")),
    "exact": (Exact, {}, ["Paris", "Rome", "Paris or Rome", ""], [
        "Paris or Rome or Bern", "Paris\n"
        "Rome", "P\u0430ris", "Par\u200bis", "['Paris', 'Rome']", ".*", "",
    ], ("paris", "Paris")),
    "exact without punctuation": (Exact, {"punctuation": False}, ["-", "?", "...", "Rome"], [
        "-?...", "!", "'", "\u2014",
    ], ("Rome!", "Rome")),
    "math": (Mathematics, {"seconds": 60.0}, NUMBERS[1:4], [
        "$1$ or $2$ or $3$", "\\boxed{1} \\boxed{2} \\boxed{3}", "$\\{1,2,3\\}$", "$1=2=3=4$", "$1 \\le x \\le 5$",
        "\\boxed{1 \\text{ or } 2}", "$x$", "\\boxed{0/0}", "$[1,5]$", "\\boxed{}", "(" * 3000 + "3" + ")" * 3000,
    ], ("$6/2$", "3")),
}  # fmt: skip


class TestAnswers:
    def test_a_text_is_right_for_one_answer_at_most(self, subtests):
        for name in HEDGES:
            with subtests.test(name):
                kind, options, expected, hedges, (honest, answer) = HEDGES[name]
                rule = kind(**options)
                for text in hedges:
                    scores = [scored(rule, text, answer=answer) for answer in expected]
                    assert sum(score.reward or 0.0 for score in scores) <= 1.0, text
                    unscored = [
                        score for score, answer in zip(scores, expected, strict=True) if score.reward is None and answer
                    ]
                    assert not unscored, text
                assert scored(rule, honest, answer=answer).reward == 1.0

    def test_where_nothing_was_expected_nothing_is_right(self, subtests):
        for rule in [Exact(), Exact(punctuation=False), Numeric(), Choice()]:
            for expected in [None, "", "  ", [], [None], ["Paris", None], [""]]:
                with subtests.test(expected=expected, rule=rule):
                    for text in ("null", "None", "", ".", "[]", "0"):
                        assert scored(rule, text, answer=expected).reward in (None, 0.0)
                    assert scored(rule, "null", answer=expected).reward is None
        assert scored(Exact(), "Paris", answer=["Rome", "Paris"]).reward == 1.0

    def test_the_last_answer_counts(self, subtests):
        for where, cheat, honest in [
            ("boxed", "\\boxed{B} \\boxed{A} \\boxed{", "\\boxed{A} \\boxed{B}"),
            ("tag:answer", "<answer>B</answer><answer>A</answer>", "<answer>A</answer><answer>B</answer>"),
            ("tag:answer", "<answer>A or B</answer>", "<answer>B</answer>"),
            ("tag:answer", "<!-- <answer>B</answer> --> <answer></answer>", "<answer> B </answer>"),
            ("line", "B\nA", "A\nB"),
            ("line", "Answer: B\n\n.", "Answer: B\n\n"),
            ("text", "B\u200b", " B "),
        ]:
            with subtests.test(cheat=cheat):
                assert scored(Exact(where), cheat, answer="B").reward == 0.0
                assert scored(Exact(where), honest, answer="B").reward == 1.0

    def test_a_pattern_that_is_made_slow_does_not_match(self):
        score = scored(Matches("^(a|aa)+$", seconds=0.2), "a" * 5000 + "!")
        assert (score.reward, score.failure) == (0.0, None)
        assert "was not done after 0.2 s" in score.explanation
        assert scored(Matches("^(a|aa)+$"), "aaaa").reward == 1.0

    def test_steps_that_a_slow_pattern_does_not_find_add_nothing(self):
        rule = Steps(beta=1.0, pattern="^(a|aa)+$")
        score = scored(rule, "a" * 5000 + "!")
        assert (score.reward, score.failure) == (0.0, None)
        assert scored(rule, "aaaa").reward == 1.0


class TestWriting:
    def test_tags_that_are_not_as_asked(self, subtests):
        rule = Tags(["think", "answer"])
        for cheat in [
            "<think></think><answer>b</answer>",
            "<think> \n\t</think><answer>b</answer>",
            "<think>\u200b\u2060\ufeff</think><answer>b</answer>",
            "<think>\u3164\u2800</think><answer>b</answer>",
            "<think>\u034f\ufe0f</think><answer>b</answer>",
            "<think>\u00ad\u00a0</think><answer>b</answer>",
            "<THINK>a</THINK><answer>b</answer>",
            "<think>a</think><answer>b</answer><think>c</think>",
            "<think>a<answer>b</answer></think><answer>c</answer>",
            "<think>a</answer></think><answer>c</answer>",
            "<think>a</think>ignored<answer>b</answer>",
            "&lt;think&gt;a&lt;/think&gt;<answer>b</answer>",
            "<think>a<think>b</think><answer>c</answer>",
            "",
        ]:
            with subtests.test(cheat=cheat):
                assert scored(rule, cheat).reward == 0.0
        assert scored(rule, "<think>a</think>\n<answer>b</answer>").reward == 1.0

    def test_calls_that_are_only_claimed(self, subtests):
        for claim in [
            'find({"id": 1}) returned: found',
            '<tool_call>{"name": "find", "arguments": {"id": 1}}</tool_call>',
            '```json\n{"tool_calls": [{"name": "find", "arguments": {"id": 1}}]}\n```',
        ]:
            with subtests.test(claim=claim):
                created = [
                    Message("user", "Find it."),
                    Message("assistant", "", [ToolCall("0", "find", '{"id": 1}')]),
                    Message("tool", "found", tool_call_id="0"),
                ]
                honest = Trajectory("s/1", Scenario("s", {"needed": 1}, "train"), 1, [History(created)])
                cheat = trajectory(claim, needed=1)
                for rule in (ToolUse("needed"), Calls(["find"]), Calls(pattern="^find")):
                    assert [score.reward for score in judging.judge(rule, [cheat, honest])] == [0.0, 1.0]

    def test_calls_that_are_repeated_or_failed_earn_nothing(self):
        def tool_episode(*answers):
            messages = [Message("user", "Find it.")]
            for number, answer in enumerate(answers):
                spelling = '{"id": 1}' if number % 2 else '{ "id":  1 }'
                messages += [
                    Message("assistant", "", [ToolCall("0", "find", spelling)]),
                    Message("tool", answer, tool_call_id="0"),
                ]
            return Trajectory("s/0", Scenario("s", {"needed": 2}, "train"), 0, [History(messages)])

        (repeated,) = judging.judge(ToolUse("needed"), [tool_episode(*["found"] * 8)])
        (failed,) = judging.judge(ToolUse("needed"), [tool_episode("Error: a", "\n error: b")])
        (honest,) = judging.judge(ToolUse("needed"), [tool_episode("found", "found another")])
        assert (repeated.reward, failed.reward, honest.reward) == (1 / 8, 0.0, 1.0)

    @pytest.mark.parametrize("cheat", ["", " \n", "\u200b"])
    def test_saying_nothing_is_worth_no_more_than_the_task(self, cheat):
        """Answer that is short, not repetitive, in the right script, and wrong."""

        def episode(text, tokens):
            message = Message("assistant", text, span=(1, 1 + tokens))
            history = History([Message("user", "q"), message], list(range(1 + tokens)), [0.0] * (1 + tokens))
            trajectory = Trajectory("s/0", Scenario("s", {"answer": "Paris"}, "train"), 0, [history])
            trajectory.metrics = {"sampled_tokens": float(tokens), "turns": 1.0}
            return trajectory

        def reward(rule, text, tokens):
            (score,) = judging.judge(rule, [episode(text, tokens)])
            return score.reward

        for rule in (Repetition(), Language(["Latin"]), Length(alpha=0.1, target=5)):
            assert reward(rule, cheat, 1) <= reward(rule, "Paris", 3) == 0.0
        task = Length(Exact(), alpha=0.1, target=5)
        assert (reward(task, cheat, 1), reward(task, "Paris", 3)) == (0.0, 1.0)
        assert reward(Steps(beta=1.0, pattern=r"\w+"), cheat, 1) == 0.0
        assert reward(Steps(beta=1.0, pattern=r"\w+"), "Paris", 3) == 1.0

    def test_letters_that_look_alike_are_of_their_script(self, subtests):
        for cheat, share in [
            ("P\u0430ris", 1 / 5),  # a Cyrillic letter
            ("\u0420\u0430\u0440\u0456\u0455", 1.0),
            ("Paris \u043d\u0435\u0442", 3 / 8),
            ("Paris\u200b \u043d\u0435\u0442", 3 / 8),
        ]:
            with subtests.test(cheat=cheat):
                assert scored(Language(["Latin"]), cheat).reward == pytest.approx(-share)
        assert scored(Language(["Latin"]), "Paris").reward == 0.0
