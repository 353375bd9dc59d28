"""Typed settings of sweepers and launchers (`conf/hydra/sweeper/optuna.yaml`), and checks of a sweep before it
starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from hydra.core.override_parser.types import Override
from pydantic import Field

from components.compute.sky.spec import SkyPlace
from components.compute.spec import PLACES
from components.errors import Problem, SpecError
from components.specs import Spec, nearest, validate
from flows.experiment.hydra_internals import BASIC_LAUNCHER
from flows.experiment.spec import ExperimentSpec

OPTUNA = "hydra_plugins.espalier.OptunaSweeper"
SKY = "hydra_plugins.espalier.SkyLauncher"
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
TRIAL = "trial"
"""Key below `hydra.sweeper` with which the sweeper passes the trial number to a point."""
IN_ROUNDS = ("success", "reward")
"""Metrics of every evaluation, which a pruner can use."""
IN_ENVIRONMENT = (*IN_ROUNDS, "gain")
"""Metrics of episodes in the environment."""
OF_ROWS = ("loss", "accuracy")
"""Metrics of held-out rows of imported data."""
Direction = Literal["maximize", "minimize"]


class MedianSpec(Spec):
    """Median pruning: ends a run whose best value so far is worse than the median of other runs at the same step."""

    name: Literal["median"] = "median"
    startup_trials: int = Field(5, ge=0)
    """Number of trials that must finish before any is pruned."""
    warmup_steps: int = Field(0, ge=0)
    """Number of rounds before which no run is pruned."""


class HalvingSpec(Spec):
    """Successive halving: of the runs that reach rounds m, m·r, m·r² …, the best 1/r continue."""

    name: Literal["halving"]
    min_steps: int = Field(1, ge=1)
    """First round m after which runs are pruned."""
    reduction: int = Field(2, ge=2)
    """Reduction factor r."""


PrunerSpec = Annotated[MedianSpec | HalvingSpec, Field(discriminator="name")]


class OptunaSpec(Spec):
    """Hyperparameter search with Optuna."""

    params: dict[str, Any] | None = None
    """Search space, written as on the command line:
    `{algorithm.learning_rate: "tag(log, interval(1e-5, 1e-3))"}`."""
    study: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the study, and of its folder below `<root>/sweeps`; null: the name of the experiment."""
    metric: Literal["success", "reward", "gain", "loss", "accuracy", "cost", "seconds"] = "success"
    """Objective: a number of the result line."""
    direction: Direction = "maximize"
    n_trials: int = Field(20, ge=1)
    """Total number of finished and pruned trials; failed trials do not count."""
    n_jobs: int = Field(1, ge=1)
    """Number of trials that are sampled and launched together."""
    sampler: Literal["tpe", "random", "qmc", "gp"] = "tpe"
    startup_trials: int = Field(10, ge=0)
    """Number of random trials before `tpe` and `gp` fit a model."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the sampler."""
    pruner: PrunerSpec | None = None
    """Pruner; null: no run is pruned."""

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        if parts.get("pruner") is not None and parts.get("metric", "success") not in IN_ROUNDS:
            message = (
                f"{parts['metric']!r}: pruning needs a metric of every evaluation; expected {' or '.join(IN_ROUNDS)}"
            )
            yield Problem("metric", message)


class LauncherSpec(Spec):
    """Launcher that runs each point on a machine provided by SkyPilot."""

    place: str = "sky_h100"
    """Place where points run: a name in `places`."""
    places: dict[str, SkyPlace] = {}
    """Machines by name."""
    n_jobs: int = Field(1, ge=1)
    """Number of concurrent points, each on its own machine."""

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        name, places = parts.get("place"), parts.get("places")
        if name is None or places is None:
            return
        if name not in places:
            yield Problem("place", f"{name!r}: expected one of {', '.join(places)}", nearest(name, places))
            return
        place: SkyPlace = places[name]
        if place.cluster is not None and parts.get("n_jobs", 1) > 1:
            message = f"{place.cluster!r}: {parts['n_jobs']} concurrent points need one machine each; expected null"
            yield Problem(f"places.{name}.cluster", message, "hydra.launcher.n_jobs=1")
        if place.nodes > 1:
            yield Problem(f"places.{name}.nodes", f"{place.nodes}: a point runs on one machine; expected 1")
        if place.processes not in ("auto", 1):
            message = f"{place.processes}: a point is a whole run, whose own compute distributes its training"
            yield Problem(f"places.{name}.processes", f"{message}; expected 1", "compute=torchrun")


def sky_settings(hydra: Mapping[str, Any]) -> LauncherSpec | None:
    """Return the settings of the SkyPilot launcher in Hydra's config; None if another launcher is chosen. Raises
    SpecError."""
    data = dict(hydra["launcher"])
    if data.pop("_target_") != SKY:
        return None
    return validate(LauncherSpec, data, path="hydra.launcher", allow=())


def optuna_settings(hydra: Mapping[str, Any]) -> OptunaSpec | None:
    """Return the settings of the Optuna sweeper in Hydra's config; None if another sweeper is chosen. Raises
    SpecError."""
    data = dict(hydra["sweeper"])
    if data.pop("_target_") != OPTUNA:
        return None
    return validate(OptunaSpec, data, path="hydra.sweeper", allow=())


def default_objective(environment: object) -> tuple[str, Direction]:
    """Return the metric of the result line that ranks the points of a sweep without Optuna, and its direction.
    environment: that of the experiment; None without one."""
    return ("success", "maximize") if environment is not None else ("loss", "minimize")


def problems(
    hydra: Mapping[str, Any], overrides: Sequence[Override], specs: Iterable[ExperimentSpec]
) -> Iterator[Problem]:
    """Yield the problems of a sweep.

    hydra: Hydra's section of the composed config. overrides: parsed, including those of `hydra.sweeper.params`. specs:
    of the points that are known in advance."""
    launcher = hydra["launcher"]
    jobs = launcher.get("n_jobs")
    if launcher["_target_"] == JOBLIB and (not isinstance(jobs, int) or isinstance(jobs, bool) or jobs == 0):
        yield Problem("hydra.launcher.n_jobs", f"{jobs!r}: expected at least 1, or -1 for as many as there are cores")
    try:
        sky = sky_settings(hydra)
    except SpecError as error:
        yield from error.problems
        return
    if sky is not None:
        yield from dict.fromkeys(problem for spec in specs for problem in _elsewhere(sky, spec))
    continuous = [override.get_key_element() for override in overrides if override.is_interval_sweep()]
    try:
        settings = optuna_settings(hydra)
    except SpecError as error:
        yield from error.problems
        return
    if settings is not None and find_spec("optuna") is None:
        yield Problem("hydra/sweeper", "'optuna': needs the package optuna: pip install -e '.[sweeps]'")
    if settings is None:
        for key in continuous:
            yield Problem(key, "an interval is continuous; expected a list of values, or hydra/sweeper=optuna")
        return
    if not any(override.is_sweep_override() for override in overrides):
        yield Problem("hydra.sweeper.params", "the search space is empty; expected a key with several values")
    if settings.metric in IN_ENVIRONMENT and any(spec.environment is None for spec in specs):
        message = f"{settings.metric!r}: nothing measures it without an environment (environment=none)"
        yield Problem("hydra.sweeper.metric", f"{message}; expected loss with direction=minimize, or accuracy")
    if settings.metric in OF_ROWS and not all(spec.data.is_set and spec.data.holds_out for spec in specs):
        message = f"{settings.metric!r}: no held-out rows measure it; expected data.heldout with data.path"
        yield Problem("hydra.sweeper.metric", f"{message}, or another metric such as success")
    if settings.n_jobs > 1 and launcher["_target_"] == BASIC_LAUNCHER:
        message = (
            f"{settings.n_jobs}: the basic launcher runs one trial at a time; expected 1, or hydra/launcher=joblib"
        )
        yield Problem("hydra.sweeper.n_jobs", message)
    if settings.pruner is not None and sky is not None:
        message = f"'{settings.pruner.name}': the study is on this machine, and runs on other machines cannot reach it"
        yield Problem("hydra.sweeper.pruner", f"{message}; expected null, or hydra/launcher=joblib")
    if settings.pruner is not None and any(spec.rounds and not spec.evaluate.every for spec in specs):
        message = f"'{settings.pruner.name}': needs evaluations between the rounds, but evaluate.every=0"
        yield Problem("hydra.sweeper.pruner", message, "evaluate.every=1")
    if any(spec.evaluate.stop == "decided" for spec in specs):
        message = "decided: a study compares the success of its trials, which then play different numbers of scenarios"
        yield Problem("evaluate.stop", f"{message}; expected never", "evaluate.stop=never")


def _elsewhere(sky: LauncherSpec, spec: ExperimentSpec) -> Iterator[Problem]:
    """Yield the settings of a run that do not work on the launcher's machines."""
    remote = "but the points of this sweep run on other machines"
    yield from sky.places[sky.place].store_problems(sky.place, spec.store, "the points of the sweep")
    if any(place.remote for place in spec.compute.places_in_use.values()):
        own = ", ".join(name for name, place in PLACES.items() if not place.remote)
        message = f"sends stages to remote machines, {remote}; expected a place on the machine of the run: {own}"
        yield Problem("compute", message, "compute=local")
    uri = spec.tracking.uri
    if uri is not None and not uri.startswith(("http://", "https://", "databricks", "env:")):
        yield Problem("tracking.uri", f"{uri!r} is on this machine, {remote}; expected a server's URL, or null")
    if spec.fork is not None:
        yield Problem("fork", f"{spec.fork!r}: its record is below root on this machine, {remote}; expected null")
    if spec.feedback is not None:
        yield Problem("feedback", f"{spec.feedback.path!r} is a file on this machine, {remote}; expected feedback=none")
    if spec.deploy.approve:
        yield Problem("deploy.approve", f"true: approval needs a user at the run, {remote}; expected false")
    if spec.deploy.target is not None and spec.deploy.target.on_this_machine:
        yield Problem(
            "deploy.target",
            f"{spec.deploy.target.name!r} serves on the machine of the run, {remote}; expected null or a host",
        )
