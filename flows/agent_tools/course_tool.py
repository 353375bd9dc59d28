"""Tool of HelloAgents' course for an agent: `rl_training` of the MCP server, if the operator offers it (`--course`).

With `--course show` a training or an evaluation is shown as a command that only the operator can run; with
`--course run` it runs in the background. The agent chooses a model, a dataset and names of outputs, which are folders
below `ROOT/course`; URLs and paths are refused. A file of questions that the operator puts there is a dataset by its
name. The operator's overrides of compute, inference, store, tracking and allow hold for each run.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from components.errors import EspalierError, Problem, SpecError
from components.redaction import mask_text
from components.specs import Spec
from flows.agent_tools.course import (
    MARK,
    DatasetRequest,
    EvaluateRequest,
    RewardRequest,
    RLTrainingTool,
    TrainRequest,
)
from flows.agent_tools.jobs import Jobs
from flows.agent_tools.permissions import Permissions
from flows.agent_tools.tools import EARLY

Mode = Literal["show", "run"]
Parameters = Annotated[
    DatasetRequest | RewardRequest | TrainRequest | EvaluateRequest, Field(discriminator="action", description="action")
]
_OUTPUT = re.compile(r"[A-Za-z0-9][\w.-]{0,95}")
_HUB = re.compile(rf"{_OUTPUT.pattern}(/{_OUTPUT.pattern})?")
_EXPECTED = {
    "model_name": (_HUB, "an option of conf/model, ORG/NAME of the hub, or the output_dir of an earlier training"),
    "dataset": (_HUB, "ORG/NAME of the hub, or a file below ROOT/course"),
    "output_dir": (_OUTPUT, "a name without a path"),
    "model_path": (_OUTPUT, "the output_dir of an earlier training"),
}


_PLACES = ("allow", "compute", "inference", "store", "tracking")
"""Sections of the operator's overrides that hold for the runs of the tool, too: where and with what they compute."""


class CourseTool:
    """The tool of one server. overrides: of the operator's command line."""

    def __init__(self, permitted: Permissions, jobs: Jobs, mode: Mode, overrides: list[str]):
        self._permitted, self._jobs, self._mode = permitted, jobs, mode
        self._overrides = [line for line in overrides if re.split(r"[.=]", line)[0] in _PLACES]
        self._tool = RLTrainingTool(permitted.root, self._overrides)

    async def rl_training(self, parameters: Parameters) -> dict[str, Any]:
        """Load a dataset of questions, create a reward, train a model by SFT or GRPO, or evaluate it: the tool of
        HelloAgents' course. A training or an evaluation returns an id for status and stop, or the command that the
        operator can run."""
        data = self._checked(parameters)
        if not isinstance(parameters, TrainRequest | EvaluateRequest):
            return dict(json.loads(await asyncio.to_thread(self._tool.run, data)))
        command = await asyncio.to_thread(self._tool.show, data)
        if self._mode == "show":
            return {"state": "not started: the operator can run the experiment", "experiment": command}
        arguments = [json.dumps(data), *self._overrides, f"root={self._permitted.root}"]
        job = self._jobs.start("agent_tools.course", "course", arguments, self._permitted.root)
        await job.wait(EARLY)
        if (error := job.error()) is not None:
            raise EspalierError(error)
        return {"id": job.id, "state": job.state, "experiment": command}

    def _checked(self, parameters: Spec) -> dict[str, Any]:
        """Return the parameters with the folders of their outputs. Raises SpecError for a path or a URL."""
        data = {**parameters.model_dump(exclude_unset=True), "action": getattr(parameters, "action")}  # noqa: B009
        problems = []
        for key, (form, expected) in _EXPECTED.items():
            value = data.get(key)
            if value is None:
                continue
            if not form.fullmatch(value) or (key in ("model_name", "dataset") and Path(value).exists()):
                problems.append(Problem(key, mask_text(f"{value!r:.99}: expected {expected}")))
            folder = self._permitted.root / "course" / value
            own = key in ("output_dir", "model_path") or (folder / MARK if key == "model_name" else folder).is_file()
            data[key] = str(folder) if own else value
        if problems:
            raise SpecError(problems)
        return data
