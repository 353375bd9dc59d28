"""Secrets in overrides, which Hydra's own parser reads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from flows.terminal.overrides import mask_override, parsed_secrets
from tests.redaction.secret_values import ALNUM, SECRET_KEYS, random

pytestmark = [
    pytest.mark.security,
    pytest.mark.filterwarnings("ignore:Do not use the `random` module"),  # other threads of the process do
]
few = settings(max_examples=25, deadline=None)

SHAPES = [
    "{key}={value}",
    "+a.{key}={value}",
    "++a.b={{{key}: {value}, n: 1}}",
    "+a=[1, {{x: [{{{key}: {value}}}]}}]",
    "+a={{'{key}': '{value}'}}",
    '+a={{{key}: "{value}"}}',
    '+a=\'x {{"{key}": "{value}"}}\'',
    "a.{key}={value},other",
    "a.{key}=choice({value},other)",
    "+a={{x: {{{key}: {value}}}}},{{x: 1}}",
    "a={{{key}: {value}",  # cannot be parsed
    "a.{key}={value}\"'",  # cannot be parsed
    "hydra.job.env_set.{key}={value}",
]


@few
@given(key=SECRET_KEYS, value=random(ALNUM, 14).map(lambda text: f"v{text}"))
def test_a_secret_is_found_and_masked_in_every_shape(key, value):
    for shape in SHAPES:
        line = shape.format(key=key, value=value)
        assert parsed_secrets([line]), line
        assert value not in mask_override(line)
        assert value not in repr(parsed_secrets([line]))


def test_other_overrides_stay_as_they_are():
    lines = [
        "algorithm.learning_rate=1e-4",
        "-m",
        "~warmup",
        "+experiment=smoke",
        "algorithm.learning_rate=tag(log, interval(1e-5, 1e-3))",
        "reward.model.key_variable=OPENAI_API_KEY",
        "environment.headers={Authorization: MCP_AUTHORIZATION}",
        "agent.max_tokens=8,16",
        "+reward.model.extra={extra_headers: {Authorization: env:GATEWAY}}",
        "deploy.target.source='env:ARCHIVE'",
        "compute.places.sky_h100.secrets=[HF_TOKEN]",
    ]
    assert [mask_override(line) for line in lines] == lines
    assert not parsed_secrets(lines)


def test_only_the_secret_is_masked():
    assert mask_override("+judge.api_key=abc") == "+judge.api_key=***"
    assert mask_override("store=s3://me:abc@host/x") == "store=s3://me:***@host/x"
    assert mask_override("a={b: {api_key: abc, n: 3}}") == "a={b: {api_key: ***, n: 3}}"
    assert mask_override("a.token=abc,def") == "a.token=***,***"
