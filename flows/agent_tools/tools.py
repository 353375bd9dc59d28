"""Tools that the MCP server offers: what each does, and the flags of the command that it runs.

The docstrings of the tools are their descriptions, which a model reads. An error of a command becomes the error of the
tool, with the command's message.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from components.errors import EspalierError, ResourceError
from components.redaction import MASK, is_secret, mask
from flows.agent_tools import permissions
from flows.agent_tools.commands import result_of
from flows.agent_tools.jobs import Job, Jobs
from flows.agent_tools.permissions import Permissions
from flows.history.records import Records, RunRecord
from flows.terminal.exit_codes import describe_error
from flows.terminal.help import CONF, experiment_summaries

EARLY = 10.0
"""Seconds that a started job is watched for an error before its id is returned."""
LONGEST_WAIT = 300.0
"""Maximum seconds that `status` waits."""
LOG_LINES = 200
"""Maximum number of lines of a log in an answer."""

Experiment = Annotated[str, Field(description="name of an experiment of list_experiments")]
Overrides = Annotated[
    list[str],
    Field(description="settings as key=value, such as rounds=2; list_experiments names the keys that may be set"),
]
JobId = Annotated[str, Field(description="id of a run or an evaluation, as run and evaluate return it")]
Answer = Literal["yes", "no"]


class Circumstances(BaseModel):
    """Data, environment, judge and machines to train with."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    environment: Annotated[str | None, Field(pattern=r"^[a-z0-9_]{1,60}$")] = None
    """Environment: an option of conf/environment, mcp for the tools of an MCP server, or none."""
    success: Answer | None = None
    """Does the environment report success?"""
    sparse: Answer | None = None
    """Are episodes long, and successes rare?"""
    slow: Answer | None = None
    """Does collecting episodes take as long as training?"""
    labels: Annotated[int | None, Field(ge=0)] = None
    """Number of demonstrations."""
    preferences: Annotated[int | None, Field(ge=0)] = None
    """Number of preferences."""
    form: Literal["pairs", "thumbs", "ranked"] | None = None
    """Form of the preferences."""
    judge: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./:-]{0,120}$")] = None
    """Can a language model judge? yes, no, or PROVIDER/MODEL."""
    teacher: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?$")] = None
    """Larger model to learn from: its name on the hub."""
    goal: Literal["simple", "regularized", "reasoning", "self-improvement"] | None = None
    """Property of the method that matters most."""
    compute: Literal["cpu", "gpu", "cluster"] | None = None
    tight: Answer | None = None
    """Does the model hardly fit the GPU memory?"""

    def flags(self) -> list[str]:
        """Return the flags of flows.advise."""
        values = self.model_dump(exclude_none=True)
        form = values.pop("form", None)
        return [*(f"--{name}={value}" for name, value in values.items()), *([f"--{form}"] if form else [])]


class Tools:
    """Tools of one server."""

    def __init__(self, permitted: Permissions, jobs: Jobs):
        self._permitted, self._jobs = permitted, jobs

    def all(self) -> list[Callable[..., Awaitable[dict[str, Any]]]]:
        """Return the tools, whose errors are raised as EspalierError."""
        return [
            self.list_experiments,
            self.advise,
            self.plan,
            self.run,
            self.status,
            self.stop,
            self.evaluate,
            self.compare,
        ]

    async def list_experiments(self) -> dict[str, Any]:
        """List the experiments that can be run: description, duration, and the keys that overrides may set, with their
        current values."""
        from flows.experiment.config_tree import ConfigTree

        experiments = []
        for name, spec in self._permitted.specs.items():
            folder = self._permitted.config_dir
            summary = experiment_summaries([folder, CONF] if folder else [CONF]).get(name)
            data = spec.model_dump(mode="json", by_alias=True)
            tree = ConfigTree(folder)
            groups = [key for key in spec.serve.overrides if tree.is_group(key.partition("@")[0])]
            experiments.append(
                {
                    "name": name,
                    "description": summary.description if summary else "",
                    "takes": summary.takes if summary else "",
                    "settings": {
                        key: "(an option of this group)" if key in groups else _value(data, key)
                        for key in spec.serve.overrides
                    },
                }
            )
        return {"experiments": experiments}

    async def advise(self, circumstances: Circumstances) -> dict[str, Any]:
        """Advise a training method for the data, environment, judge and machines that exist: method, reason, and a
        command for the operator. A command whose experiment is offered can be run by the tool run."""
        return await result_of("advise", circumstances.flags())

    async def plan(self, experiment: Experiment, overrides: Overrides = []) -> dict[str, Any]:  # noqa: B006  a schema's default
        """Show what a run would do, without running it: each stage, cached or not and why, expected seconds and
        cost."""
        return await result_of("plan", await self._arguments(experiment, overrides))

    async def run(self, experiment: Experiment, overrides: Overrides = []) -> dict[str, Any]:  # noqa: B006  a schema's default
        """Start a training run in the background; return its id for status, stop, evaluate and compare. Equal stages of
        earlier runs come from the cache, and an interrupted run resumes where it stopped."""
        return await self._start("run", experiment, await self._arguments(experiment, overrides))

    async def status(
        self,
        id: JobId,
        wait_seconds: Annotated[float, Field(ge=0, le=LONGEST_WAIT, description="wait for the end, at most")] = 0,
        log_lines: Annotated[int, Field(ge=0, le=LOG_LINES, description="number of last lines of the log")] = 20,
    ) -> dict[str, Any]:
        """Show a run or an evaluation: state (running, finished, failed, stopped), round, stages, decisions, result,
        and the last lines of its log."""
        job = self._jobs.get(id)
        await job.wait(wait_seconds)
        return await self._status(job, log_lines)

    async def stop(self, id: JobId) -> dict[str, Any]:
        """Stop a run or an evaluation with all its processes. Finished work is saved; the same run resumes there."""
        job = self._jobs.get(id)
        job.end()
        await job.wait(LONGEST_WAIT)
        return await self._status(job, 20)

    async def evaluate(
        self,
        experiment: Experiment,
        policies: Annotated[
            list[str],
            Field(
                min_length=1,
                max_length=16,
                description="base (untrained), random, solver, RUN (its final policy) or RUN@ROUND; the first is the "
                "baseline",
            ),
        ],
        samples: Annotated[int, Field(ge=1, le=100, description="episodes per scenario, for pass@k")] = 1,
        overrides: Overrides = [],  # noqa: B006  a schema's default
    ) -> dict[str, Any]:
        """Start a comparison of policies on the same held-out scenarios in the background; return its id. Its result,
        in status, has success with intervals and paired differences to the baseline."""
        names = [self._policy(policy) for policy in policies]
        own = [f"policies=[{','.join(names)}]", f"samples={samples}"]
        arguments = [*await self._arguments(experiment, overrides), *own, "--json"]
        return await self._start("evaluate", experiment, arguments)

    async def compare(
        self,
        runs: Annotated[
            list[str], Field(min_length=2, max_length=26, description="ids of runs; the first is the baseline")
        ],
    ) -> dict[str, Any]:
        """Compare runs: differences of the configuration, held-out results with 95 % intervals, paired differences to
        the first run, time and cost by stage."""
        names = [self._run(run) for run in runs]
        return await result_of("compare", [*names, f"root={await asyncio.to_thread(self._root_of, names)}"])

    async def _arguments(self, experiment: str, overrides: list[str]) -> list[str]:
        return await asyncio.to_thread(self._permitted.arguments, experiment, overrides)

    async def _start(self, name: str, experiment: str, arguments: list[str]) -> dict[str, Any]:
        job = self._jobs.start(name, experiment, arguments, self._permitted.root_of(experiment))
        end = asyncio.get_running_loop().time() + EARLY
        while not job.begun and asyncio.get_running_loop().time() < end:
            await job.wait(0.2)
        if (error := job.error()) is not None:
            raise EspalierError(error)
        return {"id": job.id, "state": job.state}

    async def _status(self, job: Job, log_lines: int) -> dict[str, Any]:
        state = job.state
        data: dict[str, Any] = {"id": job.id, "command": job.name, "state": state, "seconds": round(job.seconds, 1)}
        if records := await asyncio.to_thread(records_of, job):
            data["run"] = progress(records[0], Records(job.root))
            if len(records) > 1:  # a sweep
                data["runs"] = [progress(record, Records(job.root)) for record in reversed(records)]
        if (error := job.error()) is not None:
            data["error"] = error
        return {**data, "result": job.result(), "log": job.log(log_lines)}

    def _run(self, text: str) -> str:
        """Return the reference to a run, or the run of a job."""
        job = self._jobs.find(text)
        return run_of(job) if job is not None else permissions.run_name(text)

    def _root_of(self, runs: list[str]) -> Path:
        """Return the folder that has all of these runs; if none has them, that of the first experiment."""
        for root in self._permitted.roots:
            with contextlib.suppress(ResourceError):
                for run in runs:
                    Records(root).get(run)
                return root
        return self._permitted.root

    def _policy(self, text: str) -> str:
        """Return the name of a policy for flows.evaluate."""
        name, step = permissions.policy_name(text)
        return f"{self._run(name)}{step}"


def reporting_errors(
    tool: Callable[..., Awaitable[dict[str, Any]]], error_type: type[Exception]
) -> Callable[..., Awaitable[dict[str, Any]]]:
    """Return the tool with masked answers, whose EspalierErrors are raised as `error_type` with their message."""

    @functools.wraps(tool)
    async def reported(**arguments: Any) -> dict[str, Any]:
        try:
            return dict(masked(await tool(**arguments)))
        except EspalierError as error:
            raise error_type(masked(_message(error))) from None

    return reported


def _message(error: EspalierError) -> str:
    if type(error) is EspalierError:
        return str(error)
    described = describe_error(error)
    assert described is not None
    return described[0]


def _value(data: Any, key: str) -> Any:
    """Return the value of a dotted key; None where the configuration does not have it."""
    for name in key.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


SHORTEST = 6
"""Minimum length of a masked value of an environment variable in characters."""


def masked(answer: Any) -> Any:
    """Return the answer with masked secrets: those that their key or format shows, and the values of environment
    variables whose name denotes a secret."""
    secrets = [value for name, value in os.environ.items() if is_secret(name) and len(value) >= SHORTEST]
    return _without(mask(answer), sorted(secrets, key=len, reverse=True))


def _without(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, MASK)
        return value
    if isinstance(value, dict):
        return {_without(key, secrets): _without(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without(item, secrets) for item in value]
    return value


def records_of(job: Job) -> list[RunRecord]:
    """Return the records of a job's runs, latest first: several of a sweep, none before the first run and of an
    evaluation."""
    process = f"process {job.pid} on {socket.gethostname()}"
    return [run for run in Records(job.root).all() if run.process == process and run.started >= job.started - 1]


def run_of(job: Job) -> str:
    """Return the id of a job's run. Raises ResourceError if it has none."""
    if records := records_of(job):
        return records[0].id
    result = job.result()
    if result is not None and isinstance(result.get("run_id"), str):
        return str(result["run_id"])  # nothing has changed since that run
    raise ResourceError(f"{job.id} has no run to compare: it is {job.state}")


def progress(run: RunRecord, records: Records) -> dict[str, Any]:
    """Return the progress of a run as JSON data."""
    data: dict[str, Any] = {
        "run": run.id,
        "experiment": run.name,
        "seed": run.seed,
        "state": records.status(run),
        "round": max((stage.step for stage in run.stages), default=0),
        "rounds": run.spec.get("rounds"),
        "stages": {stage.label: f"{stage.status}, {stage.seconds:.1f} s" for stage in run.stages},
        "decisions": [{"kind": notice.kind, "round": notice.step, "message": notice.message} for notice in run.notices],
        "result": run.result,
    }
    masked: dict[str, Any] = mask(data)
    return masked
