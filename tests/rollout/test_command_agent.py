"""Programs as agents (`agent.command`): what they do well, what fails, and what they leave behind. Published coding
agents run where HARNESSES names the folder in which docs/guides/coding_agents.md installs them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import psutil
import pytest

from components.environments.protocol import Step, WorkFolder
from components.errors import ResourceError
from components.inference.protocol import BASE_POLICY, ChatCompletion, Sampling
from components.rollout import command_agent
from components.rollout.command_agent import CommandAgent
from components.rollout.players.player import Player
from components.trajectories.schema import Scenario
from tests.rollout.worlds import Parrot, collect, endpoint

pytestmark = pytest.mark.usefixtures("sandbox_here")
ASK = """
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "Hello"}]}
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
def ask():
    url, data = os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


class Folder:
    """Asks for a file, and scores it."""

    def __init__(self, root: Path):
        self._root = root

    def reset(self, scenario):
        self.workspace = WorkFolder(self._root / uuid.uuid4().hex)
        self.workspace.path.mkdir()
        return [{"role": "user", "content": "Write done into result.txt."}]

    def step(self, action):
        file = self.workspace.path / "result.txt"
        done = file.is_file() and file.read_text().strip() == "done"
        return Step([], float(done), True, {"success": done, "answer": action["content"][-200:]})

    def scenarios(self, split):
        return []

    def tools(self):
        return []

    def close(self): ...


def played(tmp_path, engine, command, environment=Folder, **options):
    """Play one episode of a program."""
    with endpoint(engine, CommandAgent(command)) as (own, _, _):
        options = {"player": Player(own), "group_size": 1, "timeout": 120.0} | options
        [trajectory] = collect(engine, lambda: environment(tmp_path), [Scenario("s", {}, "train")], **options)
    return trajectory


def python(code):
    return ["python3", "-c", ASK + code]


def test_it_acts_in_its_folder_and_nothing_else(tmp_path):
    """Its paths and variables are the same in each episode; it gets no variable of this process."""
    os.environ["ESPALIER_SECRET_OF_A_TEST"] = "secret"
    code = """
said = ask()
open("result.txt", "w").write("done")
try:
    open("/etc/espalier", "w")
except OSError as error:
    said += " " + error.strerror
names = ("HOME", "ESPALIER_SECRET_OF_A_TEST", "ANTHROPIC_BASE_URL")
print(said, os.getcwd(), *map(os.environ.get, names))
"""
    try:
        trajectory = played(tmp_path, Parrot(), python(code))
    finally:
        del os.environ["ESPALIER_SECRET_OF_A_TEST"]
    assert (trajectory.failure, trajectory.outcome["success"], trajectory.outcome["reward"]) == (None, True, 1.0)
    [history] = trajectory.histories
    said, rest = trajectory.outcome["answer"].split(" ", 1)
    assert history.messages[-1].content == said
    assert rest.startswith("Read-only file system /tmp/work /tmp/home None http://127.0.0.1:")
    assert not rest.endswith("/v1")


def test_it_cannot_read_the_places_of_credentials(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/etc")
    monkeypatch.setattr(command_agent, "SECRETS", ("passwd", "ssl", "no-such-file"))
    code = """
ask()
try:
    print(len(open("/etc/passwd").read()))
except PermissionError:
    print(0)
print(len(os.listdir("/etc/ssl")))
"""
    assert Path("/etc/passwd").stat().st_size
    assert any(Path("/etc/ssl").iterdir())
    assert played(tmp_path, Parrot(), python(code)).outcome["answer"].split() == ["0", "0"]


FAILURES = {
    "never calls the model": ("print('done')", {}, "no call of the program reached the model"),
    "sends what is refused": ("body['logit_bias'] = {'1': 1}\nask()", {}, "CalledProcessError: python3: exit code 1"),
    "floods its output": ("ask()\nwhile True: print('x' * 10000)", {}, "wrote more than 4194304 bytes"),
    "gets too long a text": (f"print('{'x' * 140_000}')", {}, "bytes, after {instruction} is replaced by the environ"),
    "gets a zero byte": ("print('\0')", {}, "contain a zero byte"),
    "fails": (
        "ask()\nraise ValueError('no idea')",
        {},
        "CalledProcessError: python3: exit code 1: ValueError: no idea",
    ),
    "takes too long": ("ask()\nimport time\ntime.sleep(600)", {"timeout": 5.0}, "the episode took longer than 5 s"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_program_fails_its_episode_with_the_reason(tmp_path, name):
    """And whatever it started ends with it, also in a session of its own."""
    code, options, reason = FAILURES[name]
    mark = uuid.uuid4().hex
    sleeping = f"['python3', '-c', 'import time; time.sleep(900)', '{mark}']"
    left = f"import subprocess\nsubprocess.Popen({sleeping}, start_new_session=True)\n"
    trajectory = played(tmp_path, Parrot(), python(left + code), **options)
    assert reason in trajectory.failure.message, trajectory.failure
    end = time.monotonic() + 60
    while running(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert running(mark) == []


def running(mark):
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(mark in word for word in line)]


def test_its_calls_are_limited(tmp_path):
    trajectory = played(tmp_path, Parrot(), python("while True: ask()"), max_turns=3)
    assert (trajectory.failure, trajectory.metrics["turns"]) == (None, 3.0)
    assert len(trajectory.histories) == 3, "each asks the same anew, as sub-agents do"


def test_without_a_workspace_it_has_an_empty_folder_of_its_own(tmp_path, monkeypatch):
    """And the path of the program may be relative to the folder of the run."""
    monkeypatch.chdir(Path(shutil.which("sh")).parent)
    script = 'pwd; ls -A; touch file; exec python3 -c "$0"'
    trajectory = played(tmp_path, Parrot(), ["./sh", "-c", script, f"{ASK}\nask()"], environment=Words)
    assert (trajectory.failure, trajectory.outcome["answer"]) == (None, "/tmp/work")


class Words(Folder):
    """Scores the answer."""

    def reset(self, scenario):
        return [{"role": "user", "content": "Say something."}]

    def step(self, action):
        return Step([], 0.0, True, {"answer": action["content"]})


UNUSABLE = {
    "is missing": ["no-such-agent"],
    "is missing behind variables": ["env", "A=1", "no-such-agent", "B=2"],
    "is not executable": ["{folder}/no-such-agent"],
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_program_is_refused_before_the_first_episode(tmp_path, name):
    (tmp_path / "no-such-agent").touch()
    with pytest.raises(ResourceError, match=r"agent.command: '.*no-such-agent' is no program on the PATH, or not exec"):
        CommandAgent([word.format(folder=tmp_path) for word in UNUSABLE[name]])


TASK = Path(__file__).parents[1] / "environments" / "task_folders" / "greeting"
REWARD = ("reward=length", "reward.target=8")
HARNESSES = Path(os.environ.get("HARNESSES", "nowhere"))
PROVIDER = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "{base_url}", "apiKey": "{env:OPENAI_API_KEY}"}}
OPENCODE = {
    "provider": {"espalier": {**PROVIDER, "models": {"policy": {"tool_call": True}}}},
    "permission": "allow",
    "autoupdate": False,
    "share": "disabled",
}
ENDPOINT = '{name="e", base_url="{base_url}", env_key="OPENAI_API_KEY"}'
CODEX = {"model_provider": "e", "model_providers.e": ENDPOINT, "model_reasoning_summary": "none"}
CODEX |= {"web_search": "disabled", "features.multi_agent": "false"}
COMMANDS = {
    "mini": [
        *["env", "MSWEA_CONFIGURED=true", "MSWEA_COST_TRACKING=ignore_errors", "MSWEA_SILENT_STARTUP=1"],
        *["mini/bin/mini", "-y", "--exit-immediately", "-m", "openai/{model}", "-t", "{instruction}"],
    ],
    "qwen": ["npm/node_modules/.bin/qwen", "-y", "--auth-type", "openai", "-m", "{model}", "-p", "{instruction}"],
    "codex": [
        *["npm/node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
        *[word for name, value in CODEX.items() for word in ("-c", f"{name}={value}")],
        *["-m", "{model}", "{instruction}"],
    ],
    "opencode": [
        *["env", f"OPENCODE_CONFIG_CONTENT={json.dumps(OPENCODE)}", "npm/node_modules/.bin/opencode", "run"],
        *["-m", "espalier/{model}", "{instruction}"],
    ],
}
SHELL = ("bash", "shell", "run_shell_command", "exec_command", "shell_command")
WRITE = "echo done > result.txt"


def told(message):
    """Return what the policy reads of a message: the value of arguments, whatever form a program gives their text."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return [message["role"], message.get("content") or "", [json.loads(call["arguments"]) for call in calls]]


class Coder:
    """Runs a command with the shell tool that it is offered, then ends as the program expects. A token is a byte."""

    policy = BASE_POLICY

    def __init__(self):
        self.sampled: list[list[int]] = []
        self.asked: list[list[str]] = []

    async def chat(self, request):
        self.asked.append([tool["function"]["name"] for tool in request.tools])
        tool = next((tool["function"] for tool in request.tools if tool["function"]["name"] in SHELL), None)
        results = sum(message["role"] == "tool" for message in request.messages)
        message = {"role": "assistant", "content": "Done."}
        final = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        if tool is not None and (results == 0 or (results == 1 and "COMPLETE_TASK" in json.dumps(request.messages))):
            schema = tool["parameters"]["properties"]
            command = WRITE if results == 0 else final
            values = {"command": command, "cmd": command, "description": "Writes.", "is_background": False}
            if schema.get("command", {}).get("type") == "array":
                values["command"] = ["sh", "-c", command]
            arguments = json.dumps({name: value for name, value in values.items() if name in schema})
            call = {"id": f"call_{results}_0", "type": "function"}
            message |= {
                "content": "",
                "tool_calls": [call | {"function": {"name": tool["name"], "arguments": arguments}}],
            }
        prompt = [byte for part in (request.tools, *map(told, request.messages)) for byte in json.dumps(part).encode()]
        ids = list(json.dumps(told(message)).encode())
        self.sampled.append(ids)
        await asyncio.sleep(0)
        reason = "tool_calls" if "tool_calls" in message else "stop"
        return ChatCompletion(message, reason, prompt, ids, [-0.25] * len(ids), self.policy)


published = pytest.mark.skipif(
    not HARNESSES.is_dir(), reason="HARNESSES names no folder of coding agents; run `make test-harnesses`"
)


@published
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.timeout(600)
def test_published_coding_agents_complete_a_task(tmp_path, name, monkeypatch):
    monkeypatch.setenv("PATH", f"{HARNESSES.resolve()}/npm/node_modules/node/bin:{os.environ['PATH']}")
    engine = Coder()
    command = [
        str(HARNESSES.resolve() / word) if "/bin/" in word or ".bin/" in word else word for word in COMMANDS[name]
    ]
    trajectory = played(tmp_path, engine, command, sampling=Sampling(max_tokens=4000), max_turns=12, timeout=180.0)
    assert trajectory.failure is None, (trajectory.failure, engine.asked)
    assert trajectory.outcome["success"], (trajectory.outcome, engine.asked)
    spans = [
        history.token_ids[slice(*message.span)]
        for history in trajectory.histories
        for message in history.messages
        if message.span
    ]
    assert Counter(map(tuple, spans)) == Counter(map(tuple, engine.sampled))
    counts = f"{len(spans)} answers in {len(trajectory.histories)} histories"
    longest = max(len(history.token_ids) for history in trajectory.histories)
    print(f"\n{name}: {counts}, up to {longest} bytes; number of tools offered: {[*map(len, engine.asked)]}")


@published
@pytest.mark.timeout(1800)
def test_a_published_coding_agent_is_trained_on(tmp_path):
    """The answers of a tiny policy with random weights are of no use, but the trainer gives them the log-probabilities
    with which they were sampled: its KL to the sampling policy is 0."""
    tasks = tmp_path / "tasks"
    for number in range(5):
        shutil.copytree(TASK, tasks / f"greeting{number}")
    environment = [
        "environment=tasks",
        f"environment.path={tasks}",
        f"root={tmp_path}",
        "environment.heldout=0.4",
        "evaluate.scenarios=null",
    ]
    agent = ["agent=command", "agent.max_turns=3", "agent.max_tokens=16", "model.max_length=8192"]
    flow = [
        "warmup=none",
        "rounds=1",
        "collect.scenarios=2",
        "collect.group_size=2",
        "filter=everything",
        "deploy=none",
    ]
    run = subprocess.run(
        [*[sys.executable, "-m", "flows.run", "+experiment=smoke"], *environment, *agent, *flow, *REWARD],
        env={**os.environ, "PATH": f"{HARNESSES.resolve()}/mini/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"^round 1/1 .* KL 0\.0000 .* kept 4 of 4 ", run.stderr, re.MULTILINE), run.stderr
