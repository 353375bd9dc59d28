"""`python -m flows.serve +experiment=NAME [overrides]`: an experiment as a Prefect deployment.

Its runs are started from Prefect's UI, on a schedule, or by `prefect deployment run`.

The command registers, and then waits for runs and starts each in a process of its own, until it is interrupted. Without
PREFECT_API_URL it starts a server with the user interface, which ends with it. With `--pool` it registers only: workers
of that pool run the experiment, on whatever machines they are.

Whoever starts a run may set the keys that `serve.overrides` of the experiment lists, and nothing else. The rest does
not pass through Prefect: the processes that run get it in their environment.

Everything is checked before anything is registered: the overrides are composed, schedules read, names compared with
what is on the server. Exit codes as of `flows.run`.
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
from flows.orchestration.server import PORT
from flows.scheduling import parameters
from flows.scheduling.parameters import Deployment
from flows.terminal.arguments import refuse_root_option
from flows.terminal.exit_codes import told

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.deployments.runner import RunnerDeployment
    from prefect.schedules import Schedule

POLL = 5.0
"""Seconds between two questions for runs that are due."""
_CHOICE = re.compile(r"\+?experiment=")
UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
SHORTEST = 10
"""Seconds between two runs of a schedule, at least."""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m flows.serve", description=__doc__.partition("\n\n")[0].partition(": ")[2]
    )
    found.add_argument("overrides", nargs="*", help="+experiment=NAME, or several: +experiment=A,B; then overrides")
    found.add_argument("--config-dir", "-cd", help="folder of your own config groups")
    found.add_argument("--name", help="of the deployment; else that of the experiment")
    when = found.add_mutually_exclusive_group()
    when.add_argument("--cron", metavar="'0 3 * * *'", help="minute, hour, day, month, weekday")
    when.add_argument("--interval", metavar="6h", help="time between two starts: 90s, 30m, 6h, 1d")
    found.add_argument("--timezone", metavar="Europe/Berlin", help="of --cron; else UTC")
    found.add_argument("--tag", action="append", default=[], help="a tag of its runs; may be repeated")
    found.add_argument(
        "--limit", type=int, default=1, help="runs of a deployment at once, the others wait; 1 if not said"
    )
    found.add_argument("--pool", help="a work pool: register for its workers, and serve nothing here")
    found.add_argument("--port", type=int, help=f"of the server that this command starts; {PORT} if not said")
    found.add_argument(
        "--replace", action="store_true", help="also where the deployment is there with other parameters"
    )
    return found


def main(argv: list[str] | None = None) -> int:
    try:
        command = parser()
        refuse_root_option(command, argv)
        return serve(command.parse_intermixed_args(argv))
    except EspalierError as error:
        found = told(error)
        assert found is not None
        print(found[0], file=sys.stderr)
        return found[1]
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def serve(arguments: argparse.Namespace) -> int:
    """Registers what the command asks for, and serves it. Raises SpecError and ResourceError."""
    from flows.experiment.prerequisites import check_keys
    from flows.orchestration import server

    refuse_secrets({"--name": arguments.name, "--tag": arguments.tag, "--pool": arguments.pool})
    problems = amiss(arguments)
    deployments = wanted(arguments)
    specs = []
    for one in deployments:
        try:
            specs.append(parameters.resolve(one))
        except SpecError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise SpecError(problems)
    url = os.environ.get("PREFECT_API_URL")
    if arguments.pool and not url:
        raise ResourceError(
            f"--pool {arguments.pool}: workers need a server that stays when this command has ended. Start one "
            "(prefect server start) and set PREFECT_API_URL to its address"
        )
    if not arguments.pool:
        check_keys(*specs)
    root = Path(specs[0].root)
    os.environ.update(server.QUIET if url else server.client_environment(root))  # before Prefect is imported
    port = arguments.port or PORT
    os.environ.setdefault("PREFECT_API_URL", f"http://{server.HOST}:{port}/api")
    starts = schedule(arguments)
    allowed = [spec.serve.overrides for spec in specs]
    with ExitStack() as stack:
        if url:
            server.UserServer(url)
        else:
            own = server.start(root, port)
            stack.callback(own.stop)
            print("starting a Prefect server", file=sys.stderr)
            own.url()
            print(own.login(show=sys.stderr.isatty()), file=sys.stderr)
            from prefect.settings import temporary_settings

            stack.enter_context(temporary_settings(own.settings()))
        return _register(deployments, allowed, arguments, starts)


def named(arguments: argparse.Namespace) -> list[str]:
    """The experiments that the overrides name."""
    lines = [line for line in arguments.overrides if _CHOICE.match(line)]
    return [name for line in lines for name in line.partition("=")[2].split(",") if name]


def wanted(arguments: argparse.Namespace) -> list[Deployment]:
    """The deployments that the command asks for."""
    overrides = tuple(line for line in arguments.overrides if not _CHOICE.match(line))
    folder = arguments.config_dir and str(Path(arguments.config_dir).absolute())
    return [Deployment(arguments.name or name, name, overrides, folder) for name in named(arguments)]


def amiss(arguments: argparse.Namespace) -> list[Problem]:
    """What is wrong with the options, but for --cron, which only Prefect can read."""
    found = []
    names = named(arguments)
    if not names:
        found.append(Problem("+experiment", "nothing is named to be registered; expected +experiment=NAME"))
    if twice := sorted({name for name in names if names.count(name) > 1}):
        found.append(Problem("+experiment", f"{', '.join(twice)}: named twice, and a deployment has one name"))
    if arguments.name is not None and len(names) > 1:
        found.append(
            Problem(
                "--name",
                f"{arguments.name!r}: {len(names)} deployments cannot have one name; leave it out, and each is called "
                "as its experiment, or call the command once for each",
            )
        )
    if arguments.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_. -]*", arguments.name):
        found.append(Problem("--name", f"{arguments.name!r}: expected letters, digits and _ . -"))
    if arguments.limit < 1:
        found.append(Problem("--limit", f"{arguments.limit}: expected 1 or more"))
    if arguments.port is not None and os.environ.get("PREFECT_API_URL"):
        found.append(Problem("--port", "is of a server that this command starts, and PREFECT_API_URL names another"))
    if arguments.port is not None and not 0 < arguments.port < 2**16:
        found.append(Problem("--port", f"{arguments.port}: expected 1 to 65535"))
    if any(not tag.strip() for tag in arguments.tag):
        found.append(Problem("--tag", "an empty one; expected a word"))
    if arguments.timezone is not None:
        if arguments.cron is None:
            found.append(Problem("--timezone", "is that of --cron, and there is none"))
        try:
            ZoneInfo(arguments.timezone)
        except (ZoneInfoNotFoundError, ValueError):
            found.append(Problem("--timezone", f"{arguments.timezone!r}: expected a name such as Europe/Berlin"))
    if arguments.interval is not None and interval(arguments.interval) is None:
        text = f"{arguments.interval!r}: expected a number and s, m, h or d, such as 6h; at least {SHORTEST}s"
        found.append(Problem("--interval", text))
    return found


def interval(text: str) -> timedelta | None:
    """`6h` as a time; None where it is none, or too short for a schedule."""
    read = re.fullmatch(r"(\d{1,6})\s*([smhd])", text.strip())
    every = timedelta(**{UNITS[read[2]]: int(read[1])}) if read else timedelta()
    return every if every.total_seconds() >= SHORTEST else None


def schedule(arguments: argparse.Namespace) -> Schedule | None:
    """When runs start by themselves. Raises SpecError for a --cron that is none; only Prefect can read it."""
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
    asked: Sequence[Deployment],
    allowed: Sequence[Sequence[str]],
    arguments: argparse.Namespace,
    starts: Schedule | None,
) -> int:
    """allowed: for each deployment the keys that its runs may set."""
    import httpx
    from prefect import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        with get_client(sync_client=True) as client:
            if arguments.pool:
                _check_pool(client, arguments.pool)
            found = [deployment(*each, arguments, starts) for each in zip(asked, allowed, strict=True)]
            _check_names(client, found, replace=arguments.replace)
            for one in found:
                one.apply()
                print(_line(client, one), file=sys.stderr)
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        raise ResourceError(
            f"PREFECT_API_URL={os.environ['PREFECT_API_URL']}: the Prefect server says {error}"
        ) from None
    if arguments.pool:
        told_what = f"{parameters.VARIABLE}={shlex.quote(parameters.to_json(asked))}"
        command = f"{told_what} prefect worker start --pool {arguments.pool}"
        print(f"workers of the pool run it, started with what they may run:\n{command}", file=sys.stderr)
        return 0
    os.environ[parameters.VARIABLE] = parameters.to_json(asked)
    return _wait(found)


def _check_pool(client: SyncPrefectClient, name: str) -> None:
    from prefect.exceptions import ObjectNotFound

    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        raise SpecError(
            [
                Problem(
                    "--pool",
                    f"the server has no work pool {name!r}; make it: prefect work-pool create {name} --type process",
                )
            ]
        ) from None


def _check_names(client: SyncPrefectClient, asked: Sequence[RunnerDeployment], *, replace: bool) -> None:
    """Raises SpecError where a deployment of the name is there and starts something else."""
    from prefect.exceptions import ObjectNotFound

    problems = []
    for one in asked:
        try:
            there = client.read_deployment_by_name(one.full_name).description
        except ObjectNotFound:
            continue
        if there != one.description and not replace:
            message = f"{one.name!r} is on the server already, and runs {(there or '').partition(chr(10))[0]}; "
            problems.append(Problem("--name", f"{message}expected another name, or --replace"))
    if problems:
        raise SpecError(problems)


def deployment(
    one: Deployment, allowed: Sequence[str], arguments: argparse.Namespace, starts: Schedule | None
) -> RunnerDeployment:
    """Return the deployment as Prefect registers it. Its parameters are what a run may set; the form says which."""
    from prefect.client.schemas.objects import ConcurrencyLimitConfig, ConcurrencyLimitStrategy
    from prefect.types.entrypoint import EntrypointType

    from flows.scheduling.served_flow import experiment

    keys = ", ".join(f"`{key}`" for key in allowed) or "nothing (serve.overrides lists no key)"
    found: RunnerDeployment = experiment.to_deployment(
        one.name,
        schedule=starts,
        parameters={"overrides": []},
        tags=arguments.tag,
        concurrency_limit=ConcurrencyLimitConfig(
            limit=arguments.limit, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE
        ),
        work_pool_name=arguments.pool,
        description=f"python -m flows.run {shlex.join(one.lines)}\n\nA run may set: {keys}",
        paused=False,  # where an earlier command paused it when it ended
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    found._parameter_openapi_schema.properties["overrides"].update(parameters.schema(allowed))
    return found


def _line(client: SyncPrefectClient, one: RunnerDeployment) -> str:
    """What is registered now: its schedules may be from the user interface, too."""
    there = client.read_deployment_by_name(one.full_name)
    when = [
        str(getattr(each.schedule, "cron", None) or each.schedule.interval) for each in there.schedules if each.active
    ]
    page = f"{os.environ['PREFECT_API_URL'].rstrip('/').removesuffix('/api')}/deployments/deployment/{there.id}"
    return f"{one.full_name}  {'on schedule: ' + ', '.join(when) if when else 'no schedule'}  {page}"


def _wait(deployments: Sequence[RunnerDeployment]) -> int:
    """Starts the runs that come, until interrupted."""
    import asyncio

    from prefect.runner import Runner

    from flows.execution.executor import environment
    from flows.scheduling.served_flow import experiment

    os.environ |= {**environment(), "PREFECT_LOGGING_TO_API_ENABLED": "true"}  # of the runs: the UI shows what they say
    runner = Runner(name="espalier", query_seconds=POLL, limit=None)
    for one in deployments:
        identifier = runner.add_deployment(one)
        # Its runs call this flow, and not what the deployment names on the server: entrypoint, path and pull steps are
        # whatever the last user of the API wrote there. `Runner.add_flow` does the same, but has no place for a schema.
        runner._deployment_registry.register_flow(identifier, experiment)
    print("waiting for runs; Ctrl-C ends this, and what runs", file=sys.stderr, flush=True)
    try:
        asyncio.run(runner.start())
    except KeyboardInterrupt:
        print("ended; the deployments are paused until they are served again", file=sys.stderr)
    return 0


if __name__ == "__main__":
    from flows.terminal.interrupt import leave

    leave(main)
