"""Literals of schemas with special tokens, and annotations, which may have any text."""

from __future__ import annotations

import pytest

from components.inference.schema_checks import special_literal

SPECIAL = ["<|im_end|>"]
TEXT = "a <|im_end|>"


@pytest.mark.parametrize(
    "schema",
    [
        {"const": TEXT},
        {"const": {"x": [TEXT]}},
        {"enum": ["b", TEXT]},
        {"pattern": TEXT},
        {"required": [TEXT]},
        {"properties": {TEXT: {}}},
        {"properties": {"description": {"const": TEXT}}},
        {"items": {"anyOf": [{"const": 1}, {"const": TEXT}]}},
        {"$defs": {"x": {"const": TEXT}}},
    ],
)
def test_literals_are_seen_wherever_they_are(schema):
    assert special_literal(schema, SPECIAL) == TEXT


@pytest.mark.parametrize(
    "schema",
    [None, True, {}, {"const": 1}, {"description": TEXT, "default": TEXT, "examples": [TEXT]}, {"enum": ["im_end"]}],
)
def test_other_schemas_have_none(schema):
    assert special_literal(schema, SPECIAL) is None
