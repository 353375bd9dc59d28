"""Driver against a fake of SkyPilot at its boundary: the module `sky`, its requests, logs and errors.
The same against SkyPilot and a Slurm cluster: tests/slurm."""

import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from components.compute.runners import RunnerContext, RunnerStopped, StageProcess, StageResult
from components.compute.sky.driver import Driver
from components.compute.sky.runner import SkyRunner
from components.compute.sky.spec import SkyPlace
from components.compute.sky.task import TaskTemplate
from components.errors import EspalierError, ResourceError, TooManyFailures, WaitTimeout
from tests.refusals import wrong_refusals

ASKED = {"stage": "train", "spec": {}, "inputs": {}, "seed": 0, "allow": []}
DONE = {"key": "k", "digest": "d", "status": "ran"}


class NoCloudAccessError(Exception): ...


class ResourcesUnavailableError(Exception):
    def __init__(self, text, history=()):
        super().__init__(text)
        self.failover_history = list(history)


class ResourcesMismatchError(Exception): ...


class ClusterDoesNotExist(ValueError): ...


class CommandError(Exception): ...


class ApiServerConnectionError(RuntimeError): ...


class RequestCancelled(Exception): ...


class Sky:
    """Fake of `sky`. logs: one per job: lines, or an error, which is raised; then the state of the job."""

    StatusRefreshMode = SimpleNamespace(FORCE="force")

    class Task:
        @staticmethod
        def from_yaml_config(config, secrets_overrides=None):
            return {**config, "secrets": dict(secrets_overrides)}

    def __init__(self, *logs, launch=None, alive=True):
        self.logs = list(logs)
        self.state = "RUNNING"
        self.alive = alive
        self.calls = []
        self.tasks = []
        self._launch = launch
        self.cancelled = threading.Event()
        self.jobs = SimpleNamespace(
            launch=lambda task, name: self._submit("jobs.launch", task, name),
            tail_logs=lambda job_id, follow, output_stream: self.tail_logs("", job_id, follow, output_stream),
            cancel=lambda job_ids: self._call("jobs.cancel", job_ids),
            queue_v2=lambda refresh, job_ids: ([{"status": SimpleNamespace(value=self.state)}], 1, {}, 1),
        )

    def _call(self, *call):
        self.calls.append(call)

    def _submit(self, how, task, name):
        self.tasks.append(task)
        self._call(how, name)
        return how

    def launch(self, task, cluster_name, fast):
        return self._submit("launch", task, cluster_name)

    def exec(self, task, cluster_name):
        return self._submit("exec", task, cluster_name)

    def stream_and_get(self, request_id, output_stream):
        output_stream.write("Launching on Slurm.\n")
        if self._launch == "never":
            assert self.cancelled.wait(600)
            raise RequestCancelled("by another process")
        if self._launch is not None:
            raise self._launch
        return ([7], None) if request_id == "jobs.launch" else (7, None)

    def tail_logs(self, cluster_name, job_id, follow, output_stream):
        log, self.state = self.logs.pop(0)
        for line in log:
            if isinstance(line, Exception):
                raise line
            output_stream.write(f"\x1b[36m(train, pid=1)\x1b[0m {line}\n")
        return 0

    def get(self, result):
        if isinstance(result, Exception):
            raise result
        return result

    def job_status(self, name, job_ids):
        if isinstance(self.state, Exception):
            raise self.state
        return {7: None if self.state is None else SimpleNamespace(value=self.state)}

    def status(self, names, refresh):
        return [{"status": SimpleNamespace(value="UP")}] if self.alive else []

    def api_cancel(self, ids, silent):
        self._call("api_cancel", *ids)
        self.cancelled.set()

    def cancel(self, name, job_ids):
        self._call("cancel", name, job_ids)

    def down(self, name):
        self._call("down", name)


def progress(number):
    return json.dumps({"progress": [number, 3, {}]})


def drive(sdk, tmp_path, place=None, patience=0.2):
    template = TaskTemplate(SkyPlace(**(place or {})), "ours", tmp_path, ["--store", "s3://b"])
    return Driver(sdk, template, patience)


def test_progress_waiting_and_result_come_back(tmp_path):
    sdk = Sky(([progress(1), "a note", '{"waiting": "for it"}', progress(2), json.dumps(DONE)], "SUCCEEDED"))
    events = []
    assert drive(sdk, tmp_path).run(ASKED, events.append) == DONE
    assert events[1:] == [{"progress": [1, 3, {}]}, {"waiting": "for it"}, {"progress": [2, 3, {}]}]
    assert "waits for a machine on any cloud" in events[0]["waiting"]


def test_the_cluster_is_launched_once_and_taken_down_once(tmp_path):
    sdk = Sky(*[([json.dumps(DONE)], "SUCCEEDED")] * 2)
    driver = drive(sdk, tmp_path)
    for _ in range(2):
        driver.run(ASKED, print)
    driver.end()
    driver.end()
    assert sdk.calls == [("launch", "ours"), ("exec", "ours"), ("down", "ours")]


def test_a_cluster_with_a_name_stays_up(tmp_path):
    sdk = Sky(([json.dumps(DONE)], "SUCCEEDED"))
    driver = drive(sdk, tmp_path, {"cluster": "ours"})
    driver.run(ASKED, print)
    driver.end()
    assert ("down", "ours") not in sdk.calls


def test_the_stages_own_error_is_raised(tmp_path):
    error = {"error": {"type": "TooManyFailures", "message": "3 of 8"}}
    with pytest.raises(TooManyFailures, match="3 of 8"):
        drive(Sky(([json.dumps(error)], "FAILED")), tmp_path).run(ASKED, print)


def test_job_without_a_result_shows_its_last_output(tmp_path):
    with pytest.raises(EspalierError, match=r"as FAILED without a result(.|\n)*python: not found"):
        drive(Sky((["python: not found"], "FAILED")), tmp_path).run(ASKED, print)


def test_a_full_disk_on_the_node(tmp_path):
    words = "[Errno 28] No space left on device"
    for line in (f'{{"error": {{"type": "OSError", "message": "{words}"}}}}', f"OSError: {words}: '/x'"):
        with pytest.raises(ResourceError, match=r"disk of a node of ours is full: raise `disk`.*finished work is in"):
            drive(Sky(([line], "FAILED")), tmp_path).run(ASKED, print)


def test_preempted_machine_is_launched_again(tmp_path):
    """The log breaks off; the job is FAILED or unknown, and the cluster no longer exists."""
    sdk = Sky(([progress(1)], "FAILED"), ([ClusterDoesNotExist("gone")], None), ([json.dumps(DONE)], "SUCCEEDED"))
    sdk.alive = False
    events = []
    assert drive(sdk, tmp_path).run(ASKED, events.append) == DONE
    assert [call[0] for call in sdk.calls] == ["launch"] * 3  # the log breaks off without a word, or with an error
    assert sum("lost its machines" in event.get("waiting", "") for event in events) == 2


def test_failed_request_after_loss_of_the_node(tmp_path):
    """On Slurm the ssh command into the allocation fails."""
    sdk = Sky(([progress(1)], CommandError("Slurm job 5 has expired")), ([json.dumps(DONE)], "SUCCEEDED"))
    sdk.alive = False
    assert drive(sdk, tmp_path).run(ASKED, print) == DONE
    sdk = Sky(([progress(1)], CommandError("ssh: broken")))
    with pytest.raises(EspalierError, match="CommandError: ssh: broken"):
        drive(sdk, tmp_path).run(ASKED, print)


def test_number_of_launches_is_limited(tmp_path):
    sdk = Sky(*[([], None)] * 4)
    with pytest.raises(ResourceError, match=r"lost its machines 4 times.*the same command resumes"):
        drive(sdk, tmp_path).run(ASKED, print)


def test_interrupted_log_is_resumed_without_repeated_events(tmp_path):
    broken = ApiServerConnectionError("refused")
    sdk = Sky(([progress(1), broken], "RUNNING"), ([progress(1), progress(2), json.dumps(DONE)], "SUCCEEDED"))
    events = []
    drive(sdk, tmp_path, patience=5).run(ASKED, events.append)
    assert [event["progress"][0] for event in events if "progress" in event] == [1, 2]


def test_unreachable_cluster_ends_the_wait(tmp_path):
    sdk = Sky(*[([ApiServerConnectionError("refused")], "RUNNING")] * 1000)
    with pytest.raises(ResourceError, match=r"unreachable for 0.2 s while train ran there; finished work"):
        drive(sdk, tmp_path).run(ASKED, print)


ERRORS = [
    (NoCloudAccessError("Cloud access is not set up."), r"no access to aws: `sky check`.*docs/guides/cloud\.md"),
    (
        ResourcesUnavailableError("x", [Exception("VcpuLimitExceeded: your quota is 0")]),
        r"H100:1 on aws is not available: VcpuLimitExceeded.*The quota is exceeded: ask the provider",
    ),
    (
        ResourcesUnavailableError("No capacity."),
        r"H100:1 on aws is not available: No capacity\. Choose another infra",
    ),
    (ResourcesMismatchError("H100:1 vs L4:1"), r"up with other resources.*`sky down ours`"),
    (ApiServerConnectionError("refused"), r"API server cannot be reached.*`sky api start`"),
    (KeyError("inner"), r"SkyPilot, ours: KeyError"),
]


def test_errors_of_skypilot_are_converted_with_advice(tmp_path):
    place = {"infra": "aws", "accelerators": "H100:1"}

    def launch(error):
        drive(Sky(launch=error), tmp_path, place).run(ASKED, print)

    assert wrong_refusals(ERRORS, launch, EspalierError) == []


def test_launch_times_out(tmp_path):
    sdk = Sky(launch="never")
    with pytest.raises(
        WaitTimeout, match=r"a machine on any cloud that is enabled was not available within 0.2 s .*launch_timeout"
    ):
        drive(sdk, tmp_path, {"launch_timeout": 0.2}).run(ASKED, print)
    assert ("api_cancel", "launch") in sdk.calls


def test_secrets_come_from_the_environment_alone(tmp_path, monkeypatch):
    sdk = Sky(([json.dumps(DONE)], "SUCCEEDED"))
    monkeypatch.delenv("A_TOKEN", raising=False)
    with pytest.raises(ResourceError, match="A_TOKEN is not set"):
        drive(sdk, tmp_path, {"secrets": ["A_TOKEN"]}).run(ASKED, print)
    monkeypatch.setenv("A_TOKEN", "hidden")
    drive(sdk, tmp_path, {"secrets": ["A_TOKEN"]}).run(ASKED, print)
    assert sdk.tasks[0]["secrets"] == {"A_TOKEN": "hidden"}


def test_an_interruption_in_a_launch_cancels_it(tmp_path):
    sdk = Sky(launch=KeyboardInterrupt())
    driver = drive(sdk, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        driver.run(ASKED, print)
    driver.end()
    assert sdk.calls == [("launch", "ours"), ("api_cancel", "launch"), ("down", "ours")]


def test_a_managed_job(tmp_path):
    sdk = Sky(([progress(1)], "RECOVERING"), ([progress(1), json.dumps(DONE)], "SUCCEEDED"))
    events = []
    assert drive(sdk, tmp_path, {"managed": True}).run(ASKED, events.append) == DONE
    assert sdk.calls == [("jobs.launch", "ours-train")]
    sdk = Sky((['{"waiting": "x"}'], "FAILED_NO_RESOURCE"))
    with pytest.raises(EspalierError, match="FAILED_NO_RESOURCE"):
        drive(sdk, tmp_path, {"managed": True}).run(ASKED, print)


def test_an_interrupted_managed_job_is_cancelled(tmp_path):
    sdk = Sky(([progress(1)], "RUNNING"))

    def interrupt(event):
        if "progress" in event:
            raise KeyboardInterrupt

    driver = drive(sdk, tmp_path, {"managed": True})
    with pytest.raises(KeyboardInterrupt):
        driver.run(ASKED, interrupt)
    driver.end()
    assert sdk.calls[-1] == ("jobs.cancel", [7])


SLOW_TO_LEAVE = """
import signal, sys, time
def leave(*_):
    time.sleep(1.5)
    open(sys.argv[1], "w").close()
    raise SystemExit(130)
signal.signal(signal.SIGTERM, leave)
print('{"waiting": "up"}', flush=True)
time.sleep(60)
"""


def test_stopped_runner_lets_its_driver_take_the_machines_down(tmp_path, monkeypatch):
    """Other runners kill processes that have not ended after `GRACE` seconds."""
    monkeypatch.setattr("components.compute.runners.GRACE", 0.2)
    monkeypatch.setattr(
        "components.compute.sky.runner.DRIVER", (sys.executable, "-c", SLOW_TO_LEAVE, tmp_path / "down")
    )
    monkeypatch.setattr("components.compute.sky.runner.take_snapshot", lambda *_: SimpleNamespace(path=tmp_path))
    runner = SkyRunner(SkyPlace(), "ours", tmp_path, [], StageProcess(tmp_path, tmp_path / "log"))
    with pytest.raises(RunnerStopped):
        runner.run(ASKED, lambda event: runner.stop())
    deadline = time.monotonic() + 600
    while not (tmp_path / "down").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


NEVER_ENDS = """
import sys
for line in sys.stdin:
    print('{"key": "k", "digest": "d", "status": "ran"}', flush=True)
"""


@pytest.mark.parametrize(("cluster", "ending"), [(None, "espalier-ab12-gpu-1 is shut down"), ("ours", "ours stays up")])
def test_runner_of_a_place_names_its_log_and_the_end_of_its_cluster(tmp_path, monkeypatch, cluster, ending):
    monkeypatch.setattr("components.compute.sky.runner.DRIVER", (sys.executable, "-c", NEVER_ENDS))
    monkeypatch.setattr("components.compute.sky.runner.take_snapshot", lambda *_: SimpleNamespace(path=tmp_path))
    lines = []
    context = RunnerContext(
        run="ab12",
        log=tmp_path / "run.log",
        process=StageProcess(tmp_path, tmp_path / "stages.log", distributed=["train"]),
        execute=lambda request, on_event: StageResult("k", "d", "ran"),
        code=tmp_path,
        packages=[],
        say=lines.append,
    )
    runner = SkyPlace(cluster=cluster).runner("GPU_1", context)
    runner.close()  # nothing is up before the first stage
    assert runner.run(ASKED, print) == StageResult("k", "d", "ran")
    assert runner.snapshot.path == tmp_path
    assert json.loads(runner._command[-1])["distributed"] == ["train"]
    runner.close(600)
    assert lines == [f"GPU_1: log of its machines: {tmp_path / 'run.GPU_1.log'}", ending]
    assert not runner.shares_servers
