"""Rendered SkyPilot tasks: golden files, validated by SkyPilot itself, offline."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from components.compute.sky.spec import SkyPlace
from components.compute.sky.task import REQUEST, TaskTemplate, render, requirements
from components.specs import validate
from flows.experiment.config_loader import CONF
from flows.stages import DISTRIBUTED
from tests.refusals import wrong_refusals

ROOT = Path(__file__).parent.parent.parent
GOLDEN = Path(__file__).parent / "sky_golden"
PLACES = sorted((CONF / "place").glob("sky_*.yaml"))
RUNS = sorted((ROOT / "sky").glob("*.yaml"))
ASKED = {"stage": "reward_model", "spec": {"steps": 2}, "inputs": {"trajectories": "ab" * 32}, "seed": 0, "allow": []}
OPTIONS = ["--store", "s3://bucket/it's mine", "--lock-timeout", "60.0"]
FULL = {
    "infra": "aws",
    "accelerators": "L4:8",
    "cpus": "32+",
    "memory": "128+",
    "disk": 512,
    "use_spot": True,
    "image_id": "docker:example/image:1",
    "nodes": 2,
    "processes": 8,
    "strategy": "fsdp",
    "cluster": "ours",
    "autostop": 30,
    "down": False,
    "root": "/mnt/shared disk/espalier",
    "python": "~/env/bin/python",
    "setup": "module load cuda\n",
    "envs": {"NCCL_DEBUG": "INFO"},
    "secrets": ["HF_TOKEN"],
}


class Blocks(yaml.SafeDumper):
    """Represent multi-line scripts as YAML block literals."""

    def represent_str(self, data):
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


Blocks.add_representer(str, Blocks.represent_str)


def rendered(place):
    envs = {"OMP_NUM_THREADS": "4", **place.get("envs", {})}
    template = TaskTemplate(
        SkyPlace(**{**place, "envs": envs}),
        "name",
        Path("/snapshots/0123456789abcdef"),
        OPTIONS,
        distributed=DISTRIBUTED,
    )
    return render(template, ASKED)


CASES = {path.stem: yaml.safe_load(path.read_text()) for path in PLACES} | {"everything": FULL}


def test_golden():
    """Rewritten with UPDATE_GOLDEN=1; review the difference before a commit."""
    for name, place in CASES.items():
        text = yaml.dump(rendered(place), Dumper=Blocks, sort_keys=False, width=110)
        file = GOLDEN / f"{name}.yaml"
        if os.environ.get("UPDATE_GOLDEN"):
            file.write_text(text)
        assert file.read_text() == text, name


VALIDATE = """
import sys, yaml, sky
print(sky.__file__)
for file in sys.argv[1:]:
    with open(file) as text:
        config = yaml.safe_load(text)
    config.pop("workdir", None)
    task = sky.Task.from_yaml_config(config, secrets_overrides=[(name, "x") for name in config.get("secrets", {})])
    dag = sky.Dag(); dag.add(task)
    print(task.name, task.num_nodes, task.resources)
"""


def test_skypilot_finds_the_golden_files_valid_and_is_found_from_the_root(tmp_path):
    catalogs = tmp_path / ".sky" / "catalogs" / "v8" / "common"  # else it would fetch them
    catalogs.mkdir(parents=True)
    (catalogs / "accelerators.csv").write_text("AcceleratorName,Clouds\nH100,\"['AWS']\"\nL4,\"['AWS']\"\n")
    (catalogs / "metadata.csv").write_text("GPU,MemoryGB,Manufacturer\nH100,80,NVIDIA\nL4,24,NVIDIA\n")
    command = [sys.executable, "-W", "ignore", "-c", VALIDATE, *map(str, [*sorted(GOLDEN.iterdir()), *RUNS])]
    environment = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    first, *tasks = done.stdout.splitlines()
    assert not first.startswith(str(ROOT / "sky"))
    assert len(tasks) == len(CASES) + len(RUNS)  # no golden file is left over
    assert "L4" in tasks[0]


def test_sky_folder_contains_no_python():
    """A package there would hide SkyPilot from code that runs in the root."""
    assert RUNS
    assert not list((ROOT / "sky").rglob("*.py"))


def test_the_stage_gets_its_request_whatever_is_in_it(tmp_path):
    asked = {**ASKED, "spec": {"text": 'it\'s "quoted" $HOME `ls` \\n ü\n'}}
    place = SkyPlace(root=str(tmp_path / "a b"), python=str(tmp_path / "show"))
    task = render(TaskTemplate(place, "name", tmp_path, OPTIONS), asked)
    (tmp_path / "show").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$0.args"; cat "$4" > "$0.request"\n')
    (tmp_path / "show").chmod(0o755)
    subprocess.run(["bash", "-c", task["run"]], env={**os.environ, **task["envs"]}, check=True, timeout=600)
    arguments = (tmp_path / "show.args").read_text().splitlines()
    assert arguments[:3] == ["-m", "flows.stage", "--request"]
    assert arguments[4:] == [f"root={tmp_path / 'a b'}", *OPTIONS]
    assert json.loads((tmp_path / "show.request").read_text()) == asked == json.loads(task["envs"][REQUEST])


VLLM = {"name": "vllm"}
NEEDS = [
    ({"spec": {"inference": {"name": "embedded"}}}, "s3://b", ""),
    ({"spec": {"inference": VLLM}}, "gs://b/p", "--package gcsfs --vllm"),
    ({"spec": {"inference": {**VLLM, "python": "/opt/vllm/bin/python"}}}, "file:///shared", ""),
    ({"spec": {"inference": {**VLLM, "urls": ["http://127.0.0.1:8000/v1"]}}}, "file:///shared", ""),
    ({"spec": {"inference": VLLM, "actor": "solver"}}, "file:///shared", ""),
    ({"spec": {"spec": {"collect": {"teacher": {"inference": VLLM}}}, "count": 2}}, "file:///shared", "--vllm"),
    ({"spec": {"data": {"path": "abfs://c/rows.jsonl"}}}, "gs://b", "--package adlfs --package gcsfs"),
]


def test_a_machine_installs_what_the_stage_needs():
    wrong = [
        (request, store, options)
        for request, store, options in NEEDS
        if " ".join(requirements(request, ["--store", store])) != options
    ]
    assert wrong == []


@pytest.fixture
def node(tmp_path):
    """A machine: a copy of the scripts, and a folder of programs in place of those that download."""
    for name in ("requirements", "bin"):
        (tmp_path / name).mkdir()
    for file in (ROOT / "requirements").iterdir():
        shutil.copy(file, tmp_path / "requirements")
    python = f'''mkdir -p "$3/bin"
        printf '#!/bin/sh\\nexec {sys.executable} "$@"' >"$3/bin/python"; chmod 755 "$3/bin/python"'''
    programs = {
        "python3": 'case "$*" in *--target*) mkdir -p "$7/bin" && cp "$(dirname "$0")/stand-in" "$7/bin/uv";; esac',
        "stand-in": f"""echo "$*" >>"$LOG"
case "$1 $*" in
    *only-managed*) [ -n "$MANAGED" ] || exit 2; set -- 1 2 "$7"; {python} ;;
    *only-system*) [ -n "$SYSTEM" ] || exit 2; set -- 1 2 "$7"; {python} ;;
esac""",
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def run(*options, expected=0, **environment):
        show = "import os; print('runs', os.environ.get('ESPALIER_VLLM_PYTHON', ''))"
        done = subprocess.run(
            [tmp_path / "requirements" / "node.sh", tmp_path / "environments", *options, "--", "-c", show],
            env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path), "LOG": str(tmp_path / "log")}
            | {"MANAGED": "yes", "SYSTEM": ""}
            | environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == expected, done.stderr
        return done.stdout.splitlines()

    run.log = tmp_path / "log"
    run.folder = tmp_path
    return run


INSTALLING = '{"waiting": "installing packages on the machine"}'


def test_processes_of_a_machine_share_one_installation(node):
    with ThreadPoolExecutor(3) as pool:
        lines = [future.result() for future in [pool.submit(node) for _ in range(3)]]
    assert sorted(lines) == sorted([[INSTALLING, "runs "], ["runs "], ["runs "]])
    assert node("--package", "gcsfs") == [INSTALLING, "runs "]
    *_, calls = node.log.read_text().splitlines()
    assert calls.endswith("-r requirements/lock.txt gcsfs")
    (node.folder / "requirements" / "lock.txt").write_text("torch==9\n")
    assert node() == [INSTALLING, "runs "]


def test_nodes_that_share_a_folder_install_on_their_own_disks(node):
    script = node.folder / "requirements" / "node.sh"
    script.write_text(script.read_text().replace("/var/tmp/", f"{node.folder}/disk-"))
    assert node(SKYPILOT_NUM_NODES="2") == [INSTALLING, "runs "]
    assert [path.name.partition("-")[0] for path in node.folder.glob("disk-*/*")].count("packages") == 2  # and its lock
    assert not (node.folder / "environments").exists()


def test_vllm_has_an_environment_of_its_own(node):
    waiting, packages, run = node("--vllm")
    assert (waiting, packages) == (INSTALLING.replace("packages", "vllm"), INSTALLING)
    assert Path(run.removeprefix("runs ")).is_relative_to(node.folder / "environments")
    assert node("--vllm") == [run]


def test_a_machine_without_a_suitable_python_says_what_to_do(node):
    assert node(MANAGED="", SYSTEM="yes")[-1] == "runs "
    (line,) = node("--package", "adlfs", MANAGED="", expected=1)[1:]
    assert json.loads(line)["error"]["message"].startswith("uv cannot fetch Python 3.11, and the machine has neither")


def test_an_old_driver_takes_its_build_of_torch_and_refuses_vllm(node):
    program = node.folder / "bin" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 535.129.03\n")
    program.chmod(0o755)
    stand_in = node.folder / "bin" / "stand-in"
    stand_in.write_text(stand_in.read_text().replace('"$*"', '"$* ${UV_TORCH_BACKEND:-}"', 1))
    node()
    assert node.log.read_text().endswith(" auto\n")
    (line,) = node("--vllm", expected=1)
    assert "vLLM needs NVIDIA's driver 580, but the machine has 535.129.03" in json.loads(line)["error"]["message"]


MISTAKES = [
    ({"secrets": ["TOKEN=abc"]}, "secrets: holds a secret (a value of TOKEN)"),
    ({"envs": {"SKYPILOT_NODE_IPS": "x"}}, "SKYPILOT_NODE_IPS is reserved for"),
    ({"managed": True, "cluster": "ours"}, "a managed job has machines of its own"),
    ({"infra": "slurm/here"}, "not supported on Slurm; expected null"),
    ({"envs": {"A": "1"}, "secrets": ["A"]}, "A: secrets has the same names"),
    ({"nodes": 0}, "nodes"),
    ({"cluster": "My_Cluster"}, "cluster"),
    ({"accelerator": "H100"}, "accelerators"),
]


def test_mistakes_in_a_place():
    cases = [(wrong, re.escape(words)) for wrong, words in MISTAKES]
    assert wrong_refusals(cases, lambda wrong: validate(SkyPlace, wrong)) == []
