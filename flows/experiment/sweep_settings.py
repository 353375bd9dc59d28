"""What `conf/hydra/sweeper/optuna.yaml` sets, typed; and what is wrong with a sweep before it starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from hydra.core.override_parser.types import Override
from pydantic import Field

from components.compute.sky.spec import SkyPlace
from components.deployment.targets.spec import LocalTarget
from components.errors import Problem, SpecError
from components.specs import Spec, nearest, validate
from flows.experiment.checks.computing import unreachable_store
from flows.experiment.spec import ExperimentSpec

OPTUNA = "hydra_plugins.espalier.OptunaSweeper"
SKY = "hydra_plugins.espalier.SkyLauncher"
JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
TRIAL = "trial"
"""Key below `hydra.sweeper` by which the sweeper tells a point which trial it is."""
IN_ROUNDS = ("success", "reward")
"""Metrics that every evaluation has, so that a run can be pruned by them."""


class MedianSpec(Spec):
    """Ends a run whose best value so far is worse than the median of the others at the same step."""

    name: Literal["median"] = "median"
    startup_trials: int = Field(5, ge=0)
    """Trials that end before any is pruned."""
    warmup_steps: int = Field(0, ge=0)
    """No run ends before this round."""


class HalvingSpec(Spec):
    """Successive halving: of the runs that come to rounds m, m·r, m·r² …, the best 1/r go on."""

    name: Literal["halving"]
    min_steps: int = Field(1, ge=1)
    """m: the round after which the first are ended."""
    reduction: int = Field(2, ge=2)
    """r."""


PrunerSpec = Annotated[MedianSpec | HalvingSpec, Field(discriminator="name")]


class OptunaSpec(Spec):
    """A search by Optuna."""

    params: dict[str, Any] | None = None
    """What is searched, as on the command line: `{algorithm.learning_rate: "tag(log, interval(1e-5, 1e-3))"}`."""
    study: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the study, and of its folder below `<root>/sweeps`; None: that of the experiment."""
    metric: Literal["success", "reward", "gain", "cost", "seconds"] = "success"
    """A number of the result line."""
    direction: Literal["maximize", "minimize"] = "maximize"
    n_trials: int = Field(20, ge=1)
    """Trials in all that end by themselves or are pruned; failed ones do not count."""
    n_jobs: int = Field(1, ge=1)
    """Trials that are chosen and launched together."""
    sampler: Literal["tpe", "random", "qmc", "gp"] = "tpe"
    startup_trials: int = Field(10, ge=0)
    """Drawn at random before `tpe` and `gp` learn from them."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Of the sampler."""
    pruner: PrunerSpec | None = None
    """None ends no run before its time."""

    @classmethod
    def cross_problems(cls, parts: Mapping[str, Any]) -> Iterator[Problem]:
        if parts.get("pruner") is not None and parts.get("metric", "success") not in IN_ROUNDS:
            message = f"{parts['metric']!r}: a pruner needs one that each evaluation has: {' or '.join(IN_ROUNDS)}"
            yield Problem("metric", message)


class LauncherSpec(Spec):
    """Each point on a machine that SkyPilot provides."""

    place: str = "sky_h100"
    """The machine of a point: one of the places."""
    places: dict[str, SkyPlace] = {}
    """What is meant by each name."""
    n_jobs: int = Field(1, ge=1)
    """Points at a time, each on a machine of its own."""

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
            message = f"{place.cluster!r}: {parts['n_jobs']} points at a time need as many machines; expected null"
            yield Problem(f"places.{name}.cluster", message, "hydra.launcher.n_jobs=1")
        if place.nodes > 1:
            yield Problem(f"places.{name}.nodes", f"{place.nodes}: a point runs on one machine; expected 1")
        if place.processes > 1:
            message = f"{place.processes}: a point is a whole run; its trainings are shared out by its own compute"
            yield Problem(f"places.{name}.processes", f"{message}; expected 1", "compute=accelerate")


def sky_settings(hydra: Mapping[str, Any]) -> LauncherSpec | None:
    """As `optuna_settings`, of the launcher that sends points elsewhere. Raises SpecError."""
    data = dict(hydra["launcher"])
    if data.pop("_target_") != SKY:
        return None
    return validate(LauncherSpec, data, path="hydra.launcher", allow=())


def optuna_settings(hydra: Mapping[str, Any]) -> OptunaSpec | None:
    """The settings, from Hydra's part of a composed config; None where another sweeper is chosen. Raises SpecError."""
    data = dict(hydra["sweeper"])
    if data.pop("_target_") != OPTUNA:
        return None
    return validate(OptunaSpec, data, path="hydra.sweeper", allow=())


def problems(
    hydra: Mapping[str, Any], overrides: Sequence[Override], specs: Iterable[ExperimentSpec]
) -> Iterator[Problem]:
    """What is wrong with a sweep. hydra: Hydra's part of the composed config. overrides: parsed, those of
    `hydra.sweeper.params` among them. specs: of the points, as far as they are known."""
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
    continuous = [one.get_key_element() for one in overrides if one.is_interval_sweep()]
    try:
        settings = optuna_settings(hydra)
    except SpecError as error:
        yield from error.problems
        return
    if settings is not None and find_spec("optuna") is None:
        yield Problem("hydra/sweeper", "'optuna': needs the package optuna: pip install 'espalier[sweeps]'")
    if settings is None:
        for key in continuous:
            yield Problem(key, "an interval has no list of points; expected values, or hydra/sweeper=optuna")
        return
    if not any(one.is_sweep_override() for one in overrides):
        yield Problem("hydra.sweeper.params", "there is nothing to search; expected a key with several values")
    if settings.n_jobs > 1 and launcher["_target_"] == BASIC:
        message = f"{settings.n_jobs}: they would run one after the other; expected 1, or hydra/launcher=joblib"
        yield Problem("hydra.sweeper.n_jobs", message)
    if settings.pruner is not None and sky is not None:
        message = f"'{settings.pruner.name}': the study lies on this machine, and runs elsewhere do not reach it"
        yield Problem("hydra.sweeper.pruner", f"{message}; expected null, or hydra/launcher=joblib")
    if settings.pruner is not None and any(spec.rounds and not spec.evaluate.every for spec in specs):
        message = f"'{settings.pruner.name}': looks at evaluations between the rounds, and there are none"
        yield Problem("hydra.sweeper.pruner", message, "evaluate.every=1")


def _elsewhere(sky: LauncherSpec, spec: ExperimentSpec) -> Iterator[Problem]:
    """What of a run cannot be where the launcher sends it."""
    here = "and the points of this sweep run on other machines"
    yield from unreachable_store(sky.place, sky.places[sky.place], spec.store, "the points of the sweep")
    used = (spec.compute.default, *spec.compute.stages.values())
    if any(isinstance(spec.compute.places[name], SkyPlace) for name in used):
        message = f"stages would be sent on from there, {here}; expected local, process or accelerate"
        yield Problem("compute", message, "compute=local")
    uri = spec.tracking.uri
    if uri is not None and not uri.startswith(("http://", "https://", "databricks", "env:")):
        yield Problem("tracking.uri", f"{uri!r} is on this machine, {here}; expected a server's URL, or null")
    if spec.fork is not None:
        yield Problem("fork", f"{spec.fork!r}: its record is below root on this machine, {here}; expected null")
    if spec.feedback is not None:
        yield Problem("feedback", f"{spec.feedback.path!r} is a file of this machine, {here}; expected feedback=none")
    if spec.deploy.approve:
        yield Problem("deploy.approve", f"true: nobody can be asked there, {here}; expected false")
    if isinstance(spec.deploy.target, LocalTarget):
        yield Problem("deploy.target", f"'local' serves on the machine of the run, {here}; expected null or a host")
