"""Tasks in folders: what is read and refused, how an agent works on files, and what the tests of a task may do. The
package of Harbor reads the same folders where HARBOR names the folder in which it is installed."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from components.environments.tasks.config import KEYS
from components.environments.tasks.environment import Tasks
from components.environments.tasks.folder import read_tasks
from components.environments.tasks.host_folder import HostFolder
from components.environments.tools import call
from components.errors import EnvironmentFailed, ResourceError, SpecError
from components.rollout.command_agent import CommandAgent
from components.rollout.players.player import Player
from components.specs import Target, validate
from flows.experiment.compose import compose
from tests.environments import checks
from tests.rollout.test_command_agent import python
from tests.rollout.worlds import Parrot, collect, endpoint

FOLDERS = Path(__file__).parent / "task_folders"
DONE = {"role": "assistant", "content": "Done."}
sandboxed = pytest.mark.usefixtures("sandbox_here")


def task_folder(root, name="greeting", **files):
    """Return a folder with a copy of a task, in which files are replaced; their names have _ for / and __ for a dot."""
    shutil.copytree(FOLDERS / name, root / name)
    for key, text in files.items():
        path = root / name / key.replace("__", ".").replace("_", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return root


def played(folder, *actions, **options):
    """Return the environment and the steps of an episode of its only task."""
    tasks = Tasks(str(folder), **options)
    return tasks, checks.play(tasks, tasks.scenarios("train")[0], [*actions, DONE])


def shell(command):
    return call("shell", {"command": command})


@sandboxed
def test_each_solution_scores_1_and_doing_nothing_0():
    checks.check(lambda: Tasks(str(FOLDERS), heldout=0.3), few=2)
    tasks = Tasks(str(FOLDERS))
    assert [scenario.id for scenario in tasks.scenarios("heldout")] == ["stock"]
    for scenario in (scenario for split in checks.SPLITS for scenario in tasks.scenarios(split)):
        assert [checks.play(tasks, scenario, [DONE])[-1].info[name] for name in ("success", "reward")] == [False, 0.0]


@sandboxed
def test_some_of_several_rewards_is_no_success():
    tasks = Tasks(str(FOLDERS))
    [scenario] = tasks.scenarios("heldout")
    step = checks.play(tasks, scenario, [call("write", {"path": "report.json", "text": '{"value": 284}'}), DONE])[-1]
    assert (step.reward, step.info["success"], step.info["progress"]) == (0.5, False, 0.5)
    assert step.info["rewards"] == {"reward": 0.5, "value": 1.0, "most": 0.0}


@sandboxed
def test_files_stay_from_command_to_command_and_nothing_else_does(tmp_path):
    _, steps = played(
        task_folder(tmp_path),
        shell("mkdir -p sub && echo hello world > sub/a.txt; chmod +x sub/a.txt; X=1; sleep 300 & pwd"),
        shell("cat sub/a.txt; test -x sub/a.txt && echo executable; echo [$X]; ls /proc | grep -c '^[0-9]'"),
        call("edit", {"path": "sub/a.txt", "old": " world", "new": ""}),
        call("edit", {"path": "sub/a.txt", "old": "l", "new": "r"}),
        shell("find / -name 'solve.sh' -o -name test.sh 2>/dev/null; touch /x"),
        shell("mv sub/a.txt greeting.txt"),
    )
    said = [step.observation[0]["content"] for step in steps[:-1]]
    assert said[0] == "/app"
    assert said[1].splitlines()[:3] == ["hello world", "executable", "[]"]
    assert said[2:4] == ["replaced", "sub/a.txt contains the old text 2 times; expected once\n[exit code 1]"]
    assert said[4] == "touch: cannot touch '/x': Read-only file system\n[exit code 1]"
    assert steps[-1].info["success"]
    assert (steps[-1].info["commands"], steps[-1].info["failed_commands"]) == (6, 2)


@sandboxed
def test_a_command_has_limits(tmp_path):
    toml = "[agent]\ntimeout_sec = 2\n[environment]\nmemory_mb = 128\n"
    folder = task_folder(tmp_path, task__toml=toml)
    sleep = shell("echo kept >> kept.txt; sleep 60")
    _, steps = played(folder, sleep, sleep, shell("echo too late"), seconds=1.0)
    said = [step.observation[0]["content"] for step in steps[:-1]]
    assert said[0] == "[the command was ended: it took longer than 1 s]"
    assert said[2] == "error: the time for the task is used up; answer to end it"
    _, [step, *_] = played(folder, shell("python3 -c 'x = bytearray(10**9)'"))
    assert "MemoryError" in step.observation[0]["content"]
    _, [step, *_] = played(folder, shell("x" * 20_001))
    assert step.info["invalid_actions"] == 1


CHEATS = {
    "writes the reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
    "writes the tests": "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod +x /tests/test.sh",
    "links its folder to the tests": "cd /; rm -rf ~/work; ln -s ~/tests ~/work",
    "links files of its folder to the reward": "ln -s /logs/verifier/reward.txt greeting.txt; ln -s ../tests ../logs .",
    "leaves a process": "(sleep 1; echo hello > greeting.txt) &",
}


@sandboxed
@pytest.mark.parametrize("name", CHEATS)
def test_nothing_but_its_files_reaches_the_tests(tmp_path, name):
    _, steps = played(task_folder(tmp_path), shell(CHEATS[name]))
    assert (steps[-1].info["success"], steps[-1].info.get("problem")) == (False, None)


TESTS = {
    "writes outside of its folders": ("echo 1 > /usr/reward.txt", "wrote no reward to /logs/verifier (exit code 1): "),
    "takes too long": ("sleep 60", "the tests were ended: it took longer than 1 s"),
    "writes no number": ("echo good > /logs/verifier/reward.txt", "wrote 'good\\n' to reward.txt: could not convert"),
    "writes infinity": ("echo inf > /logs/verifier/reward.txt", "expected finite numbers"),
    "names no main reward": ('echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json', "with one named reward"),
    "writes text in JSON": ('echo \'{"reward": "1"}\' > /logs/verifier/reward.json', "expected finite numbers"),
}


@sandboxed
@pytest.mark.parametrize("name", TESTS)
def test_tests_that_fail_say_how(tmp_path, name):
    script, reason = TESTS[name]
    _, steps = played(task_folder(tmp_path, tests_test__sh=script, task__toml="[verifier]\ntimeout_sec = 1"))
    assert reason in steps[-1].info["problem"]
    assert not steps[-1].info["success"]
    if "outside" in name:
        assert "Read-only file system" in steps[-1].info["problem"]


@sandboxed
def test_a_task_that_is_done_before_it_begins_fails(tmp_path):
    folder = task_folder(tmp_path, tests_test__sh="echo 1 > /logs/verifier/reward.txt")
    with pytest.raises(EnvironmentFailed, match="task greeting: its tests succeed before anything is done"):
        played(folder)


REFUSED = {
    "several steps": ({"task__toml": '[[steps]]\nname = "a"'}, "task.toml: steps is for tasks of several steps"),
    "services": ({"task__toml": '[[environment.mcp_servers]]\nname = "a"'}, "mcp_servers needs services besides"),
    "a healthcheck": ({"task__toml": '[environment.healthcheck]\ncommand = "a"'}, "healthcheck needs services"),
    "a GPU": ({"task__toml": "[environment]\ngpus = 1"}, "environment.gpus needs hardware"),
    "a user": ({"task__toml": '[verifier]\nuser = "root"'}, "verifier.user names a user"),
    "a network": ({"task__toml": '[environment]\nnetwork_mode = "public"'}, "set environment.offline=true"),
    "tests elsewhere": (
        {"task__toml": '[verifier]\nenvironment_mode = "separate"'},
        "separate gives the tests an image",
    ),
    "artifacts as text": ({"task__toml": 'artifacts = "a"'}, "artifacts = 'a': expected a list"),
    "an image of the tests": ({"task__toml": "[verifier.environment]"}, 'set verifier.environment_mode = "shared"'),
    "a variable of this machine": ({"task__toml": '[verifier.env]\nKEY = "${KEY}"'}, "verifier.env.KEY = '${KEY}'"),
    "too many processors": ({"task__toml": "[environment]\ncpus = 4096"}, "environment.cpus = 4096: this machine has"),
    "Windows": ({"task__toml": '[environment]\nos = "windows"'}, "environment.os = windows: the sandbox has Linux"),
    "an unknown key": ({"task__toml": "[agent]\ntimeout = 3"}, "agent.timeout: no such key. Did you mean 'agent.time"),
    "text for a number": (
        {"task__toml": '[agent]\ntimeout_sec = "3"'},
        "timeout_sec = '3': expected a positive",
    ),
    "infinite memory": (
        {"task__toml": "[environment]\nmemory_mb = inf"},
        "memory_mb = inf: expected a positive number",
    ),
    "no number": ({"task__toml": "[agent]\ntimeout_sec = nan"}, "timeout_sec = nan: expected a positive number"),
    "no memory": ({"task__toml": "[environment]\nmemory_mb = 0.5"}, "memory_mb = 0.5: the sandbox needs at least 32"),
    "no name": ({"task__toml": '[environment.env]\n"A=B" = "c"'}, "env.A=B = 'c': expected the name of a variable"),
    "options of the sandbox": (
        {"task__toml": '[environment]\nworkdir = "/app\\u0000--bind\\u0000/\\u0000/host"'},
        "; expected one outside of the system's folders",
    ),
    "a zero byte": ({"environment_Dockerfile": "FROM ubuntu\nWORKDIR /app\0--bind"}, "it contains a zero byte"),
    "a variable without =": ({"environment_Dockerfile": "FROM ubuntu\nENV A b=c"}, "ENV A b=c: needs a container"),
    "a copy above": ({"environment_Dockerfile": "FROM ubuntu\nWORKDIR /app\nCOPY . ../b/"}, "COPY writes /b/Docker"),
    "no section": ({"task__toml": "agent = 3"}, "task.toml: agent = 3: expected a table"),
    "an open quote": ({"environment_Dockerfile": 'FROM ubuntu\nENV A="b'}, "cannot be read: No closing quotation"),
    "a copy without a source": ({"environment_Dockerfile": "FROM ubuntu\nCOPY a"}, "COPY a has no source"),
    "no TOML": ({"task__toml": "["}, "task.toml: is no TOML"),
    "an image": ({"environment_Dockerfile": "FROM node:22\nWORKDIR /app"}, "FROM node:22: needs a container image"),
    "packages": (
        {"environment_Dockerfile": "FROM ubuntu\nRUN apt-get update && \\\n  apt-get install -y git\nWORKDIR /app"},
        "RUN apt-get update &&    apt-get install -y git: needs a container image",
    ),
    "no folder": ({"environment_Dockerfile": "FROM ubuntu"}, "the working folder is /; expected one outside of"),
    "a folder of the system": ({"environment_Dockerfile": "FROM ubuntu\nWORKDIR /usr/app"}, "folder is /usr/app"),
    "a file elsewhere": ({"environment_Dockerfile": "FROM ubuntu\nWORKDIR /app\nCOPY . /b/"}, "COPY writes /b/Docker"),
    "a missing file": (
        {"environment_Dockerfile": "FROM ubuntu\nWORKDIR /app\nCOPY a ."},
        "COPY a: environment/ has",
    ),
    "several containers": ({"environment_docker-compose__yaml": "a"}, "environment/docker-compose.yaml is not supp"),
    "earlier messages": ({"trajectory__json": "{}"}, "trajectory.json is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_task_that_needs_more_than_the_sandbox_is_refused_with_the_reason(tmp_path, name):
    files, reason = REFUSED[name]
    task_folder(tmp_path, **files)
    with pytest.raises(SpecError) as error:
        Tasks(str(tmp_path))
    assert "environment.path: task greeting: " in str(error.value)
    assert reason in str(error.value)
    task_folder(tmp_path, "median")
    assert list(Tasks(str(tmp_path), unsupported="skip")._tasks) == ["median"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_refused(tmp_path):
    (task_folder(tmp_path) / "greeting/task.toml").chmod(0)
    with pytest.raises(SpecError, match="Permission denied"):
        Tasks(str(tmp_path))


def test_a_folder_without_tasks_is_refused(tmp_path):
    with pytest.raises(ResourceError, match="contains no task; expected a folder of tasks"):
        Tasks(str(tmp_path))


def test_a_dockerfile_places_files_as_docker_does(tmp_path):
    lines = ["FROM python:3.12-slim", "WORKDIR /app/in", "COPY a.txt \\", " # a comment", " sub/ ./data/"]
    lines += ["ENV A=1 B='x y'", "COPY a.txt b.txt", 'COPY ["sub/c.txt", "."]', "COPY s*.md /app/", "WORKDIR /app"]
    task_folder(tmp_path)
    for name, text in {"Dockerfile": "\n".join(lines), "a.txt": "a", "sub/c.txt": "c", "some.md": "s"}.items():
        path = tmp_path / "greeting/environment" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    [task] = read_tasks(str(tmp_path))
    with tarfile.open(fileobj=io.BytesIO(task.work)) as tar:
        names = tar.getnames()
    assert names == [
        "work",
        *(f"work/{name}" for name in ("in/b.txt", "in/c.txt", "in/data/a.txt", "in/data/c.txt", "some.md")),
    ]
    assert (task.workdir, task.variables) == ("/app", {"A": "1", "B": "x y"})


def test_stage_keys_follow_the_content_of_the_folder(tmp_path):
    def key(folder):
        data = {"_target_": "components.environments.tasks.environment.Tasks", "path": str(folder)}
        return json.dumps(validate(Target, data).resolved())

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = task_folder(tmp_path / "a"), task_folder(tmp_path / "b")
    assert key(first) == key(second)
    (second / "greeting/tests/test.sh").write_text("echo")
    assert key(first) != key(second)
    assert str(tmp_path) not in key(first)


PROGRAMS = {
    "does the task": ("open('/app/greeting.txt', 'w').write('hello')", None),
    "finds no tests": (
        "import os, pathlib\nassert not [*pathlib.Path('{folder}').rglob('*')]\nassert not os.path.exists('/tests')"
        "\nopen('greeting.txt', 'w').write('hello')",
        None,
    ),
    "takes longer than the task allows": ("import time\ntime.sleep(600)", "longer than its task allows, 5 s"),
    "leaves too many files": ("open('big', 'wb').write(bytes(80 << 20))", "80 MB of files; the limit is 64 MB"),
}


@sandboxed
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_works_in_the_folder_of_the_task(tmp_path, name):
    code, reason = PROGRAMS[name]
    folder = task_folder(tmp_path, task__toml="[agent]\ntimeout_sec = 5")
    code = f"ask()\n{code.replace('{folder}', str(FOLDERS))}"
    tasks = Tasks(str(folder if reason else FOLDERS))
    with endpoint(Parrot(), CommandAgent(python(code))) as (own, _, _):
        scenarios = [*tasks.scenarios("train")][:1]
        [trajectory] = collect(Parrot(), lambda: tasks, scenarios, player=Player(own), group_size=1, timeout=120.0)
    if reason is None:
        assert (trajectory.failure, trajectory.success) == (None, True), trajectory.outcome
    else:
        assert reason in (trajectory.failure.message if trajectory.failure else trajectory.outcome["problem"])
    assert not list(Path(tempfile.gettempdir()).glob("espalier-task-*"))


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    [task] = read_tasks(str(FOLDERS / "greeting"))
    code = f"""
import os, signal, tempfile
from components.environments.tasks.folder import read_tasks
from components.environments.tasks.host_folder import HostFolder
tempfile.tempdir = {str(tmp_path)!r}
folder = HostFolder(read_tasks({str(FOLDERS / "greeting")!r})[0].work)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    [left] = tmp_path.iterdir()
    first, second = HostFolder(task.work), HostFolder(task.work)
    assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 2, "one in use stays"
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_too_deep_is_a_problem_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = HostFolder(read_tasks(str(FOLDERS / "greeting"))[0].work)
    code = "import os\nfor _ in range(1500):\n    os.mkdir('a')\n    os.chdir('a')\nos.chmod('.', 0)"
    subprocess.run([sys.executable, "-c", code], cwd=folder.path, check=True)
    assert folder.packed(64) == (b"", "the program left too many folders in each other")
    folder.close()
    assert list(tmp_path.iterdir()) == []


@sandboxed
def test_the_variables_of_a_task_are_the_programs_and_not_the_sandboxs(tmp_path):
    """LD_PRELOAD could load a library into bubblewrap, outside of the sandbox."""
    toml = '[environment.env]\nTHEIR_VARIABLE = "a"\nOPENAI_API_KEY = "theirs"'
    code = "import os\nassert os.environ['THEIR_VARIABLE'] == 'a' and os.environ['OPENAI_API_KEY'] != 'theirs'\nask()\n"
    code += (
        "first = open('/proc/1/environ').read()\nassert 'OPENAI_API_KEY' in first and 'THEIR_VARIABLE' not in first\n"
    )
    code += "open('greeting.txt', 'w').write('hello')"
    tasks = Tasks(str(task_folder(tmp_path / "tasks", task__toml=toml)))
    with endpoint(Parrot(), CommandAgent(python(code))) as (own, _, _):
        [trajectory] = collect(
            Parrot(), lambda: tasks, tasks.scenarios("train"), player=Player(own), group_size=1, timeout=120.0
        )
    assert (trajectory.failure, trajectory.success) == (None, True), trajectory.outcome


def test_a_program_is_refused_before_work_where_it_cannot_do_the_task(tmp_path):
    task_folder(tmp_path, "median")
    task_folder(tmp_path, task__toml="[environment]\nallow_internet = false")
    run = ["+experiment=smoke", "agent=command", "warmup=none", "collect.scenarios=1", "evaluate.scenarios=1"]
    alone = [*run, "environment=tasks", f"environment.path={tmp_path}"]
    files = f"{{_target_: {Tasks.__module__}.Tasks, path: {tmp_path}}}"
    mixed = [*run, "environment=mixture", f"+environment.environments.files={files}"]
    for lines, reason in (
        (alone, "environment.path: task greeting: task.toml: environment.network_mode = no-network, but a program of"),
        (mixed, "environment.environments.files: its tasks are files, and agent.command does not get their folder in"),
    ):
        with pytest.raises(SpecError, match=f"1 problem in the configuration:\n  - {reason}"):
            compose(lines)
    (tmp_path / "greeting/task.toml").write_text("")
    assert compose(alone).agent.command


HARBOR = os.environ.get("HARBOR", "")
READ_BY_HARBOR = """
import json, shutil, sys, typing
from pathlib import Path
import typing_extensions
typing.override = typing_extensions.override  # Harbor needs Python 3.12; its reader does not
import harbor
from harbor.models.task import config
from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import resolve_task_verifier_mode

def settings(model, prefix=""):
    return {prefix + name: getattr(model, name) for name in type(model).model_fields}

tasks = {}
for folder in sorted(Path(sys.argv[1]).glob("*/task.toml")):
    task = Task(folder.parent)
    sections = {name: getattr(task.config, name) for name in ("agent", "verifier", "environment", "solution")}
    values = settings(task.config)
    for name, section in sections.items():
        del values[name]
        values |= settings(section, f"{name}.")
    tasks[folder.parent.name] = [Task.is_valid_dir(folder.parent), task.instruction, values]
for text in json.loads(sys.argv[3]):
    mode = resolve_task_verifier_mode(config.TaskConfig.model_validate_toml(text))
    assert mode == config.VerifierEnvironmentMode.SEPARATE, text
templates = Path(harbor.__file__).parent / "cli"
for name in ("template-task", "template-adapter/task-template"):
    shutil.copytree(templates / name, Path(sys.argv[2], name.partition("/")[0]))
print(json.dumps(tasks, default=lambda value: getattr(value, "value", None) or value.model_dump()))
"""


@pytest.mark.skipif(not HARBOR, reason="HARBOR names no folder with Harbor's package; run `make test-harbor`")
def test_harbor_reads_the_same(tmp_path):
    """Keys, values and defaults. A task of its template needs tests, and one of its adapters an image."""
    variables = {**os.environ, "PYTHONPATH": HARBOR}
    separate = [REFUSED[name][0]["task__toml"] for name in ("tests elsewhere", "an image of the tests")]
    command = [sys.executable, "-c", READ_BY_HARBOR, str(FOLDERS), str(tmp_path), json.dumps(separate)]
    theirs = json.loads(subprocess.run(command, env=variables, capture_output=True, check=True, text=True).stdout)
    ours = {task.name: task for task in read_tasks(str(FOLDERS))}
    assert theirs.keys() == ours.keys()
    for name, (valid, instruction, values) in theirs.items():
        assert valid
        assert instruction == ours[name].instruction
        values.pop("environment.allow_internet")
        assert values.keys() == KEYS.keys()
        stated = values.pop("environment.network_mode"), ours[name].settings["environment.network_mode"]
        assert stated in (("public", None), ("no-network", "no-network")), "unlike in Harbor, none is the default"
        read = {key: value for key, value in ours[name].settings.items() if key in values and value is not None}
        assert read == {key: values[key] for key in read}
        assert all(values[key] in (None, [], {}, "1.4", 600.0, "linux") for key in values.keys() - read.keys())
    with pytest.raises(SpecError, match="RUN apt-get update && apt-get install -y"):
        read_tasks(str(tmp_path / "template-adapter"))
    assert read_tasks(str(tmp_path / "template-task"))[0].workdir == "/app"
