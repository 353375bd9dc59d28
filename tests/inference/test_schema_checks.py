"""Literals of schemas with special tokens, and annotations, which may have any text."""

from __future__ import annotations

from components.inference.json_schemas import special_literal

SPECIAL = ["<|im_end|>"]
TEXT = "a <|im_end|>"


def test_literals_are_seen_wherever_they_are():
    for schema in (
        {"const": TEXT},
        {"const": {"x": [TEXT]}},
        {"enum": ["b", TEXT]},
        {"pattern": TEXT},
        {"required": [TEXT]},
        {"properties": {TEXT: {}}},
        {"properties": {"description": {"const": TEXT}}},
        {"items": {"anyOf": [{"const": 1}, {"const": TEXT}]}},
        {"$defs": {"x": {"const": TEXT}}},
    ):
        assert special_literal(schema, SPECIAL) == TEXT, schema


def test_other_schemas_have_none():
    annotated = {"description": TEXT, "default": TEXT, "examples": [TEXT]}
    for schema in (None, True, {}, {"const": 1}, annotated, {"enum": ["im_end"]}):
        assert special_literal(schema, SPECIAL) is None, schema
