"""`python -m flows.serve +experiment=NAME [overrides]`: register and serve an experiment as a Prefect deployment.

Runs are started from Prefect's UI, on a schedule, or by `prefect deployment run`.

The command registers the deployment, then polls for runs and starts each in its own process, until interrupted. Without
PREFECT_API_URL it starts a server with the user interface and stops it on exit. With `--pool` it only registers:
workers of that pool run the experiment, on any machine.

A run may set the keys that `serve.overrides` of the experiment lists, and no others. The rest of the configuration does
not pass through Prefect: the processes that execute runs get it in their environment.

Everything is validated before anything is registered: overrides are composed, schedules parsed, and names compared with
the deployments on the server. Exit codes are those of `flows.run`.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from components.errors import EspalierError, Problem, ResourceError, SpecError
from components.redaction import refuse_secrets
from flows.experiment.spec import ExperimentSpec
from flows.orchestration.server import PORT
from flows.scheduling import parameters
from flows.scheduling.parameters import ServedExperiment
from flows.terminal.arguments import refuse_root_option
from flows.terminal.exit_codes import print_error

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.deployments.runner import RunnerDeployment
    from prefect.schedules import Schedule

POLL = 5.0
"""Seconds between two polls for due runs."""
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
SHORTEST = 10
"""Minimum number of seconds between two runs of a schedule."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    command = argparse.ArgumentParser(
        prog="python -m flows.serve", description=__doc__.partition("\n\n")[0].partition(": ")[2]
    )
    command.add_argument("overrides", nargs="*", help="+experiment=NAME, or several: +experiment=A,B; then overrides")
    command.add_argument("--config-dir", "-cd", help="folder with your own config groups")
    command.add_argument("--name", help="name of the deployment (default: name of the experiment)")
    start = command.add_mutually_exclusive_group()
    start.add_argument("--cron", metavar="'0 3 * * *'", help="schedule: minute, hour, day, month, weekday")
    start.add_argument("--interval", metavar="6h", help="schedule: time between two starts, such as 90s, 30m, 6h, 1d")
    command.add_argument("--timezone", metavar="Europe/Berlin", help="time zone of --cron (default: UTC)")
    command.add_argument("--tag", action="append", default=[], help="tag of the deployment's runs; may be repeated")
    command.add_argument(
        "--limit", type=int, default=1, help="maximum concurrent runs of a deployment; others wait (default: 1)"
    )
    command.add_argument("--pool", help="Prefect work pool: register for its workers and serve nothing here")
    command.add_argument("--port", type=int, help=f"port of the server that this command starts (default: {PORT})")
    command.add_argument(
        "--replace", action="store_true", help="replace an existing deployment of this name with other parameters"
    )
    return command


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        command = parser()
        refuse_root_option(command, argv)
        return serve(command.parse_intermixed_args(argv))
    except EspalierError as error:
        return print_error(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def serve(arguments: argparse.Namespace) -> int:
    """Register the requested deployments and serve them. Raises SpecError and ResourceError."""
    from flows.experiment.prerequisites import check_keys
    from flows.orchestration import server

    refuse_secrets({"--name": arguments.name, "--tag": arguments.tag, "--pool": arguments.pool})
    problems = check_options(arguments)
    deployments = requested_deployments(arguments)
    specs = []
    for requested in deployments:
        try:
            specs.append(parameters.resolve(requested))
        except SpecError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise SpecError(problems)
    url = os.environ.get("PREFECT_API_URL")
    if arguments.pool and not url:
        raise ResourceError(
            f"--pool {arguments.pool}: workers need a server that outlives this command. Start one (prefect server "
            "start) and set PREFECT_API_URL to its address"
        )
    if not arguments.pool:
        check_keys(*specs)
    root = Path(specs[0].root)
    os.environ.update(server.QUIET if url else server.client_environment(root))  # before Prefect is imported
    port = arguments.port or PORT
    os.environ.setdefault("PREFECT_API_URL", f"http://{server.HOST}:{port}/api")
    starts = schedule(arguments)
    with ExitStack() as stack:
        if url:
            server.UserServer(url)
        else:
            local_server = server.start(root, port)
            stack.callback(local_server.stop)
            print("starting a Prefect server", file=sys.stderr)
            local_server.url()
            print(local_server.login(show=sys.stderr.isatty()), file=sys.stderr)
            from prefect.settings import temporary_settings

            stack.enter_context(temporary_settings(local_server.settings()))
        return _register(deployments, specs, arguments, starts)


def requested_deployments(arguments: argparse.Namespace) -> list[ServedExperiment]:
    """Return one deployment per experiment on the command line."""
    return parameters.requested_experiments(arguments.overrides, arguments.config_dir, arguments.name)


def check_options(arguments: argparse.Namespace) -> list[Problem]:
    """Return the problems of the options, except those of --cron, which only Prefect can parse."""
    names = parameters.experiment_names(arguments.overrides)
    problems = parameters.experiment_problems(names)
    if arguments.name is not None and len(names) > 1:
        problems.append(
            Problem(
                "--name",
                f"{arguments.name!r}: {len(names)} deployments cannot share one name. Omit --name, so that each is "
                "named after its experiment, or run the command once per experiment",
            )
        )
    if arguments.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_. -]*", arguments.name):
        problems.append(Problem("--name", f"{arguments.name!r}: expected letters, digits and _ . -"))
    if arguments.limit < 1:
        problems.append(Problem("--limit", f"{arguments.limit}: expected 1 or more"))
    if arguments.port is not None and os.environ.get("PREFECT_API_URL"):
        problems.append(Problem("--port", "applies to a server that this command starts, but PREFECT_API_URL is set"))
    if arguments.port is not None and not 0 < arguments.port < 2**16:
        problems.append(Problem("--port", f"{arguments.port}: expected 1 to 65535"))
    if arguments.pool is not None and not arguments.pool.strip():
        problems.append(Problem("--pool", f"{arguments.pool!r}: expected the name of a work pool"))
    if any(not tag.strip() for tag in arguments.tag):
        problems.append(Problem("--tag", "is empty; expected a word"))
    if arguments.timezone is not None:
        if arguments.cron is None:
            problems.append(Problem("--timezone", "requires --cron"))
        try:
            ZoneInfo(arguments.timezone)
        except (ZoneInfoNotFoundError, ValueError):
            problems.append(Problem("--timezone", f"{arguments.timezone!r}: expected a name such as Europe/Berlin"))
    if arguments.interval is not None and interval(arguments.interval) is None:
        text = f"{arguments.interval!r}: expected a number with unit s, m, h or d, such as 6h; at least {SHORTEST}s"
        problems.append(Problem("--interval", text))
    return problems


def interval(text: str) -> timedelta | None:
    """Return a duration such as `6h` as timedelta, or None if it is invalid or too short for a schedule."""
    match = re.fullmatch(r"(\d{1,6})\s*([smhd])", text.strip())
    every = timedelta(**{UNITS[match[2]]: int(match[1])}) if match else timedelta()
    return every if every.total_seconds() >= SHORTEST else None


def schedule(arguments: argparse.Namespace) -> Schedule | None:
    """Return the schedule of the runs, or None without one. Raises SpecError for an invalid --cron."""
    from prefect.schedules import Cron, Interval

    if arguments.cron is not None:
        try:
            return Cron(arguments.cron, timezone=arguments.timezone)
        except ValueError:
            text = f"{arguments.cron!r}: expected minute, hour, day, month and weekday, such as '0 3 * * *'"
            raise SpecError([Problem("--cron", text)]) from None
    every = interval(arguments.interval) if arguments.interval is not None else None
    return None if every is None else Interval(every)


def _register(
    requested: Sequence[ServedExperiment],
    specs: Sequence[ExperimentSpec],
    arguments: argparse.Namespace,
    starts: Schedule | None,
) -> int:
    """Register the deployments and serve them. specs: their experiments."""
    import httpx
    from prefect import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        with get_client(sync_client=True) as client:
            if arguments.pool:
                _check_pool(client, arguments.pool)
            registered = [
                deployment(request, spec, arguments, starts) for request, spec in zip(requested, specs, strict=True)
            ]
            _check_names(client, registered, replace=arguments.replace)
            for runner_deployment in registered:
                runner_deployment.apply()
                print(_line(client, runner_deployment), file=sys.stderr)
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        raise ResourceError(
            f"PREFECT_API_URL={os.environ['PREFECT_API_URL']}: request to the Prefect server failed: {error}"
        ) from None
    if arguments.pool:
        assignment = f"{parameters.VARIABLE}={shlex.quote(parameters.to_json(requested))}"
        command = f"{assignment} prefect worker start --pool {arguments.pool}"
        print(f"start a worker of the pool with the deployments that it may run:\n{command}", file=sys.stderr)
        return 0
    os.environ[parameters.VARIABLE] = parameters.to_json(requested)
    return _wait(registered)


def _check_pool(client: SyncPrefectClient, name: str) -> None:
    from prefect.exceptions import ObjectNotFound

    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        raise SpecError(
            [
                Problem(
                    "--pool",
                    f"the server has no work pool {name!r}; create it: prefect work-pool create {name} --type process",
                )
            ]
        ) from None


def _check_names(client: SyncPrefectClient, requested: Sequence[RunnerDeployment], *, replace: bool) -> None:
    """Raise SpecError if the server has a deployment of the same name that runs another command."""
    from prefect.exceptions import ObjectNotFound

    problems = []
    for runner_deployment in requested:
        try:
            description = client.read_deployment_by_name(runner_deployment.full_name).description
        except ObjectNotFound:
            continue
        if description != runner_deployment.description and not replace:
            existing = (description or "").partition("\n")[0]
            problems.append(
                Problem(
                    "--name",
                    f"{runner_deployment.name!r} exists on the server and runs {existing}; expected another name, or "
                    "--replace",
                )
            )
    if problems:
        raise SpecError(problems)


def deployment(
    requested: ServedExperiment, spec: ExperimentSpec, arguments: argparse.Namespace, starts: Schedule | None
) -> RunnerDeployment:
    """Return the deployment as Prefect registers it: of a flow with the name of the recipe, such as
    `agent-evol/my_experiment`. Its parameter schema lists the keys that a run may set."""
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.types.entrypoint import EntrypointType

    from flows.scheduling.served_flow import flow_of

    allowed = spec.serve.overrides
    keys = ", ".join(f"`{key}`" for key in allowed) or "nothing (serve.overrides lists no key)"
    runner_deployment: RunnerDeployment = flow_of(spec.flow.title).to_deployment(
        requested.name,
        schedule=starts,
        parameters={"overrides": []},
        tags=arguments.tag,
        concurrency_limit=ConcurrencyLimitConfig(
            limit=arguments.limit, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE
        ),
        work_pool_name=arguments.pool,
        description=f"python -m flows.run {shlex.join(requested.lines)}\n\nA run may set: {keys}",
        paused=False,  # an earlier command pauses it on exit
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    runner_deployment._parameter_openapi_schema.properties["overrides"].update(parameters.schema(allowed))
    return runner_deployment


def _line(client: SyncPrefectClient, runner_deployment: RunnerDeployment) -> str:
    """Return a line that describes the registered deployment, with schedules added in the user interface, too."""
    registered = client.read_deployment_by_name(runner_deployment.full_name)
    schedules = [
        str(getattr(entry.schedule, "cron", None) or entry.schedule.interval)
        for entry in registered.schedules
        if entry.active
    ]
    page = f"{os.environ['PREFECT_API_URL'].rstrip('/').removesuffix('/api')}/deployments/deployment/{registered.id}"
    timing = f"on schedule: {', '.join(schedules)}" if schedules else "no schedule"
    return f"{runner_deployment.full_name}  {timing}  {page}"


def _wait(deployments: Sequence[RunnerDeployment]) -> int:
    """Start the due runs until interrupted."""
    import asyncio

    from prefect.runner import Runner

    from flows.execution.executor import environment
    from flows.scheduling.served_flow import flow_of

    os.environ |= environment()  # for the processes of the runs
    runner = Runner(name="espalier", query_seconds=POLL, limit=None)
    for runner_deployment in deployments:
        identifier = runner.add_deployment(runner_deployment)
        # Runs call this flow, not the entrypoint, path or pull steps stored on the server: any user of the API can
        # change those. `Runner.add_flow` does the same, but accepts no parameter schema.
        runner._deployment_registry.register_flow(identifier, flow_of(runner_deployment.flow_name))
    print("waiting for runs; Ctrl-C stops this command and its runs", file=sys.stderr, flush=True)
    try:
        asyncio.run(runner.start())
    except KeyboardInterrupt:
        print("stopped; the deployments are paused until they are served again", file=sys.stderr)
    return 0


if __name__ == "__main__":
    from flows.terminal.interrupt import leave

    leave(main)
