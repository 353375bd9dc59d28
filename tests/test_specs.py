"""Specs: accepted values, and errors with key path and the nearest valid name."""

from __future__ import annotations

import pickle
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal

import pytest
from pydantic import Field, HttpUrl, ValidationError, model_validator

from components.errors import SpecError
from components.specs import FieldError, Spec, Target, names_below, nearest, validate
from components.specs.wording import first_problem


class Left(Spec):
    name: Literal["left"] = "left"
    size: int = Field(1, ge=1)


class Right(Spec):
    name: Literal["right"] = "right"
    colour: Literal["red", "green"] = "red"


class Part(Spec):
    weight: float = 1.0
    names: str | list[str] = "all"


Side = Annotated[Left | Right, Field(discriminator="name")]


class Whole(Spec):
    side: Side
    sides: Side | list[Side] | None = None
    part: Part = Part()
    parts: list[Part] = []
    places: dict[Literal["here", "there"], int] = {}
    thing: Target | None = None
    count: int = 0

    @classmethod
    def cross_problems(cls, parts):
        from components.errors import Problem

        if "count" in parts and "part" in parts and parts["count"] > parts["part"].weight:
            yield Problem("count", "is more than part.weight")


def mistakes(data, **options):
    with pytest.raises(SpecError) as caught:
        validate(Whole, data, **options)
    return {problem.path: problem for problem in caught.value.problems}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Yield a function that writes modules of a user's package `mine`; they are unloaded afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()

    def write(name: str, source: str):
        (tmp_path / "mine" / f"{name}.py").write_text(textwrap.dedent(source))

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def target(name: str, allow=("mine",), **arguments) -> Target:
    return validate(Target, {"_target_": name, **arguments}, allow=allow)


def refusal(name: str, allow=("mine",), **arguments) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        target(name, allow, **arguments)
    return {problem.path: str(problem) for problem in caught.value.problems}


# --- specs ----------------------------------------------------------------------------------------------------------


def test_a_valid_spec_is_typed_and_immutable():
    whole = validate(Whole, {"side": {"name": "right", "colour": "green"}, "part": {"weight": 2}})
    assert whole.side == Right(colour="green")
    assert whole.part.weight == 2.0
    with pytest.raises(ValueError, match="frozen"):
        whole.count = 3


def test_all_mistakes_are_reported_at_once():
    problems = mistakes(
        {
            "side": {"name": "left", "size": 0, "sise": 3},
            "part": {"weight": "heavy"},
            "parts": [{"weight": 1}, {"wieght": 2}],
            "places": {"here": 1, "their": 2},
            "cuont": 3,
        }
    )
    assert set(problems) == {"side.size", "side.sise", "part.weight", "parts.1.wieght", "places.their", "cuont"}
    assert "at least 1" in problems["side.size"].message
    assert "'heavy'" in problems["part.weight"].message
    assert "a number" in problems["part.weight"].message
    assert problems["side.sise"].nearest == "side.size"
    assert problems["parts.1.wieght"].nearest == "parts.1.weight"
    assert problems["places.their"].nearest == "there"
    assert problems["cuont"].nearest == "count"


class Thing:
    """Class that plain data is no instance of."""


class Colour(Enum):
    RED = "red"
    GREEN = "green"


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("annotation", "value", "words"),
    [
        (Annotated[dict[str, int], Field(min_length=1)], {}, "{}: expected at least 1 entry"),
        (Annotated[list[int], Field(min_length=2)], [1], "[1]: expected at least 2 entries"),
        (Annotated[list[int], Field(max_length=1)], [1, 2], "[1, 2]: expected at most 1 entry"),
        (Annotated[str, Field(min_length=1)], "", "'': expected text of at least 1 character"),
        (Annotated[str, Field(max_length=2)], "abc", "'abc': expected text of at most 2 characters"),
        (Annotated[str, Field(pattern="^a")], "b", "'b': expected text that matches ^a"),
        (Annotated[int, Field(multiple_of=8)], 9, "9: expected a multiple of 8"),
        (int, "9" * 5000, f"{'9' * 76!r:.77}...: expected a whole number"),
        (Literal[8, 16], 9, "9: expected one of 8, 16"),
        (Colour, "blue", "'blue': expected one of red, green"),
        (Part, 3, "3: expected a mapping of keys to values"),
        (Point, 3, "3: expected a mapping of keys to values"),
        (Sequence[int], 3, "3: expected a list"),
        (Sequence[int], "ab", "'ab': expected a list"),
        (tuple[int, int], 3, "3: expected a list"),
        (set[int], 3, "3: expected a list"),
        (Mapping[str, int], 3, "3: expected a mapping of keys to values"),
        (HttpUrl, "here", "'here': expected a URL, such as https://HOST:PORT"),
        (Thing, 3, '3: expected a Thing: {"_target_": "package.module.Name", ...}'),
        (Callable[[], int], 3, '3: expected a function: {"_target_": "package.module.Name", ...}'),
    ],
)  # fmt: skip
def test_every_kind_of_invalid_value_is_described_without_pydantics_words(annotation, value, words):
    class Holder(Spec):
        model_config = {**Spec.model_config, "arbitrary_types_allowed": True}
        value: annotation

    with pytest.raises(SpecError) as caught:
        validate(Holder, {"value": value})
    assert [str(problem) for problem in caught.value.problems] == [f"value: {words}"]


def test_a_check_of_several_fields_names_one_of_them():
    class Range(Spec):
        low: int
        high: int

        @model_validator(mode="after")
        def _ordered(self):
            if self.low > self.high:
                raise FieldError("low", f"{self.low}: more than high={self.high}; expected at most {self.high}")
            return self

    class Holder(Spec):
        ranges: list[Range]

    with pytest.raises(SpecError) as caught:
        validate(Holder, {"ranges": [{"low": 1, "high": 2}, {"low": 2, "high": 1}]})
    assert [str(problem) for problem in caught.value.problems] == [
        "ranges.1.low: 2: more than high=1; expected at most 1"
    ]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"parts": [{"weight": "x"}], "side": {"name": "left"}}, "parts.0.weight: 'x': expected a number"),
        ({"side": {"name": "left"}, "cuont": 1}, "cuont: no such key"),
        ({}, "side: needs a value"),
        (3, "3: expected a mapping of keys to values"),
    ],
)
def test_the_first_problem_is_one_line(data, line):
    with pytest.raises(ValidationError) as caught:
        Whole.model_validate(data)
    assert first_problem(caught.value) == line


def test_a_misspelt_choice_names_the_valid_ones():
    problems = mistakes({"side": {"name": "rihgt"}, "part": {"names": 3}})
    assert problems["side.name"].nearest == "right"
    assert "left, right" in problems["side.name"].message
    assert problems["part.names"].message == "3: expected text or a list"
    assert mistakes({"side": {"name": "right", "colour": "gren"}})["side.colour"].nearest == "green"


@pytest.mark.parametrize(
    ("sides", "wrong"),
    [
        ({"name": "left", "size": 0}, {"sides.size"}),
        ({"name": "left", "size": "???"}, {"sides.size"}),
        ([{"name": "left", "size": 0}], {"sides.0.size"}),
        ([{"name": "left"}, {"name": "rihgt"}], {"sides.1.name"}),
        (3, {"sides"}),
    ],
)
def test_union_of_item_and_list_reports_only_inner_problems(sides, wrong):
    assert set(mistakes({"side": {"name": "left"}, "sides": sides})) == wrong


def test_missing_values_say_how_to_give_them():
    assert "side.name=VALUE" in mistakes({"side": {}})["side.name"].message
    problems = mistakes({"side": {"name": "left", "size": "???"}, "count": "???"})
    assert set(problems) == {"side.size", "count"}
    assert problems["count"].message == "needs a value: count=VALUE"


def test_mistakes_between_fields_are_reported_with_mistakes_of_fields():
    assert set(mistakes({"side": {"name": "up"}, "count": 5})) == {"side.name", "count"}
    assert "count" not in mistakes({"side": {"name": "up"}, "count": 5, "part": {"weight": "x"}})


def test_numbers_are_finite_and_paths_may_have_a_prefix():
    side = {"name": "left"}
    assert "part.weight" in mistakes({"side": side, "part": {"weight": float("inf")}})
    assert set(mistakes({"side": side, "count": "x"}, path="stage")) == {"stage.count"}
    with pytest.raises(SpecError):
        validate(Whole, [1])


def test_names_below_follows_unions_lists_and_targets():
    data = {"side": {"name": "right"}, "parts": [{}], "thing": {"_target_": "components.errors.Problem"}}
    assert names_below(Whole, data, ["side"]) == ["name", "colour"]
    assert names_below(Whole, data, ["parts", 0]) == ["weight", "names"]
    assert names_below(Whole, data, ["thing"]) == ["_target_", "path", "message", "nearest"]
    assert names_below(Whole, data, ["count"]) == []


def test_nearest_compares_the_last_part_where_the_whole_differs():
    assert nearest("algoritm.learning_rate", ["algorithm.learning_rate", "seed"]) == "algorithm.learning_rate"
    assert nearest("lr_warmup", ["seed"]) is None


# --- targets --------------------------------------------------------------------------------------------------------


def test_a_class_is_built_with_converted_arguments(package):
    package(
        "envs",
        """
        from typing import Annotated
        from pydantic import Field
        class World:
            def __init__(self, size: Annotated[int, Field(ge=1)], kind: str = "flat", *, seed=0):
                self.given = (size, kind, seed)
        """,
    )
    world = target("mine.envs.World", size=3.0, seed=7)
    assert world.build().given == (3, "flat", 7)
    assert world.model_dump() == {"_target_": "mine.envs.World", "size": 3, "seed": 7}
    assert validate(Target, world.model_dump(), allow=["mine"]) == world
    assert pickle.loads(pickle.dumps(world)) == world

    problems = refusal("mine.envs.World", size=0, sede=1, kind=["a"])
    assert set(problems) == {"size", "sede", "kind"}
    assert "at least 1" in problems["size"]
    assert "'seed'" in problems["sede"]
    assert "size=VALUE" in refusal("mine.envs.World")["size"]


def test_texts_and_booleans_are_no_numbers(package):
    """Also inside lists and mappings; `true` and `"1"` would be converted to 1."""
    package(
        "worlds",
        """
        from collections.abc import Sequence
        class World:
            def __init__(
                self,
                size: int = 1,
                levels: Sequence[int] | None = None,
                shares: dict[str, float] | None = None,
                names: list[str | int] | None = None,
            ):
                pass
        """,
    )
    problems = refusal("mine.worlds.World", size="3", levels=["1", 2, True], shares={"a": "0.5", "b": False})
    assert list(problems.values()) == [
        "size: '3': expected a whole number",
        "levels.0: '1': expected a whole number",
        "levels.2: true: expected a whole number",
        "shares.a: '0.5': expected a number",
        "shares.b: false: expected a number",
    ]
    accepted = {"size": 3, "levels": [1, 2.0], "shares": {"a": 1}, "names": ["1", 2]}
    assert target("mine.worlds.World", **accepted).arguments == accepted


@pytest.mark.parametrize("world", ["worlds.calculator.Calculator", "worlds.arithmetic.Arithmetic", "games.maze.Maze"])
def test_difficulties_are_whole_numbers(world):
    problems = refusal(f"components.environments.{world}", difficulties=["1", True, 2])
    assert list(problems.values()) == [
        "difficulties.0: '1': expected a whole number",
        "difficulties.1: true: expected a whole number",
    ]


def test_function_leaves_its_first_argument_unbound(package):
    package(
        "rewards", "def polite(trajectory, word: str = 'please', *, weight: float = 1.0) -> float:\n    return weight"
    )
    assert target("mine.rewards.polite", weight=2).build()("episode") == 2.0
    assert set(refusal("mine.rewards.polite", trajectory=1, weight="x")) == {"trajectory", "weight"}


@pytest.mark.parametrize("signature", ["", "*, weight=1.0", "**options"])
def test_function_without_positional_argument_is_rejected(package, signature):
    package("rewards", f"def deaf({signature}):\n    return 1.0\ndef free(*things):\n    return 1.0")
    assert "takes no positional argument" in refusal("mine.rewards.deaf")["_target_"]
    assert target("mine.rewards.free").build()("episode") == 1.0


def test_only_allowed_packages_are_imported(package):
    package("envs", "import os\nfrom subprocess import run\nclass World: pass")
    assert "allow=[mine]" in refusal("mine.envs.World", allow=())["_target_"]
    assert "mine.envs" not in sys.modules
    for name in ("os.system", "mine.envs.run", "mine.envs.os.system", "mine_too.World", "World", "components..x", 3):
        assert "_target_" in refusal(name)


def test_misspelt_target_suggests_the_nearest_name(package):
    package("envs", "class World: pass")
    assert "'mine.envs.World'" in refusal("mine.envs.Wrold")["_target_"]
    assert "'mine.envs.World'" in refusal("mine.env.World")["_target_"]
    assert (
        "'components.rewards.rules.outcome.Outcome'" in refusal("components.rewards.rules.outcomes.Outcome")["_target_"]
    )


def test_a_module_that_fails_to_import_is_a_problem_with_its_reason_and_line(package):
    package("broken", "x = 1\n\nraise RuntimeError('no licence')")
    package("wants", "import not_installed_anywhere")
    assert "RuntimeError: no licence (mine/broken.py:3, in <module>)" in refusal("mine.broken.World")["_target_"]
    assert "not_installed_anywhere" in refusal("mine.wants.World")["_target_"]


def test_nested_targets_are_built_unless_annotated_as_target(package):
    package(
        "rewards",
        """
        from __future__ import annotations
        from components.specs import Target
        class Part:
            def __init__(self, weight: float): self.weight = weight
        class Sum:
            def __init__(self, parts: list[Part], named: dict[str, Part] | None = None):
                self.parts, self.named = parts, named
        class Lazy:
            def __init__(self, part: Target): self.part = part
        """,
    )
    part = {"_target_": "mine.rewards.Part", "weight": 2}
    built = target("mine.rewards.Sum", parts=[part, part], named={"a": part}).build()
    assert [p.weight for p in built.parts] == [2.0, 2.0]
    assert built.named["a"].weight == 2.0
    lazy = target("mine.rewards.Lazy", part=part).build()
    assert lazy.part.build().weight == 2.0
    problems = refusal("mine.rewards.Sum", parts=[part, {**part, "wieght": 1}])
    assert "'parts.1.weight'" in problems["parts.1.wieght"]
    resolved = target("mine.rewards.Sum", parts=[part]).resolved()
    assert resolved["parts"][0]["source_sha256"] == resolved["source_sha256"]


def test_resolved_holds_defaults_so_that_equal_things_have_equal_keys():
    short = target("components.environments.worlds.shop.Shop").resolved()
    full = target(
        "components.environments.worlds.shop.Shop", **{k: v for k, v in short.items() if k != "_target_"}
    ).resolved()
    assert short == full
    assert set(short) == {"_target_", "seed", "train", "heldout"}


def test_an_edited_module_of_a_user_changes_what_is_resolved(package):
    package("envs", "from mine import helpers\nfrom . import *\nclass World: pass")
    package("helpers", "from .deep import LIMIT\nimport json")
    package("deep", "LIMIT = 1")
    package("other", "unrelated = True")
    world = target("mine.envs.World")
    before = world.resolved()
    assert world.resolved() == before
    package("other", "unrelated = False")
    assert world.resolved() == before
    package("deep", "LIMIT = 2")
    after = world.resolved()
    assert after["source_sha256"] != before["source_sha256"]
    package("envs", "class World: x = 1")
    assert world.resolved()["source_sha256"] not in (before["source_sha256"], after["source_sha256"])


def test_code_without_a_source_file_is_refused(package, monkeypatch):
    import types

    module = types.ModuleType("mine.made")
    exec("class World: pass", vars(module))
    monkeypatch.setitem(sys.modules, "mine.made", module)
    assert "no source file" in refusal("mine.made.World")["_target_"]


def test_runtime_arguments_must_not_repeat_configured_ones(package):
    package("envs", "class World:\n    def __init__(self, size=1, cache=None): self.cache = cache")
    assert target("mine.envs.World", size=2).build(cache="warm").cache == "warm"
    with pytest.raises(AssertionError):
        target("mine.envs.World", size=2).build(size=3)


def test_builds_share_no_mutable_arguments(package):
    package("envs", "class World:\n    def __init__(self, items: list[int]): self.items = items")
    world = target("mine.envs.World", items=[1])
    world.build().items.append(2)
    assert world.build().items == [1]
