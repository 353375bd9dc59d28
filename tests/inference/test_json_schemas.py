"""Schemas before their grammar: numbers are narrowed to finite ones; literals may have no special tokens."""

from __future__ import annotations

import json
from importlib.util import find_spec

import jsonschema
import pytest

from components.inference.json_schemas import special_literal, with_finite_numbers

NUMBER = {"type": "number"}
CASES = [
    (NUMBER, ["1.5", "-3", "999999999999999"], ["1e999", "7725550337e9542"]),
    ({"type": ["number", "null"]}, ["null", "0.25"], ["1e999"]),
    ({"type": "number", "minimum": 3}, ["3.5"], ["-2", "1e999"]),
    ({"type": "number", "maximum": -1e16}, ["-10000000000000001"], ["-1e999"]),
    ({}, ["1.5", '{"a":[1,{"b":2.5}]}', "null", '"x"'], ["1e999", "[1e999]"]),
    ({"type": "object"}, ['{"a":{"b":[1,"x",true]}}'], ['{"a":1e999}']),
    ({"type": "array"}, ["[1]"], ["[1e999]"]),
    ({"$ref": "#/$defs/n", "$defs": {"n": NUMBER}}, ["1.5"], ["1e999"]),
    ({"anyOf": [NUMBER, {"type": "string"}]}, ["1", '"1e999"'], ["1e999"]),
]


@pytest.mark.skipif(find_spec("llguidance") is None, reason="llguidance is not installed")
def test_the_grammar_of_the_narrower_schema_has_no_number_that_overflows():
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")

    def accepts(grammar: str, text: str) -> bool:
        tokens = tokenizer.tokenize_str(text)
        return LLMatcher(tokenizer, grammar, log_level=0).validate_tokens(tokens) == len(tokens)

    for schema, allowed, refused in CASES:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(with_finite_numbers(schema)))
        assert [text for text in allowed if not accepts(grammar, text)] == [], schema
        assert [text for text in refused if accepts(grammar, text)] == [], schema


def test_what_the_narrower_schema_allows_the_schema_allows():
    for schema, allowed, _ in CASES:
        for text in allowed:
            jsonschema.validate(json.loads(text), with_finite_numbers(schema))
            jsonschema.validate(json.loads(text), schema)


def test_what_is_no_schema_is_left_to_the_compiler():
    assert (with_finite_numbers(True), with_finite_numbers(None)) == (True, None)
    schema = {"properties": {"a": 3}, "anyOf": {}, "type": 4}
    assert with_finite_numbers(schema)["properties"] == schema["properties"]


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
