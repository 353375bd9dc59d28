"""The tiny model, an adapter for it, and transformers' own model on the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.deployment.tiny import TINY, write_adapter
from tests.inference.fake import environment as fake_environment


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory) -> Path:
    from components.models.weights import prepare

    return prepare(TINY, tmp_path_factory.getbasetemp() / "models")


@pytest.fixture(scope="session")
def adapter_dir(base_dir, tmp_path_factory) -> Path:
    return write_adapter(base_dir, tmp_path_factory.mktemp("adapters") / "trained", seed=1)


@pytest.fixture(scope="session")
def reference(base_dir):
    """The model as transformers runs it, one sequence at a time, without a cache."""
    from components.models.weights import load_model

    return load_model(base_dir)


@pytest.fixture
def make_engine(base_dir):
    """Makes engines on the tiny model."""
    from components.inference.transformers.engine import TransformersEngine

    def make(folder: Path = base_dir, *, max_length: int = 512, **options):
        return TransformersEngine(folder, max_length=max_length, device="cpu", **options)

    return make


@pytest.fixture
def engine(make_engine):
    return make_engine()


@pytest.fixture
def echo():
    """An engine that answers with what it was asked, under the base policy, and its server."""
    from components.inference.server import ModelServer
    from tests.inference.test_server import EchoEngine

    engine = EchoEngine()
    engine.policy = "base"
    with ModelServer(engine, "shop") as server:
        yield engine, server


@pytest.fixture(scope="session")
def adapters(adapter_dir, tmp_path_factory) -> Path:
    """A folder with the adapter, `trained`, and damaged ones beside it."""
    from tests.inference.malformed import damaged_adapters

    folder = tmp_path_factory.mktemp("attacked") / "adapters"
    shutil.copytree(adapter_dir, folder / "trained")
    damaged_adapters(folder / "trained", folder)
    return folder


@pytest.fixture(scope="session")
def attacked(base_dir, adapters, tmp_path_factory):
    """Our server on the tiny model, in a process of its own; `adapters` is its folder of adapters."""
    from tests.inference.victim import victim

    with victim(base_dir, adapters, tmp_path_factory.mktemp("attacked") / "server.log") as running:
        yield running


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """Python of an environment with the small server as vLLM."""
    return fake_environment(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def start(python, base_dir, tmp_path):
    """Return a factory of servers, which are closed after the test."""
    instances = []

    def make(model_dir: Path = base_dir, **values):
        from components.inference.engines.vllm import VllmSpec
        from components.inference.vllm.server import VllmServer

        fault = {"arguments": {"fault": values.pop("fault")}} if "fault" in values else {}
        spec = VllmSpec(**{"python": python, "start_timeout": 20, "retry_for": 10, "prove": False, **fault, **values})
        instances.append(VllmServer(spec, TINY, model_dir, tmp_path / "logs" / "vllm.log", tmp_path / "compiled"))
        instances[-1].wait()
        return instances[-1]

    yield make
    for instance in instances:
        instance.close()


@pytest.fixture
def connect(base_dir):
    """Return a factory of checked engines, which are closed after the test."""
    instances = []

    def make(*servers, ours: bool = True, **values):
        from components.inference.vllm.engine import VllmEngine

        spec = servers[0].spec.model_copy(update=values)
        urls = [server.url for server in servers]
        watch = {"watch": servers[0].check} if ours else {}
        sizes = {"max_length": TINY.max_length, "dtype": TINY.dtype}
        instances.append(VllmEngine(spec, base_dir, urls=urls, ours=ours, **sizes, **watch))
        instances[-1].check()
        return instances[-1]

    yield make
    for instance in instances:
        instance.close()
