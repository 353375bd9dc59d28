"""Shared parts of the commands on influence: a recorded run, further stages below its root, and gradients.

Further stages are ordinary stages with keys of their own: they come from the cache if they exist, and resume if they
were interrupted. They are not added to the record of the run. Gradients are computed in the process of the command and
are not stored.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from components.artifacts import Artifact
from components.errors import Problem, ResourceError, SpecError
from components.specs import Target
from flows.execution.executor import Execution
from flows.experiment.recorded import recorded_experiment
from flows.experiment.requests import Requests
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Records, RunRecord
from flows.stages.base import Context, Request
from flows.stages.execute import find_stage, resolve
from flows.terminal.console import Console, hush, logging_to
from flows.terminal.interrupt import Interruption

if TYPE_CHECKING:
    from components.algorithms.trainer import GroupGradients
    from components.trajectories.schema import Trajectory


@dataclass(frozen=True)
class Workplace:
    """Recorded run, and the execution of further stages."""

    run: RunRecord
    spec: ExperimentSpec
    """Experiment of the run, with the root of this machine."""
    context: Context
    execution: Execution

    @property
    def requests(self) -> Requests:
        """Requests of the stages of the run's experiment."""
        generated = next((stage for stage in self.run.stages if stage.request["stage"] == "generate"), None)
        return Requests(self.spec, self.require(generated.key, "the tasks") if generated else None)

    def artifact(self, key: str | None, name: str) -> Artifact | None:
        """Return `require`; None for the key None."""
        return None if key is None else self.require(key, name)

    def require(self, key: str, name: str) -> Artifact:
        """Return an artifact. name: its part in the run, for the error. Raises ResourceError if it is no longer in the
        store."""
        artifact = self.context.store.find(key)
        if artifact is None:
            raise ResourceError(
                f"{name} of run {self.run.short} ({key[:12]}) is no longer in {self.context.store}; run it again"
            )
        return artifact

    def stage(self, label: str, request: Request, step: int = 0) -> Artifact:
        """Return the artifact of a stage, computed or from the cache."""
        return self.execution.artifact(label, step, request)

    def evaluated(self, label: str, policy: Artifact | None) -> list[Trajectory]:
        """Return the held-out episodes of a policy, evaluated as in the run."""
        return _episodes(self.stage(f"evaluate[{label}]", self.requests.evaluate(policy)))

    def evaluated_before(self, policy: str | None) -> list[Trajectory] | None:
        """Return the held-out episodes of a policy if they are in the store, else None. policy: key of its
        checkpoint; None: the base model."""
        checkpoint = self.context.store.find(policy) if policy else None
        if policy and checkpoint is None:
            return None
        evaluation = find_stage(self.requests.evaluate(checkpoint), self.context)
        return None if evaluation is None else _episodes(evaluation)

    @contextmanager
    def gradients(self, request: Request) -> Iterator[GroupGradients]:
        """Provide the gradients of the groups of a training, at the policy that it starts from."""
        from components.algorithms.train import group_gradients
        from flows.stages.train import TrainStage, training_request

        _, spec, inputs, key = resolve(request, self.context)
        assert isinstance(spec, TrainStage)
        with tempfile.TemporaryDirectory(prefix=".gradients-", dir=self.spec.root) as folder:
            scratch = Path(folder)
            context = replace(self.context, key=key, seed=request.seed, scratch=scratch)
            training, _ = training_request(spec, inputs, scratch / "out", context)
            with group_gradients(spec.algorithm, training) as gradients:
                yield gradients


def _episodes(evaluation: Artifact) -> list[Trajectory]:
    from components.trajectories.store import load_scored

    folder = evaluation.path
    return load_scored(folder / "trajectories.parquet", folder / "scores.parquet", None)


def recorded_run(root: Path, reference: str, trust: bool = False) -> tuple[RunRecord, ExperimentSpec]:
    """Return a run and its experiment. Raises ResourceError if there is no such run, and SpecError if its settings
    reach out of it and are not trusted."""
    if not root.is_dir():
        raise ResourceError(f"root={root}: the folder does not exist; expected the folder of your runs")
    run = Records(root).get(reference)
    spec = recorded_experiment(run, trust).model_copy(update={"root": str(root)})
    return run, spec


def demand_gradients(run: RunRecord, spec: ExperimentSpec) -> None:
    """Raise SpecError if the algorithm of a run has no gradient of a group."""
    from components.algorithms.choices import ALGORITHMS

    if not spec.algorithm.has_group_gradients:
        names = sorted(str(kind.model_fields["name"].default) for kind in ALGORITHMS if kind.has_group_gradients)
        text = f"{spec.algorithm.name}: run {run.short}: it has no policy gradient of a group"
        raise SpecError([Problem("algorithm", f"{text}; expected a run with one of {', '.join(names)}")])


def check_judges(spec: ExperimentSpec, rewards: Sequence[Target]) -> None:
    """Raise ResourceError with all missing prerequisites of the engine, of the judges of further rewards, and of the
    places where stages run."""
    from components.rewards.llm.spec import asked_by
    from flows.experiment.prerequisites import check_used

    judges = [judge for reward in [*rewards, spec.evaluate.reward or spec.reward] for judge in asked_by(reward)]
    check_used(spec, [spec.inference], judges, ("judge", "filter", "train", "evaluate"))


@contextmanager
def workplace(run: RunRecord, spec: ExperimentSpec, command: str) -> Iterator[Workplace]:
    """Provide the execution of further stages, which print nothing to standard output. command: for the name of the log
    file."""
    hush()
    context = Context.at(spec.root, spec.store, lock_timeout=spec.compute.lock_timeout)
    with ExitStack() as stack:
        stack.enter_context(Interruption())
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.callback(context.warm.close)
        context.store.check()
        console = Console()
        log = Path(spec.root) / "logs" / f"{command}-{run.short}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        stack.enter_context(logging_to(log, console))
        if (status := Records(spec.root).status(run)) not in ("finished", "pruned"):
            console.line(f"run {run.short} is {status}: the rounds that it has finished are used")
        execution = Execution(spec, context, console, None, log)
        stack.callback(execution.close)
        yield Workplace(run, spec, context, execution)
