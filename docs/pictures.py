"""Takes the pictures of the README from a run: its report, MLflow and Prefect.

    python -m docs.pictures [root=runs] [--run MLFLOW_RUN_ID]

Takes the latest finished run below the root, or the one named. Both user interfaces are started on free ports and
ended again. Needs chromium on the PATH; Pillow, which comes with matplotlib, makes the files small.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from flows.terminal.arguments import RootParser

IMAGES = Path(__file__).with_name("images")
START_LIMIT = 120.0
"""Seconds that a user interface may take to answer."""
PANEL = 430
"""Width in pixels of the assistant that MLflow opens at the right; it is cut off."""


def main() -> None:
    parser = RootParser(prog="python -m docs.pictures", description=__doc__.split("\n")[0])
    parser.add_argument("--run", help="id of its MLflow run (default: the latest finished one)")
    options = parser.parse_args()
    root = options.root
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no chromium on the PATH: install it (Debian, Ubuntu: apt install chromium)")
    if not (root / "mlflow" / "mlflow.db").is_file():
        sys.exit(f"{root} holds no run: run an experiment first, or name its folder: root=DIR")
    run_id, experiment, report = find_run(root, options.run)
    IMAGES.mkdir(exist_ok=True)
    picture(chromium, report.as_uri(), IMAGES / "report.png", width=1180, height=1300)
    with mlflow(root) as url:
        page = f"{url}/#/experiments/{experiment}/runs/{run_id}"
        picture(chromium, page, IMAGES / "mlflow.png", width=1280 + PANEL, height=760, cut=PANEL)
    with prefect(root) as url:
        picture(chromium, f"{url}/runs/flow-run/{flow_run(url)}", IMAGES / "prefect.png", width=1280, height=760)


def find_run(root: Path, run_id: str | None) -> tuple[str, str, Path]:
    """MLflow's ids of run and experiment, and the run's report."""
    from components.tracking.store import connect, local_uri

    client = connect(local_uri(root), root / "mlflow" / "artifacts")
    if run_id is None:
        experiments = [found.experiment_id for found in client.search_experiments()]
        runs = client.search_runs(experiments, "attributes.status = 'FINISHED'", order_by=["start_time DESC"])
        run_id = next(run.info.run_id for run in runs if client.list_artifacts(run.info.run_id))
    run = client.get_run(run_id)
    return run_id, run.info.experiment_id, Path(client.download_artifacts(run_id, "report.html"))


@contextlib.contextmanager
def mlflow(root: Path) -> Iterator[str]:
    """The address of MLflow's user interface."""
    from components.tracking.store import local_uri

    port = free_port()
    # Without a network, MLflow's import of litellm for its job runner would never return.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    arguments = ["mlflow", "ui", "--workers", "1", "--backend-store-uri", local_uri(root), "--port", str(port)]
    with running(arguments, quiet, f"http://127.0.0.1:{port}/health"):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def prefect(root: Path) -> Iterator[str]:
    """The address of Prefect's user interface."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {"PREFECT_HOME": str(root / "prefect"), "PREFECT_UI_API_URL": f"{url}/api"}
    with running(["prefect", "server", "start", "--port", str(port)], environment, f"{url}/api/health"):
        yield url


def flow_run(url: str) -> str:
    """Id of the latest flow run that completed."""
    wanted = {
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
        "sort": "START_TIME_DESC",
        "limit": 1,
    }
    post = urllib.request.Request(
        f"{url}/api/flow_runs/filter", json.dumps(wanted).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(post, timeout=30) as answer:
        return json.load(answer)[0]["id"]


@contextlib.contextmanager
def running(arguments: list[str], environment: Mapping[str, str], health: str) -> Iterator[None]:
    """Runs a command of this virtual environment until the block is left; first waits until it answers."""
    command = [str(Path(sys.executable).with_name(arguments[0])), *arguments[1:]]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + START_LIMIT
            while not answers(health):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    sys.exit(f"{' '.join(arguments)} does not answer:\n{log.read().decode()}")
                time.sleep(0.5)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            process.wait(30)


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def picture(chromium: str, url: str, out: Path, *, width: int, height: int, cut: int = 0) -> None:
    """A screenshot of a page, without `cut` pixels at the right, in 128 colours."""
    from PIL import Image

    with tempfile.TemporaryDirectory(prefix="espalier-") as folder:
        shot = Path(folder) / "shot.png"
        command = [chromium, "--headless", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        command += [f"--user-data-dir={folder}/profile", f"--window-size={width},{height}"]
        command += ["--virtual-time-budget=20000", f"--screenshot={shot}", url]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        with Image.open(shot) as image:
            kept = image.convert("RGB").crop((0, 0, width - cut, height))
            kept.quantize(128, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":
    main()
