"""Tests of trajectory tables from untrusted writers."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.errors import ArtifactDamaged
from components.json_text import parse_json, read_json
from components.trajectories.schema import Scenario, Trajectory
from components.trajectories.store import read_trajectories, write_trajectories

pytestmark = pytest.mark.security

NESTED = "[" * 200_000


def test_a_value_that_is_nested_too_deeply_is_damage(tmp_path):
    path = tmp_path / "trajectories.parquet"
    write_trajectories(path, [Trajectory("a", Scenario("s", {}, "train"), 0, [], outcome={"marker": 1})])
    table = pq.read_table(path)
    at = table.column_names.index("outcome")
    table = table.set_column(at, table.schema.field(at), pa.array([NESTED], table.schema.field(at).type))
    pq.write_table(table, path)
    with pytest.raises(ArtifactDamaged, match="nested too deeply"):
        list(read_trajectories(path))


def test_text_that_is_no_json_is_a_value_error(tmp_path):
    path = tmp_path / "summary.json"
    for text in (NESTED, '{"a":' * 50_000, "[" * 300 + "]" * 300, "", "nan", "\udc80", '"\\ud800"'):
        with pytest.raises(ValueError, match=r"."):
            parse_json(text)
        path.write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(ArtifactDamaged, match=r"summary\.json is no valid JSON .*Put it back"):
            read_json(path)


def test_json_is_read_as_it_was_written():
    assert parse_json('{"a": [1, 0.1, null, "\\u00e9"], "b": 123456789012345678901}') == {
        "a": [1, 0.1, None, "\u00e9"],
        "b": 123456789012345678901,
    }
