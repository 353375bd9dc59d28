"""Tests of a model's programs, in the sandbox."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.errors import ResourceError, SpecError
from components.rewards import judge as judging
from components.rewards.rules.code_tests import CodeTests, program
from components.sandbox import bubblewrap, remote
from components.trajectories.schema import Scenario, Trajectory
from tests.rewards.programs import judged_together
from tests.trajectories.builders import talk

ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = [{"call": "add(3, 4)", "result": 7}, {"call": "add('a', 'b')", "result": "ab"}, "assert add(1, 1) == 2"]


def scored(text, tests=TESTS, **options):
    sample = Trajectory("s/0", Scenario("s", {"tests": tests}, "train"), 0, [talk("Write add.", text)])
    (score,) = judging.judge(CodeTests(**options), [sample])
    return score


def test_the_last_block_is_the_program():
    assert program("First:\n```python\na = 1\n```\nBetter:\n```py\nb = 2\n```\nDone.") == "b = 2"
    assert program("```\nopen = 1") == "open = 1"
    assert program("x = 3") == "x = 3"


@pytest.mark.usefixtures("sandbox_here")
class TestInTheSandbox:
    def test_a_wrong_value_that_is_nested_deep_scores_nothing(self, subtests):
        """Regression: at 600 levels the comparison raised RecursionError, and the episode was unscored."""
        for levels in [5, 480, 600, 900, 5000]:
            with subtests.test(levels=levels):
                nested = f"```python\ndef f(x):\n    v = []\n    for _ in range({levels}): v = [v]\n    return v\n```"
                assert scored(nested, [{"call": "f(3)", "result": 7}]).reward == 0.0

    def test_the_share_of_the_tests_that_it_passes(self):
        score = scored(f"Here:\n{ADD}\nGood luck.")
        assert (score.reward, score.components, score.explanation) == (1.0, {"passed": 3.0, "tests": 3.0}, "")
        score = scored("```python\ndef add(a, b):\n    return 7\n```")
        assert score.reward == pytest.approx(1 / 3)
        assert score.explanation == "test 2: add('a', 'b') is 7, expected 'ab'"
        assert scored("```python\ndef add(a, b):\n    return 7\n```", give="all").reward == 0.0
        assert scored(ADD, give="all").reward == 1.0

    def test_a_program_that_prints_is_compared_by_what_it_prints(self):
        tests = [{"stdin": "3 4\n", "stdout": "7"}, {"stdin": "1 1\n", "stdout": "2\n"}]
        assert scored("print(sum(map(int, input().split())), ' ')", tests).reward == 1.0
        score = scored("print(7)", tests)
        assert (score.reward, score.explanation) == (0.5, "test 2: it printed '7\\n'")

    def test_a_program_that_fails_passes_nothing(self, subtests):
        for code, said in [
            ("def add(a, b): return 1 / 0", "it raised ZeroDivisionError: division by zero"),
            ("def add(a, b", "it raised SyntaxError"),
            ("while True: pass", "ended for time"),
            ("import sys; sys.exit(0)", "the program ended before the test was over"),
            ("import os; os._exit(0)", "the program ended before the test was over"),
            ("def add(a, b): return object()", "it raised TypeError"),
            ("def add(a, b): return True", "add(3, 4) is True, expected 7"),
            ("import socket; socket.create_connection(('1.1.1.1', 80), 1)", "it raised"),
            ("add = lambda a, b: 'x' * 10**7", "it raised ValueError: the value takes"),
        ]:
            with subtests.test(code=code):
                seconds = 1.0 if code.startswith("while") else 30.0  # a busy machine takes a while to begin
                score = scored(f"```python\n{code}\n```", [TESTS[0]], seconds=seconds)
                assert score.reward == 0.0
                assert any(phrase in score.explanation for phrase in said.split(" or "))

    def test_who_prints_what_a_driver_would_print_does_not_know_what_is_expected(self):
        cheat = (
            "import sys\nmark = sys._getframe(1).f_globals['given']['mark']\nprint(mark + '7')\n"
            "import os; sys.stdout.flush(); os._exit(0)"
        )
        recorded = "import sys\nprint(sys._getframe(1).f_globals['given'])\n"
        assert "result" not in json.dumps(scored(f"```python\n{recorded}\n```", [TESTS[0]]).explanation)
        # It may guess; it is not told.
        assert scored(f"```python\n{cheat}\n```", [{"call": "add(3, 5)", "result": 8}]).reward == 0.0

    def test_many_at_once_do_not_disturb_each_other(self):
        rows = [
            Trajectory(
                f"s{i}/0", Scenario(f"s{i}", {"tests": [f"assert n == {i}"]}, "train"), 0, [talk("?", f"n = {i}")]
            )
            for i in range(6)
        ]
        assert [score.reward for score in judging.judge(CodeTests(), rows, concurrency=3)] == [1.0] * 6

    def test_what_is_no_test_leaves_the_episode_unscored(self, subtests):
        for tests in [[], "assert True", [{"stdin": "1"}], [3], None]:
            with subtests.test(tests=tests):
                score = scored(ADD, tests)
                assert score.reward is None
                assert "expected" in score.failure.message


BANK = """
class Overdrawn(ValueError): pass
class Account:
    def __init__(self, owner): self.owner, self.balance, self.log = owner, 0, []
    def pay(self, amount):
        if self.balance + amount < 0: raise Overdrawn("too little", amount)
        self.balance += amount
        self.log.append(amount)
        return self
    def __len__(self): return len(self.log)
    def __iter__(self): return iter(self.log)
    def __str__(self): return f"{self.owner}: {self.balance}"
class Node:
    def __init__(self, value): self.value, self.next = value, None
def chain(values):
    head = None
    for value in reversed(values):
        node = Node(value); node.next = head; head = node
    return head
def longest(pairs): return max(pair.next for pair in pairs)
"""
FUNCTIONS = """
import collections, decimal, fractions, datetime, itertools
from typing import List
def similar(a, b): return tuple(set(a) & set(b))
def count(text): return collections.Counter(text)
def group(words):
    found = collections.defaultdict(list)
    for word in words: found[len(word)].append(word)
    return found
def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
def kinds(): return (None, True, 1.5, 2j, b"a", bytearray(b"b"), {1: {2}}, frozenset({3}), range(3), [float("inf")])
def exact(): return [decimal.Decimal("0.1"), fractions.Fraction(1, 3), datetime.date(2026, 1, 2), collections.deque()]
def squares(n): return (k * k for k in range(n))
def apply(function, values): return [function(value) for value in values]
def encode_shift(text): return "".join(chr((ord(c) + 5 - ord("a")) % 26 + ord("a")) for c in text)
def decode_shift(text): return "".join(chr((ord(c) - 5 - ord("a")) % 26 + ord("a")) for c in text)
def sort(values): values.sort()
calls = 0
def counted():
    global calls
    calls += 1
    return calls
class Pair:
    def __init__(self, a, b): self.a, self.b = a, b
def widest(pairs): return max(pair.b - pair.a for pair in pairs)
"""
ACCEPTED = {
    "MBPP": (FUNCTIONS, "assert set(similar((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))"),
    "MBPP with objects": (FUNCTIONS, "assert widest([Pair(5, 24), Pair(15, 25)]) == 19"),
    "HumanEval": (
        FUNCTIONS,
        "METADATA = {}\ndef check(candidate):\n    from random import randint\n    import copy\n    import string\n"
        "    for _ in range(20):\n        text = ''.join(string.ascii_lowercase[randint(0, 25)] for _ in range(9))\n"
        "        assert candidate(encode_shift(copy.deepcopy(text))) == text\ncheck(decode_shift)",
    ),
    "a module that only the program imports": (FUNCTIONS, "assert count('aab') == collections.Counter('aba')"),
    "containers of the library": (FUNCTIONS, "assert count('aab') == {'a': 2, 'b': 1} and group(['a', 'b']) == "
    "{1: ['a', 'b']}"),
    "large integers": (FUNCTIONS, "import math\nassert factorial(900) == math.factorial(900) > 2 ** 6000"),
    "kinds of data": (
        FUNCTIONS,
        "assert kinds() == (None, True, 1.5, 2j, b'a', bytearray(b'b'), {1: {2}}, frozenset({3}), range(3), "
        "[float('inf')])\n"
        "assert [type(one) for one in kinds()][:4] == [type(None), bool, float, complex]",
    ),
    "exact numbers and dates": (
        FUNCTIONS,
        "from decimal import Decimal\nfrom fractions import Fraction\nimport datetime, collections\n"
        "assert exact() == [Decimal('0.1'), Fraction(1, 3), datetime.date(2026, 1, 2), collections.deque()]",
    ),
    "generators": (FUNCTIONS, "assert list(squares(4)) == [0, 1, 4, 9] and sum(squares(3)) == 5 and 4 in squares(3)"),
    "functions as arguments": (
        FUNCTIONS,
        "seen = []\ndef note(x):\n    seen.append(x)\n    return factorial(x)\nassert apply(note, [3, 4]) == [6, 24]\n"
        "assert seen == [3, 4] and apply(len, ['ab']) == [2] and apply(int, ['7']) == [7]\n"
        "assert sorted(['bb', 'a'], key=factorial and len) == ['a', 'bb'] and list(map(factorial, [3])) == [6]",
    ),
    "errors of functions that are arguments": (
        FUNCTIONS, "try:\n    apply(lambda x: 1 / x, [0])\nexcept ZeroDivisionError:\n    pass\nelse:\n"
        "    assert False",
    ),
    "global variables": (FUNCTIONS, "assert calls == 0 and counted() == 1 and counted() == 2 and calls == 2"),
    "unittest": (
        FUNCTIONS,
        "import unittest\nclass T(unittest.TestCase):\n    def runTest(self):\n"
        "        self.assertEqual(factorial(3), 6)\n"
        "        with self.assertRaises(TypeError):\n            factorial('a')\n"
        "        self.assertIsInstance(Pair(1, 2), Pair)\n"
        "result = T().run()\nassert result.wasSuccessful(), result",
    ),
    "eval": (FUNCTIONS, "assert eval('factorial(3)') == 6"),
    "objects": (
        BANK,
        "account = Account('ada')\nassert account.pay(5).pay(2) is account and account.balance == 7 and "
        "len(account) == 2\n"
        "assert list(account) == [5, 2] and account.log[0] == 5 and str(account) == f'{account}' == 'ada: 7' "
        "and account\n"
        "account.owner = 'bob'\nassert account.owner == 'bob' and getattr(account, 'none', 3) == 3 and account != None",
    ),
    "exceptions of the program": (
        BANK,
        "try:\n    Account('ada').pay(-1)\nexcept Overdrawn as error:\n    assert error.args == ('too little', -1)\n"
        "else:\n    assert False\ntry:\n    Account('ada').pay(-2)\nexcept ValueError as error:\n"
        "    assert 'too little' in str(error)\nelse:\n    assert False\n"
        "import unittest\nwith unittest.TestCase().assertRaises(Overdrawn):\n    Account('x').pay(-3)",
    ),
    "closures": ("def adder(n): return lambda x: x + n", "add = adder(3)\nassert add(4) == 7 and adder(1)(1) == 2"),
    "linked nodes": (
        BANK,
        "node, found = chain([1, 2, 3]), []\nwhile node:\n    found.append(node.value)\n    node = node.next\n"
        "assert found == [1, 2, 3]\na, b = Node(1), Node(2)\na.next = b\nassert a.next is b and a.next.value == 2",
    ),
    "a change of an argument, as a call": (FUNCTIONS, {"call": "[x := [3, 1], sort(x), x][-1]", "result": [1, 3]}),
    "tuples and keys, as a call": (FUNCTIONS, {"call": "(group(['a']), (1, 2))", "result": [{"1": ["a"]}, [1, 2]]}),
    "a long result": ("def f(n): return list(range(n))", {"call": "f(30000)", "result": list(range(30000))}),
    "a long argument": ("def f(x): return sum(x)", "xs = list(range(100000))\nassert f(xs) == sum(xs)"),
    "a long output": ("print('\\n'.join(map(str, range(9000))))", {"stdin": "", "stdout": "\n"
    "".join(map(str, range(9000)))}),
    "stdin": ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", {"stdin": "3 4\n5\n", "stdout": "12"}),
}  # fmt: skip
REFUSED = {
    "objects are not compared": (BANK, "assert Node(1) == Node(1)", "cannot be compared"),
    "classes are not subclassed": (BANK, "class More(Account): pass", "subclasses"),
    "objects are not copied": (BANK, "import copy\ncopy.deepcopy(Node(1))", "cannot be copied"),
    "arguments are plain data": (FUNCTIONS, "apply(len, object())", "a object to the program, which is no plain data"),
    "arguments are copies": (FUNCTIONS, "x = [3, 1]\nsort(x)\nassert x == [1, 3]", "the test sees copies"),
    "a wrong result": (FUNCTIONS, "n = 3\n"
    "assert factorial(n) == 7, 'six'", "AssertionError: six in `assert factorial(n) == 7"),
}  # fmt: skip


GENERIC = """
class G:
    def __init__(self): self.passes = 0
    def __call__(self, *values): return self
    def __getattr__(self, name): return self
    def __getitem__(self, key): return 0
    def __len__(self): return 3
    def __bool__(self): return True
    def __str__(self): return "3"
    def __iter__(self):
        self.passes += 1
        return iter([3, 1, 2] if self.passes == 1 else [])
f = G()
def g(*values): return G()
def h(*values): return [G()]
"""
"""A program whose functions return an object that answers anything."""
PROPERTIES = [
    "assert F([3, 1, 2])",
    "assert len(F([3, 1, 2])) == 3",
    "r = F([3, 1, 2])\nassert all(r[i] <= r[i + 1] for i in range(2))",
    "r = F([3, 1, 2])\nassert set(r) == {1, 2, 3}\nassert all(a <= b for a, b in zip(r, list(r)[1:]))",
    "assert F('ab').isdigit()",
    "assert str(F('ab')).isdigit()",
    "def check(candidate):\n    assert candidate([3])\ncheck(F)",
]


@pytest.mark.usefixtures("sandbox_here")
class TestForms:
    def test_an_object_that_answers_anything_passes_no_property(self, subtests):
        programs = {}
        for function in ["f", "g", "h"]:
            tests = [re.sub(r"\bF\b", function, test) for test in PROPERTIES]
            if function == "h":  # a list is plain data, so its elements are tested
                tests = [test.replace("h([3, 1, 2])", "h()[0]").replace("h('ab')", "h()[0]") for test in tests[:-1]]
            programs[function] = (tests, GENERIC)
        for function, score in judged_together(programs, CodeTests(seconds=60.0)).items():
            with subtests.test(function=function):
                assert score.reward == 0.0, score.explanation

    def test_honest_programs_pass_tests_of_each_form(self, subtests):
        programs = {name: ([test], code) for name, (code, test) in ACCEPTED.items()}
        for name, score in judged_together(programs, CodeTests(seconds=60.0)).items():
            with subtests.test(name):
                assert score.reward == 1.0, score.explanation

    def test_what_cannot_be_tested_by_statements_says_so(self, subtests):
        programs = {name: ([test], code) for name, (code, test, _) in REFUSED.items()}
        for name, score in judged_together(programs, CodeTests(seconds=60.0)).items():
            with subtests.test(name):
                assert score.reward == 0.0
                assert REFUSED[name][2] in score.explanation

    def test_a_test_that_cannot_be_run_leaves_the_episode_unscored(self, subtests):
        for test, said in [
            ("assert add(1, 1) ==", "does not compile"),
            ("assert abs(sum([1, 2])) == 3", "only functions that are built-in"),
        ]:
            with subtests.test(test=test):
                score = scored(ADD, [test])
                assert score.reward is None
                assert said in score.failure.message

    def test_a_sandbox_that_does_not_start_leaves_the_episode_unscored(self, monkeypatch):
        real, left = bubblewrap.subprocess.Popen, []

        def broken(arguments, *more, **named):
            if not left.pop():
                raise OSError("no memory for a process")
            return real(arguments, *more, **named)

        monkeypatch.setattr(bubblewrap.subprocess, "Popen", broken)
        for starts in ([False], [False, True]):  # the program's fails, the test's
            left[:] = starts
            score = scored(ADD, TESTS[2:], seconds=60.0)
            assert score.reward is None
            assert score.failure.message.startswith("no memory for a process")
        left[:] = [True, True]
        assert scored(ADD, TESTS[2:], seconds=60.0).reward == 1.0


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers().map(lambda n: n << 5000) | st.floats(allow_nan=False)
    | st.text() | st.binary() | st.complex_numbers(allow_nan=False) | st.fractions() | st.dates() | st.timedeltas()
    | st.decimals(allow_nan=False),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner)
    | st.sets(st.integers() | st.text(), max_size=1) | st.frozensets(st.binary(), max_size=1),
    max_leaves=8,
)  # fmt: skip


@given(PLAIN)
def test_plain_data_crosses_as_it_is(value):
    def none(other):
        raise AssertionError(other)

    result = remote.decode(json.loads(json.dumps(remote.encode(value, none))), none)
    assert (result, type(result), repr(result)) == (value, type(value), repr(value))


@given(st.recursive(st.none() | st.integers() | st.text(max_size=6) | st.sampled_from([*remote._TYPES, "int", "deque"]),
                    lambda inner: st.lists(inner, max_size=4), max_leaves=10))  # fmt: skip
def test_odd_messages_become_plain_data_or_an_error(message):
    def none(data):
        raise LookupError(data)

    try:
        value = remote.decode(message, none)
    except Exception:  # noqa: BLE001  any is a failed test
        return
    remote.encode(value, none)


def test_an_episode_without_a_program_has_nothing_and_one_without_tests_is_unscored():
    assert scored("").reward == 0.0
    sample = Trajectory("s/0", Scenario("s", {}, "train"), 0, [talk("Write add.", ADD)])
    (score,) = judging.judge(CodeTests(), [sample])
    assert "there is no 'input.tests'" in score.failure.message


def test_without_a_sandbox_it_says_what_to_install(monkeypatch):
    def missing():
        raise ResourceError("the sandbox needs bwrap, which is not here")

    monkeypatch.setattr(bubblewrap, "check", missing)
    with pytest.raises(ResourceError, match="bwrap"):
        scored(ADD)


def test_a_field_of_nothing_is_refused():
    with pytest.raises(SpecError, match=r"reward\.tests"):
        CodeTests("scenario.tests")


def test_a_program_reads_no_text_of_an_exception_of_its_test():
    peeks = """
def add(a, b, check=None):
    try:
        check(0)
    except Exception as error:
        digits = [int(word) for word in str(error).split() if word.isdecimal()]
        return digits[0] if digits else None
"""
    test = """
def check(value):
    if value != 7:
        raise ValueError(f"expected 7 but got {value}")
assert add(3, 4, check=check) == 7
"""
    assert scored(f"```python{peeks}```", [test]).reward == 0.0
