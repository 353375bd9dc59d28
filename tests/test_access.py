"""Access of configured values to the world outside of a run: each field that names some declares it."""

import importlib
import inspect
import pkgutil
import re

import pytest

import components
from components.specs import Spec, Target, validate
from components.specs.access import access_at, accesses
from components.specs.marks import declared_access
from components.specs.parameters import settable
from components.specs.registered import registered_name
from flows.experiment.compose import compose
from flows.stages import STAGES

NAMES = re.compile(r"(.*_)?(urls?|path|command|folders?|python|cache|address)|\w*_variable|variables")
"""Names of fields that denote a program, a server, a path or an environment variable."""
BELOW_A_MARK = ("components.compute", "components.deployment.targets")
"""Packages of specs that are only below a field with a mark."""
JUDGE = ["reward=ruler", "reward.model.url=http://h/v1", "reward.model.model=m"]
NO_CONFIGURATION = (
    *("components.inference.chat_completions", "components.inference.app", "components.json"),
    *("flows.agent_tools.course", "flows.train_service.bodies"),
)


def spec_fields():
    """Yield (name, field) of each spec of a configuration, and of each argument of a component."""
    for module in pkgutil.walk_packages(components.__path__, "components."):
        importlib.import_module(module.name)
    pending = [Spec]
    while pending:
        spec = pending.pop()
        pending += spec.__subclasses__()
        if spec.__module__.startswith(("components.", "flows.")) and not spec.__module__.startswith(
            BELOW_A_MARK + NO_CONFIGURATION
        ):
            for name, field in spec.model_fields.items():
                yield f"{spec.__name__}.{name}", name, (*field.metadata, field.annotation)


def component_arguments():
    for module in pkgutil.walk_packages(components.__path__, "components."):
        for component in list(vars(importlib.import_module(module.name)).values()):
            if (inspect.isclass(component) or inspect.isfunction(component)) and registered_name(component):
                for name, parameter in settable(component).items():
                    yield f"{registered_name(component)}.{name}", name, (parameter.annotation,)


def test_fields_and_arguments_that_reach_out_of_a_run_declare_it():
    fields = dict.fromkeys([*spec_fields(), *component_arguments()])
    unmarked = [
        place for place, name, types in fields if NAMES.fullmatch(name) and not any(map(declared_access, types))
    ]
    assert len(fields) > 500
    assert unmarked == []


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        ([], "allow", "runs code"),
        ([], "agent.function", "runs code"),
        ([], "environment._target_", "runs code"),
        ([], "store", "reads or writes files"),
        ([], "tracking.uri", "contacts a server"),
        ([], "notify.url_variable", "reads an environment variable"),
        ([], "compute.places.local.name", "starts a program"),
        (JUDGE, "reward.model.url", "contacts"),
        (JUDGE, "reward.model.extra.x", "contacts"),
        (
            ["reward=ruler", "reward.model.url=http://h/v1", "reward.model.model=m"],
            "reward.model.key_variable",
            "reads",
        ),
    ],
)
def test_a_key_has_the_access_of_its_field(overrides, key, text):
    access = access_at(compose(["+experiment=smoke", *overrides]), key)
    assert access is not None
    assert access.text.startswith(text)


@pytest.mark.parametrize("key", ["rounds", "seed", "algorithm.learning_rate", "environment.seed", "name", "model"])
def test_keys_of_ordinary_settings_have_none(key):
    assert access_at(compose(["+experiment=smoke"]), key) is None


def test_a_component_without_a_registered_name_is_code():
    [reach] = accesses(validate(Target, {"_target_": "components.models.digests.folder_digest"}, allow=()), "reward")
    assert str(reach) == "reward._target_ = components.models.digests.folder_digest runs code"


def test_a_reference_reads_a_variable():
    target = {"_target_": "components.environments.adapters.gym.Gym", "kwargs": {"key": ["env:HOME"]}}
    assert [str(reach) for reach in accesses(validate(Target, target, allow=()))] == [
        "kwargs.key.0 = HOME reads an environment variable"
    ]


def test_a_shard_is_no_stage_of_a_bundle():
    """Its spec is that of another stage, which nothing validates before it runs."""
    spec = STAGES["shard"].spec.model_fields["spec"]
    assert any(map(declared_access, (*spec.metadata, spec.annotation)))
