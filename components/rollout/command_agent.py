"""A program as the agent of an episode, such as a coding agent: `agent.command`.

The program gets the environment's first messages in place of `{instruction}`, and the endpoint in the variables that
OpenAI's and Anthropic's clients read. What it writes to standard output is its answer, which the environment scores
with one step. An environment with a `workspace` (`components.environments.protocol.Workspace`) scores the files there.

Bubblewrap gives it a process namespace of its own, so no process outlives it, and a read-only file system except for
its working folder and `/tmp`, which is in memory. It has the network, which it needs for the endpoint, no variables of
this process but PATH, and may read what this user may read, except for the usual places of credentials (SECRETS) and
folders that the environment hides. Its memory and its number of processes are not limited. Its paths are the same in
every episode, because prompts contain them.

An episode fails if the program is not finished in time, ends with an error, writes more than OUTPUT_BYTES, or never
calls the model; after a call that was refused at a limit it is truncated (`components.rollout.own_agent`).
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import subprocess
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

from components.aio import in_thread
from components.environments.protocol import Environment, WorkFolder, Workspace
from components.errors import AgentError, ResourceError
from components.sandbox import bubblewrap
from components.sandbox.watch import owner_options
from components.trajectories.schema import Scenario

OUTPUT_BYTES = 4 << 20
"""Maximum size of standard output and standard error together."""
INSTRUCTION, MODEL, URL = "{instruction}", "{model}", "{base_url}"
"""Texts of the command that each episode replaces."""
FOLDER, USER = "/tmp/work", "/tmp/home"
"""Working folder, unless the environment has another path for it, and home of the program."""
SECRETS = (
    *(".ssh", ".gnupg", ".netrc", ".git-credentials", ".pypirc", ".npmrc", ".yarnrc.yml", ".docker", ".kube"),
    *(".aws", ".azure", ".config/gcloud", ".sky", ".oci", ".config/gh", ".kaggle", ".local/share/keyrings"),
    *(".cache/huggingface/token", ".cache/huggingface/stored_tokens", ".claude", ".claude.json", ".codex", ".gemini"),
    *(".qwen", ".local/share/opencode", ".config/mini-swe-agent"),
)
"""Usual places of credentials in the home of this user, which the program cannot read."""
_LONGEST_WORD = (128 << 10) - 1
"""Maximum bytes of an argument of a program (MAX_ARG_STRLEN of Linux), without the zero byte at its end."""
_CHUNK = 1 << 16


class CommandAgent:
    """The program as a function for `OwnAgent`. Raises ResourceError if it or the sandbox is missing."""

    requires_calls = True

    def __init__(self, command: Sequence[str]):
        bubblewrap.check()
        self._command = list(command)
        for index in {0, _after_variables(command)}:
            self._command[index] = _installed(command[index])

    async def __call__(
        self, scenario: Scenario, environment: Environment, base_url: str, api_key: str, model: str
    ) -> dict[str, Any]:
        """Play the episode; return its outcome with the environment's reward."""
        messages = await _result(lambda: environment.reset(scenario))
        instruction = "\n\n".join(str(message["content"]) for message in messages)
        values = {INSTRUCTION: instruction, MODEL: model, URL: base_url}
        variables = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": USER,
            "TMPDIR": "/tmp",
            "LANG": "C.UTF-8",
            "NO_PROXY": "127.0.0.1,localhost",
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_BASE": base_url,
            "OPENAI_API_KEY": api_key,
            "OPENAI_MODEL": model,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
            "ANTHROPIC_MODEL": model,
        }
        folder = environment.workspace if isinstance(environment, Workspace) else None
        answer = await _run([_filled(word, values) for word in self._command], folder, variables)
        step = await _result(lambda: environment.step({"role": "assistant", "content": answer}))
        return {"reward": step.reward, **step.info}


def _after_variables(command: Sequence[str]) -> int:
    """Return the index of the program in `env NAME=VALUE ... PROGRAM ...`; 0 in other commands."""
    if os.path.basename(command[0]) != "env":
        return 0
    index = next((index for index, word in enumerate(command) if index and "=" not in word), 0)
    return 0 if command[index].startswith("-") else index


def _installed(program: str) -> str:
    """Return the path of a program. Raises ResourceError if it cannot be executed in the sandbox."""
    path = shutil.which(program)
    if path is None:
        wrong = "is no program on the PATH, or not executable"
    elif (path := os.path.abspath(path)).startswith("/tmp/"):
        wrong = "is below /tmp, which the sandbox replaces"
    else:
        return path
    raise ResourceError(f"agent.command: {program!r} {wrong}; expected an installed program, or its path")


def _filled(word: str, values: dict[str, str]) -> str:
    """Return a word of the command. The instruction is filled in last, as it may contain the other texts. Raises
    AgentError if the operating system cannot pass it to a program."""
    for name in (MODEL, URL, INSTRUCTION):
        word = word.replace(name, values[name])
    if (size := len(word.encode(errors="replace"))) > _LONGEST_WORD:
        raise AgentError(
            f"an argument of agent.command has {size} bytes, after {INSTRUCTION} is replaced by the "
            f"environment's messages; expected at most {_LONGEST_WORD}"
        )
    if "\0" in word:
        raise AgentError("the environment's messages contain a zero byte, which no argument of a program can have")
    return word


async def _result(method: Callable[[], Any]) -> Any:
    """Return the result of an environment's method, which may be synchronous or `async`."""
    result = await in_thread(method)
    return await result if inspect.isawaitable(result) else result


async def _run(command: list[str], folder: WorkFolder | None, variables: dict[str, str]) -> str:
    """Run the program in its sandbox; return its standard output. Raises CalledProcessError if it fails, AgentError if
    it writes too much or takes longer than its task allows. `OwnAgent` kills it if it has not ended."""
    process = await asyncio.create_subprocess_exec(
        *_sandbox(folder, variables),
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=variables,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    written = 0

    async def read(stream: asyncio.StreamReader) -> bytes:
        nonlocal written
        chunks = []
        while chunk := await stream.read(_CHUNK):
            chunks.append(chunk)
            written += len(chunk)
            if written > OUTPUT_BYTES:
                raise AgentError(f"the program of agent.command wrote more than {OUTPUT_BYTES} bytes of output")
        return b"".join(chunks)

    limit = folder.seconds if folder is not None else None
    try:
        async with asyncio.timeout(limit):
            out, errors = await asyncio.gather(read(process.stdout), read(process.stderr))
            await process.wait()
    except TimeoutError:
        raise AgentError(f"the program of agent.command took longer than its task allows, {limit} s") from None
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, [os.path.basename(command[0])], out, errors)
    return out.decode(errors="replace").strip()


def _sandbox(folder: WorkFolder | None, variables: Container[str]) -> list[str]:
    """Return the start of the command line: bwrap with its options. folder: the working folder; None for an empty one
    that ends with the program. variables: those that the folder's do not replace."""
    options = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
    options += ["--new-session", "--cap-drop", "ALL"]
    at = FOLDER if folder is None else folder.at
    for path in Path("/").iterdir():  # not as a whole: the working folder may be a new one at the top
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.name not in ("dev", "proc", "tmp", Path(at).parts[1]):
            options += ["--ro-bind", str(path), str(path)]
    options += ["--dev", "/dev", "--proc", "/proc"]
    for path in filter(Path.exists, ((Path.home() / name).resolve() for name in SECRETS)):
        options += ["--tmpfs", str(path)] if path.is_dir() else ["--ro-bind", "/dev/null", str(path)]
    for name, value in () if folder is None else folder.variables.items():  # not bwrap's own, such as LD_PRELOAD
        options += ["--setenv", name, value] if name not in variables else []
    for path in () if folder is None else folder.hidden:
        options += ["--tmpfs", str(path)]
    options += ["--tmpfs", "/tmp", "--dir", USER]
    options += ["--dir", at] if folder is None else ["--bind", str(folder.path), at]
    return ["bwrap", *owner_options(), *options, "--remount-ro", "/", "--chdir", at, "--"]
