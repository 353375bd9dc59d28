"""Secrets in nested data: found at any position, reported by key, and masked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from components.errors import ResourceError, SpecError
from components.redaction import MASK, Secret, dereference, mask, mask_text, refuse_secrets, secrets_in
from components.redaction.data import problems
from components.specs import Target
from tests.redaction.secret_values import ALNUM, ORDINARY, ORDINARY_KEYS, SECRET_KEYS, TOKENS, random

pytestmark = [
    pytest.mark.security,
    pytest.mark.filterwarnings("ignore:Do not use the `random` module"),  # other threads of the process do
]
few = settings(max_examples=25, deadline=None)

PLACES = {
    "value": lambda key, value: {key: value},
    "nested": lambda key, value: {"a": {"b": {key: value}}},
    "list": lambda key, value: {"a": [{"x": 1}, {key: value}]},
    "list below": lambda key, value: {key: [value]},
    "mapping below": lambda key, value: {key: {"x": value}},
    "deep below": lambda key, value: {key: [{"x": ["y", {"z": value}]}]},
}


@pytest.mark.parametrize("place", PLACES)
@few
@given(key=SECRET_KEYS, value=random(ALNUM, 12))
def test_a_value_under_a_secret_key_is_found_at_any_depth(place, key, value):
    data = PLACES[place](key, value)
    assert secrets_in(data)
    assert value not in repr(mask(data))


def test_environment_access_prefix_does_not_hide_a_secret(subtests):
    for value in ["env00000000A", "environment7", "getenv123456"]:
        with subtests.test(value=value):
            assert secrets_in({"api_key": value})


def test_an_access_to_the_environment_is_no_secret(subtests):
    for value in ["os.environ['KEY']", "process.env.KEY", "env(KEY)", "env.KEY", "getenv(KEY)"]:
        with subtests.test(value=value):
            assert not secrets_in({"api_key": value})


@pytest.mark.parametrize("place", PLACES)
@few
@given(key=ORDINARY_KEYS, value=st.one_of(*TOKENS.values()))
def test_a_secret_by_its_form_is_found_under_any_key(place, key, value):
    data = PLACES[place](key, value)
    assert secrets_in(data)
    assert value not in repr(mask(data))


@few
@given(st.recursive(ORDINARY, lambda inside: st.lists(inside) | st.dictionaries(ORDINARY_KEYS, inside), max_leaves=20))
def test_ordinary_data_is_accepted_and_unchanged(data):
    assert not secrets_in({"data": data})
    assert mask({"data": data}) == {"data": data}


def test_secret_is_found_in_unusual_positions(subtests):
    for data in [
        {"command": ["python", "server.py", "--api-key", "zq81kd02mfp"]},
        {"command": ["python", "server.py", "--api-key=zq81kd02mfp"]},
        {"env": [{"name": "HF_TOKEN", "value": "zq81kd02mfp"}]},
        {"headers": [["Authorization", "zq81kd02mfp"]]},
        {"headers": {"Authorization": "zq81kd02mfp"}},
        {"secrets": ["zq81kd02mfp"]},
        {"key_variable": "zq81kd02mfpAB12xyzKL90"},
        {"db": {"password": 27182818}},
        {"ghp_abcdefghijklmnop1234567890": 1},
        {"setup": "pip install x\nexport HF_TOKEN=zq81kd02mfp\n"},
        {"args": {"auth": {"type": "basic", "value": "zq81kd02mfp"}}},
    ]:
        with subtests.test(data=data):
            secrets = secrets_in(data)
            assert secrets
            shown = repr((secrets, mask(data)))
            assert not any(value in shown for value in ("zq81kd02mfp", "27182818", "ghp_"))


def test_references_and_placeholders_are_accepted(subtests):
    for data in [
        {"key_variable": "OPENAI_API_KEY", "source_key_variable": "HF_TOKEN"},
        {"headers": {"Authorization": "MCP_AUTHORIZATION"}},
        {"secrets": ["HF_TOKEN", "WANDB_API_KEY"]},
        {"extra": {"extra_headers": {"Authorization": "env:GATEWAY_HEADER"}}},
        {"auth": "basic", "password": None, "token": 3, "secret": "", "api_key": "EMPTY", "cookies": False},
        {"auth": {"type": "oauth2", "url": "https://h/login", "user": "me"}},
        {"api_key": "${oc.env:X}", "token": "<your token>", "password": "???"},
        {"dsn": "postgresql://me@db.example.com/x"},
    ]:
        with subtests.test(data=data):
            assert not secrets_in(data)
            assert mask(data) == data


def test_masking_leaves_the_rest_alone():
    config = {
        "a": {"api_key": "s3cret", "password": None, "token": 3, "secrets": ["one", {"x": "two"}]},
        "url": "postgresql://user:s3cret@host/db",
        "plain": ["https://host/path@v1", 1.5, True, None],
    }
    assert mask(config) == {
        "a": {"api_key": "***", "password": None, "token": 3, "secrets": ["***", {"x": "***"}]},
        "url": "postgresql://user:***@host/db",
        "plain": ["https://host/path@v1", 1.5, True, None],
    }
    assert not secrets_in(mask(config))


def test_a_refusal_names_every_key_and_no_value():
    data = {"a": {"api_key": "zq81kd02mfp"}, "b": ["https://zq81kd02mfp@host"], "tracking": {"uri": "db://u:zq81@h"}}
    with pytest.raises(SpecError) as refused:
        refuse_secrets(data)
    text = str(refused.value)
    assert [problem.path for problem in refused.value.problems] == ["a.api_key", "b", "tracking.uri"]
    assert "zq81" not in text
    assert "tracking.uri=env:NAME" in text


def test_a_reference_is_resolved_when_the_target_is_built_and_not_before(monkeypatch):
    spec = Target.model_validate({"_target_": "components.environments.worlds.shop.Shop", "seed": 3})
    assert spec.build()._scenarios
    monkeypatch.setenv("PLANTED", "zq81kd02mfp")
    target = {"_target_": "tests.redaction.planted.Holder", "settings": {"a": ["env:PLANTED"]}, "name": "env:PLANTED"}
    spec = Target.model_validate(target, context={"allow": ["tests"]})
    assert "zq81" not in repr((spec, spec.resolved(), spec.model_dump()))
    built = spec.build()
    assert built.settings == {"a": ["zq81kd02mfp"]}
    assert built.name == "zq81kd02mfp"
    assert mask_text("it says zq81kd02mfp") == f"it says {MASK}"
    monkeypatch.delenv("PLANTED")
    with pytest.raises(ResourceError, match="PLANTED is not set"):
        spec.build()


def test_an_argument_that_does_not_declare_it_may_not_hold_a_reference(monkeypatch, subtests):
    for value in ["env:PLANTED", ["env:PLANTED"], {"a": {"b": "env:PLANTED"}}]:
        with subtests.test(value=value):
            monkeypatch.setenv("PLANTED", "zq81kd02mfp")
            for target in ("tests.redaction.planted.Undeclared", "tests.redaction.planted.Free"):
                with pytest.raises(ValidationError, match="may not hold a reference"):
                    Target.model_validate({"_target_": target, "value": value}, context={"allow": ["tests"]})


def test_a_reference_stands_for_a_whole_value(monkeypatch):
    monkeypatch.setenv("PLANTED", "x")
    assert dereference({"a": "env:PLANTED", "b": "Bearer env:PLANTED", "c": 1}, "k") == {
        "a": "x",
        "b": "Bearer env:PLANTED",
        "c": 1,
    }


TAKEN = {
    "environment.settings.api_key": "environment.settings.api_key=env:NAME, if the argument declares it (REFERENCE)",
    "evaluate.reward.token": "evaluate.reward.token=env:NAME",
    "tracking.uri": "tracking.uri=env:NAME",
    "reward.model.api_key": "reward.model.key_variable=NAME",
    "inference.api_key": "inference.key_variable=NAME",
    "warmup.teacher.inference.api_key": "warmup.teacher.inference.key_variable=NAME",
}
NOT_TAKEN = ["name", "root", "rounds", "seed", "agent.max_tokens", "collect.token", "model.name", "allow", "--tag"]


def test_a_refusal_names_what_takes_the_secret(subtests):
    for path in TAKEN:
        with subtests.test(path=path):
            (problem,) = problems([Secret(path, "a token")])
            assert f"the name of an environment variable in its place: {TAKEN[path]}" in problem.message


def test_error_proposes_no_reference_if_none_is_read(subtests):
    for path in NOT_TAKEN:
        with subtests.test(path=path):
            (problem,) = problems([Secret(path, "a token")])
            assert "env:" not in problem.message
            assert "variable" not in problem.message
            assert problem.message.endswith("expected no secret: nothing reads one here")
