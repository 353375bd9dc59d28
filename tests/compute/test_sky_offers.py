"""Choice of SkyPilot's optimizer for a place, from a catalog of two machines, offline."""

import json
import os
import subprocess
import sys

import pytest

from components.compute.local.spec import LocalPlace
from components.compute.place import Offer
from components.compute.place import offers as offers_of_all
from components.compute.sky import spec as module
from components.compute.sky.optimizer import CATALOGUE
from components.compute.sky.spec import SkyPlace, offers

VMS = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,Region,SpotPrice
gpu_1x_h100,H100,1.0,26.0,200.0,"{'Gpus': [{'Name': 'H100', 'Manufacturer': 'NVIDIA', 'Count': 1.0, \
'MemoryInfo': {'SizeInMiB': 81920}}], 'TotalGpuMemoryInMiB': 81920}",2.49,us-west-1,
gpu_1x_h100,H100,1.0,26.0,200.0,"{'Gpus': [{'Name': 'H100', 'Manufacturer': 'NVIDIA', 'Count': 1.0, \
'MemoryInfo': {'SizeInMiB': 81920}}], 'TotalGpuMemoryInMiB': 81920}",2.29,us-south-1,
cpu_4x,,,4.0,16.0,,0.11,us-west-1,
"""
LISTED = "from components.compute.sky.optimizer import main; raise SystemExit(main())"
PROGRAM = """
from sky import check, global_user_state, skypilot_config
from sky.clouds import cloud
workspace = skypilot_config.get_active_workspace()
global_user_state.set_enabled_clouds(["Lambda"], cloud.CloudCapability.COMPUTE, workspace)
global_user_state.set_allowed_clouds(check._get_workspace_allowed_clouds(workspace), workspace)
from components.compute.sky.optimizer import main
raise SystemExit(main())
"""


def offered(tmp_path, program):
    """The offers for four places, from the catalog."""
    catalogs = tmp_path / ".sky" / "catalogs" / "v8"
    (catalogs / "lambda").mkdir(parents=True)
    (catalogs / "lambda" / "vms.csv").write_text(VMS)
    (catalogs / "common").mkdir()
    (catalogs / "common" / "accelerators.csv").write_text("AcceleratorName,Clouds\nH100,\"['Lambda']\"\n")
    (catalogs / "common" / "metadata.csv").write_text("GPU,MemoryGB,Manufacturer\nH100,80,NVIDIA\n")
    places = {
        "one": SkyPlace(accelerators="H100:1"),
        "three": SkyPlace(accelerators="H100:1", nodes=3),
        "cpu": SkyPlace(cpus="2+"),
        "none": SkyPlace(accelerators="H100:8"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps({name: place.model_dump() for name, place in places.items()}),
        env={**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return {name: Offer(**offer) for name, offer in json.loads(done.stdout).items()}


@pytest.mark.timeout(1800)
def test_skypilot_chooses_the_cheapest_that_has_what_is_asked_for(tmp_path):
    offer_by_name = offered(tmp_path, PROGRAM)
    assert offer_by_name["one"] == Offer("gpu_1x_h100 on lambda/us-south-1", 2.29)
    assert offer_by_name["three"] == Offer("3 × gpu_1x_h100 on lambda/us-south-1", pytest.approx(6.87))
    assert offer_by_name["cpu"] == Offer("cpu_4x on lambda/us-west-1", 0.11)
    assert offer_by_name["none"].price is None
    assert "H100:8 on any cloud that is enabled is not available" in offer_by_name["none"].problem


@pytest.mark.timeout(1800)
def test_without_credentials_the_price_is_that_of_the_catalogue(tmp_path):
    offer_by_name = offered(tmp_path, LISTED)
    assert offer_by_name["one"] == Offer("gpu_1x_h100 on lambda", 2.29, source=CATALOGUE)
    assert offer_by_name["three"] == Offer("3 × gpu_1x_h100 on lambda", pytest.approx(6.87), source=CATALOGUE)
    assert offer_by_name["cpu"] == Offer("cpu_4x on lambda", 0.11, source=CATALOGUE)
    assert "SkyPilot has no access to any cloud" in offer_by_name["none"].problem


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import sys; sys.exit('it is broken')", "SkyPilot's optimizer failed: it is broken"),
        ("print('no JSON')", "SkyPilot's optimizer failed: Expecting value"),
        ("import time; time.sleep(60)", "SkyPilot's optimizer timed out after 0.5 s"),
    ],
)
def test_no_offer_is_no_error(monkeypatch, program, problem):
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", program))
    (offer,) = offers({"gpu": SkyPlace(accelerators="L4:8")}, 0.5 if "sleep" in program else 60).values()
    assert (offer.machine, offer.price) == ("L4:8 on any cloud that is enabled", None)
    assert offer.problem.startswith(problem)


def test_places_without_a_provider_start_no_process(monkeypatch):
    monkeypatch.setattr(module, "COMMAND", ("/nowhere",))
    assert offers_of_all({}) == offers_of_all({"here": LocalPlace()}) == {}
