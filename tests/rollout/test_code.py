"""Tests of the code format: blocks run in the sandbox, calls in the environment, and errors reach the agent."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import pytest

from components.environments.protocol import Step
from components.environments.tools import InvalidAction, ToolEnvironment, tool
from components.environments.worlds.shop import Shop
from components.errors import ResourceError, SpecError
from components.inference.protocol import BASE_POLICY, ChatCompletion, Sampling
from components.rollout import formats
from components.rollout.collector import demonstrate
from components.rollout.formats import Presentation
from components.sandbox import Limits, bubblewrap
from components.trajectories.convert import to_openai
from components.trajectories.schema import Scenario
from tests.rollout.worlds import play

WIDE = Limits(seconds=60, cpu_seconds=60)
"""Limits for code that must not time out on a busy machine."""


pytestmark = [
    pytest.mark.timeout(1800),  # each block starts processes, which a busy machine is slow at
    pytest.mark.usefixtures("sandbox_here"),
]


class Counter(ToolEnvironment):
    """Counts to ten; each step is worth what is added."""

    def scenarios(self, split):
        return [Scenario(f"{split}-0", {}, split)]

    def begin(self, scenario):
        self.count = 0
        return "Count to ten."

    @tool
    def add(self, number: Annotated[int, "at most 3"]) -> str:
        """adds to the count"""
        if number > 3:
            raise InvalidAction("3 at most")
        self.count += number
        self.reward += number / 10
        self.done = self.count >= 10
        return str(self.count)

    def outcome(self, answer):
        return {"success": self.count == 10, "answer": answer}


class Speaker:
    """An engine with scripted responses."""

    policy = BASE_POLICY

    def __init__(self, *texts: str):
        self.texts = list(texts)

    async def chat(self, request):
        text = self.texts.pop(0)
        return ChatCompletion({"role": "assistant", "content": text}, "stop", [], [], [], BASE_POLICY)


def block(code: str) -> str:
    return f"```python\n{code}\n```"


def played(*texts: str, environment=None, limits=WIDE, scenario=None, **options):
    environment = environment or Counter()
    scenario = scenario or environment.scenarios("train")[0]
    options = {"max_turns": len(texts), "timeout": 120.0} | options
    return asyncio.run(
        play(
            Speaker(*texts),
            environment,
            scenario,
            sample=0,
            sampling=Sampling(),
            seed=0,
            presentation=Presentation("code", limits=limits),
            **options,
        )
    )


def told(trajectory) -> list[str]:
    """Return the observations."""
    return [message.content for message in trajectory.histories[0].messages[2:] if message.role == "user"]


def test_blocks_call_tools_keep_variables_and_end_the_episode():
    trajectory = played(
        "I count.\n" + block("seen = [add(3), add(number=2)]\nprint(seen)"),
        block("seen.append(add(3))\nseen"),
        block("while True:\n    print(add(1))"),
    )
    assert trajectory.failure is None
    first = trajectory.histories[0].messages
    assert first[0].role == "system"
    assert "- add(number: int (at most 3)): adds to the count" in first[0].content
    assert trajectory.tools == []
    assert told(trajectory)[:2] == ["Observation: ['3', '5']", "Observation: ['3', '5', '8']"]
    assert told(trajectory)[2].startswith("Observation: 9\n10\nTraceback")
    assert told(trajectory)[2].endswith("ToolError: the episode is over")
    assert trajectory.success
    assert trajectory.step_rewards == pytest.approx([0.5, 0.3, 0.2])  # of the calls of each block together
    assert (trajectory.metrics["turns"], trajectory.metrics["tool_calls"], trajectory.metrics["parse_errors"]) == (
        3,
        5,
        0,
    )


def test_errors_of_tools_are_raised_in_the_code():
    trajectory = played(
        block("try:\n    add(7)\nexcept ToolError as error:\n    print('told:', error)"),
        block("add('two')"),
        block("def twice():\n    add(1, 2)\ntwice()"),
        block("print(undefined)"),
        "Enough.",
    )
    observations = told(trajectory)
    assert observations[0] == "Observation: told: 3 at most"
    assert observations[1].endswith("ToolError: add.number: 'two' is not of type 'integer'")
    assert 'File "<cell 2>", line 1' in observations[1]
    assert "main.py" not in observations[1]
    assert observations[2].endswith("TypeError: add() takes 1 arguments, 2 were given")
    assert observations[3].endswith("NameError: name 'undefined' is not defined")
    assert trajectory.outcome["answer"] == "Enough."
    assert (
        trajectory.metrics["tool_calls"],
        trajectory.metrics["refused_calls"],
        trajectory.metrics["failed_blocks"],
    ) == (1, 1, 3)


def test_what_cannot_be_read_is_told_and_counted():
    answers = [
        "```python\nadd(1)",
        block("add(1)") + "\n" + block("add(2)"),
        "```json\n{}\n```",
        block("add(1"),
        block("x = '\0'"),
        " ",
    ]
    trajectory = played(*answers, block("add(3)"))
    observations = told(trajectory)
    assert [text.removeprefix("Observation: error: ").split("; ")[0] for text in observations[:3]] == [
        "no block of code ends with a line ```",
        "there are 2 blocks of code",
        "the block is json",
    ]
    assert observations[3].endswith("SyntaxError: '(' was never closed")
    assert "null bytes" in observations[4]
    assert observations[5] == "Observation: error: write a block of code, or your answer"
    assert observations[6] == "Observation: '3'"  # nothing of it had run
    assert trajectory.metrics["parse_errors"] == 6
    assert trajectory.step_rewards == pytest.approx([0, 0, 0, 0, 0, 0, 0.3])


@pytest.mark.parametrize(
    ("code", "limits", "why"),
    [
        ("print('begun', flush=True)\nwhile True: pass", Limits(seconds=2, cpu_seconds=60), "took longer than 2 s"),
        ("for _ in range(100):\n    try: add(7)\n    except ToolError: pass", WIDE, "called tools more than 32 times"),
        ("import os\nos.write(int(os.environ['CALLS']), b'[' * 2_000_000)", WIDE, "or with too much at once"),
        ("import os\nos._exit(3)", WIDE, "ended the interpreter, with exit code 3"),
    ],
    ids=["endless", "calls", "long call", "exit"],
)
def test_code_that_has_to_be_ended_costs_its_turn_only(code, limits, why):
    trajectory = played(block(f"kept = 1\n{code}"), block("print(add(2))\nkept"), limits=limits)
    assert trajectory.failure is None
    assert why in told(trajectory)[0]
    assert told(trajectory)[1].startswith("Observation: 2\nTraceback")
    assert told(trajectory)[1].endswith("NameError: name 'kept' is not defined")  # of what was ended nothing is left


def test_huge_output_is_cut_with_a_mark():
    trajectory = played(
        block("print('x' * 50_000)\nprint('\\x1b[31mred')"), limits=Limits(seconds=60, output_bytes=1000)
    )
    (observations,) = told(trajectory)
    assert "bytes cut ...]" in observations
    assert len(observations) < 1200
    assert observations.endswith("\nred")


def test_no_way_leads_out(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    attempts = f"""
import json, os, socket
def tell(name, arguments):
    os.write(int(os.environ["CALLS"]), json.dumps([name, arguments]).encode() + b"\\n")
    print(os.read(int(os.environ["CALLS"]), 1000).decode().strip())
for attempt in (
    lambda: open({str(secret)!r}).read(),
    lambda: socket.create_connection(("127.0.0.1", 80), 1),
    lambda: __import__("components"),
):
    try:
        print("out:", attempt())
    except Exception as error:
        print(type(error).__name__)
tell("reset", {{}})
tell("add", {{"number": 1, "other": 2}})
os.write(int(os.environ["CALLS"]), b"no JSON\\n")
print(os.read(int(os.environ["CALLS"]), 1000).decode().strip())
print(sorted(os.environ))
"""
    environment = Counter()
    (observations,) = told(played(block(attempts), environment=environment))
    lines = observations.removeprefix("Observation: ").splitlines()
    assert lines[:3] == ["FileNotFoundError", "OSError", "ModuleNotFoundError"]
    assert json.loads(lines[3]) == {"error": "there is no tool 'reset'"}
    assert json.loads(lines[4])["error"].startswith("add: Additional properties are not allowed")
    assert json.loads(lines[5]) == {"error": "this is no call of a tool"}
    assert "'PATH'" in lines[6]
    assert "KEY" not in lines[6]
    assert environment.count == 0


def test_earlier_code_is_not_done_twice_in_the_environment():
    """Earlier blocks are re-executed to restore variables; their calls return the recorded results."""
    environment = Counter()
    trajectory = played(
        *[block(f"x{n} = add(1)") for n in range(3)], block("print(x0, x1, x2)"), environment=environment
    )
    assert told(trajectory)[-1] == "Observation: 1 2 3"
    assert environment.count == 3


def test_earlier_code_that_does_something_else_is_noticed():
    clock = "import time\nadd(time.time_ns() % 3)"
    trajectory = played(*[block(clock)] * 12, max_turns=12)
    assert any("earlier code called other tools. All variables are lost" in text for text in told(trajectory))
    assert trajectory.failure is None


@pytest.mark.parametrize("kind", ["", "async", "blocking"])
def test_environments_of_each_kind(kind):
    class Slow(Counter):
        blocking = kind == "blocking"

    class Async(Counter):
        async def step(self, action):
            await asyncio.sleep(0.01)
            return super().step(action)

    trajectory = played(block("print(add(1), add(2))"), environment=Async() if kind == "async" else Slow())
    assert told(trajectory) == ["Observation: 1 3"]


def test_an_environment_that_fails_in_a_call_fails_the_episode():
    class Broken(Counter):
        def step(self, action):
            raise OSError("the disk is gone")

    trajectory = played(block("try: add(1)\nexcept BaseException: pass\nwhile True: pass"), environment=Broken())
    assert trajectory.failure is not None
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("environment", "EnvironmentFailed")
    assert "the disk is gone" in trajectory.failure.message


def test_time_of_the_environment_is_not_the_codes_but_the_episodes():
    class Slow(Counter):
        async def step(self, action):
            await asyncio.sleep(2.5)
            return super().step(action)

    trajectory = played(block("print(add(1))"), environment=Slow(), limits=Limits(seconds=2, cpu_seconds=60))
    assert told(trajectory) == ["Observation: 1"]
    trajectory = played(block("print(add(1))"), environment=Slow(), timeout=1.0)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "WaitTimeout"


def test_what_the_environment_says_besides_is_shown():
    class Talks(Counter):
        def step(self, action):
            step = super().step(action)
            return Step([*step.observation, {"role": "user", "content": "Good."}], step.reward, step.done, step.info)

    assert told(played(block("add(1)"), environment=Talks())) == ["Observation: '1'", "Good."]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_solutions_of_the_shop_are_code_that_does_them(number):
    shop = Shop(train=6, heldout=1)
    scenario = shop.scenarios("train")[number]
    (shown,) = demonstrate(lambda: shop, [scenario], Presentation("code", limits=WIDE))
    assert shown.success
    messages = shown.histories[0].messages
    written = [message.content for message in messages if message.role == "assistant"]
    assert written[0].startswith('```python\nprint(find_order(order="')
    again = played(*written, environment=Shop(train=6, heldout=1), scenario=scenario)
    assert again.success
    assert [to_openai(message) for message in again.histories[0].messages] == [
        to_openai(message) for message in messages
    ]
    assert again.metrics["parse_errors"] == 0


def test_several_calls_and_odd_names_are_written_as_python():
    code = formats.make("code")
    parameters = {"type": "object", "properties": {"from": {"type": "string"}, "to": {}}, "required": ["from"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("go-to", "import")]
    code.opening([], tools)
    calls = [
        {"id": "", "type": "function", "function": {"name": name, "arguments": json.dumps({"from": "a", "to": None})}}
        for name in ("go-to", "import")
    ]
    message = code.write({"role": "assistant", "content": "Both.", "tool_calls": calls})
    assert message["content"] == (
        'Both.\n```python\nprint(go_to(to=None, **{"from": "a"}))\nprint(import_(to=None, **{"from": "a"}))\n```'
    )
    with pytest.raises(SpecError, match="the tools go-to and go_to would be the same function"):
        formats.make("code").opening([], [*tools, {"type": "function", "function": {"name": "go_to"}}])


def test_without_a_sandbox_it_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    with pytest.raises(ResourceError, match=r"needs bwrap.*apt-get install bubblewrap"):
        played("x")


def test_calls_are_held_against_the_dialect_that_a_schema_names():
    """In JSON schema draft 4 an exclusive minimum is a boolean; since draft 6 it is a number."""

    class Old(Counter):
        def tools(self):
            (tool,) = super().tools()
            number = {"type": "integer", "minimum": 0, "exclusiveMinimum": True}
            schema = {"$schema": "http://json-schema.org/draft-04/schema#", "properties": {"number": number}}
            return [{"type": "function", "function": {**tool["function"], "parameters": schema}}]

    trajectory = played(block("add(0)"), block("print(add(1))"), environment=Old())
    assert trajectory.failure is None
    assert "add.number: 0 is less than or equal to the minimum of 0" in told(trajectory)[0]
    assert trajectory.metrics["refused_calls"] == 1
    assert trajectory.metrics["tool_calls"] == 1


def test_a_schema_that_refers_to_nothing_fails_the_episode():
    class Lost(Counter):
        def tools(self):
            (tool,) = super().tools()
            schema = {"type": "object", "properties": {"number": {"$ref": "#/$defs/nowhere"}}}
            return [{"type": "function", "function": {**tool["function"], "parameters": schema}}]

    trajectory = played(block("print(add(1))"), environment=Lost())
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("environment", "EnvironmentFailed")
    assert "the schema of the tool 'add' cannot be used" in trajectory.failure.message


@pytest.mark.security
@pytest.mark.parametrize("state", "0123")
def test_a_forged_end_mark_drops_no_reward(state):
    """Regression: the marker was a digest of the code, which the code itself can compute."""
    forge = (
        "import hashlib, os, sys\n"
        "given = sys._getframe(1).f_globals['request']\n"
        "codes = [*(code for code, _ in given['earlier']), given['cell']]\n"
        "mark = hashlib.sha256(chr(0).join(codes).encode()).hexdigest()[:16]\n"
        f"print(mark + {state!r}, end='', flush=True)\n"
        "os._exit(0)"
    )
    trajectory = played(block(f"add(number=3)\n{forge}"), block("print(add(number=3))"))
    assert trajectory.step_rewards == pytest.approx([0.3, 0.3])
    assert (trajectory.metrics["tool_calls"], trajectory.metrics["parse_errors"], trajectory.outcome["success"]) == (
        2,
        0,
        False,
    )
