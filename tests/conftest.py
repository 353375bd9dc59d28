"""What holds for every test: few threads, no network, no telemetry. Set before a test imports anything heavy."""

import os
import signal
import socketserver
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import left_out

ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",  # torch: more threads than cores make small models slower
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # models come from packages and local folders
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
}

LONGEST = [Path(__file__).parent / name for name in ("e2e", "faults")]

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# Tests start many processes, and each would compile all modules of the checkout. Packages are compiled by `make setup`.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Servers of tests answer at once: a body follows its headers in a write of its own, which would wait 40 ms for an
# acknowledgement.
socketserver.StreamRequestHandler.disable_nagle_algorithm = True

settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("any machine", settings.get_profile("random"), derandomize=True)
settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: Ctrl-C is tested all the same
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def real_models() -> Path:
    """Folder of published tokenizers, one folder each, for tests with the marker `models`."""
    folder = Path(os.environ.get("ESPALIER_MODELS", "nowhere"))
    if not (folder / "qwen3" / "tokenizer.json").is_file():
        pytest.skip("ESPALIER_MODELS is no folder of published tokenizers; run `make test-models`")
    return folder


@pytest.fixture
def sandbox_here():
    """For tests that run code in the sandbox: skipped, saying what to install, where it does not work."""
    from components.errors import ResourceError
    from components.sandbox import bubblewrap

    try:
        bubblewrap.check()
    except ResourceError as error:
        pytest.skip(str(error))


@pytest.fixture
def answered(monkeypatch, capsys):
    """Run `flows.run` in this process; return the exit code, standard output and standard error."""
    from flows.run import main

    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # the command sets it; this restores it

    def run(*arguments: str) -> tuple[object, str, str]:
        try:
            code: object = main(list(arguments)) or 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def prefect_root(tmp_path_factory):
    from tests.databases import give_databases

    root = tmp_path_factory.mktemp("prefect-root")
    give_databases(root)
    return root


@pytest.fixture(scope="session")
def prefect_server(prefect_root):
    """A server of our own kind. Its environment is set before Prefect is first imported."""
    from flows.orchestration import server

    os.environ.update(server.client_environment(prefect_root))
    running = server.start(prefect_root)
    yield running
    running.stop()


@pytest.fixture
def shared_server(prefect_server, monkeypatch):
    """Make the session's Prefect server that of each run in this process, in place of one for each run. A run in a
    fresh root gets a copy of an empty MLflow database."""
    from components.tracking import store
    from flows.orchestration import server
    from tests.databases import give_mlflow_database

    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "ERROR")
    monkeypatch.setattr(server, "for_run", lambda root, *, keep=False: nullcontext(prefect_server))
    monkeypatch.setattr(store, "_create_database", lambda database, artifacts: give_mlflow_database(database))
    return prefect_server


@pytest.fixture
def run(shared_server):
    """Return the function that runs an experiment in this process."""
    from flows.session import run

    return run


@pytest.fixture
def command(shared_server, answered):
    """Run `flows.run` in this process as a whole; return the exit code, standard output and standard error."""
    return answered


def pytest_collection_modifyitems(items):
    """Begin with the folders whose tests take longest, so that no process is left with one of them at the end."""
    items.sort(key=lambda item: not any(item.path.is_relative_to(folder) for folder in LONGEST))


def pytest_unconfigure(config):
    """End with what was left out. Workers of pytest-xdist report to the process that prints."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput") or config.option.collectonly:
        return
    reasons = [report.longrepr[2] for report in reporter.stats.get("skipped", []) if isinstance(report.longrepr, tuple)]
    marked = [
        item for item in reporter.stats.get("deselected", []) if any(map(item.get_closest_marker, left_out.MARKERS))
    ]
    if (line := left_out.summary(reasons, len(marked))) is not None:
        print(line)
