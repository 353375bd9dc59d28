"""Several filters, one after the other: each sees what those before it have kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from components.errors import Problem, SpecError
from components.filters.decisions import decide_each
from components.filters.protocol import AnyFilter, Filter, Groups
from components.filters.select import decider_of, decisions
from components.specs import Target
from components.specs.registered import registered
from components.trajectories.schema import Selection, Trajectory

_NAME = re.compile(r"[A-Za-z0-9_-]+")


@registered("filter.chain")
class Chain:
    """Keeps what every one of its filters keeps.

    Args:
        filters: Name and filter, in the order in which they are asked. A group of which the earlier ones have left
            nothing is not shown to the later ones; a filter that surveys the collection surveys what is left of it.

    The reason of what a filter drops is NAME/REASON, so that two filters with the same rule are told apart.
    """

    def __init__(self, filters: Annotated[dict[str, Any], Field(min_length=1)]):
        if not isinstance(filters, Mapping) or not filters:
            raise SpecError([Problem("filter.filters", f"{filters!r:.80} is no mapping of names to filters, in order")])
        for name in filters:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                message = f"{name!r} is no name of a filter; expected letters, digits, _ and - (metrics are named so)"
                raise SpecError([Problem("filter.filters", message)])
        self.filters: dict[str, AnyFilter] = dict(filters)

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """In a stage key: with the order, which a mapping has none of there."""
        return {"filters": [[name, one] for name, one in arguments["filters"].items()]}

    def survey(self, groups: Groups) -> Filter:
        deciders: dict[str, Filter] = {}
        for name, one in self.filters.items():
            deciders[name] = decider_of(one, partial(_left, groups, _Deciders(dict(deciders))))
        return _Deciders(deciders)


def links(filter_: Target) -> dict[str, Any]:
    """What a configured filter is made of, by the end of its key path: itself, or what stands in a chain."""
    if filter_.factory() is not Chain:
        return {"": filter_}
    return {
        f".filters.{name}{end}": link
        for name, one in filter_.arguments["filters"].items()
        for end, link in (links(one).items() if isinstance(one, Target) else [("", one)])
    }


class _Deciders:
    def __init__(self, deciders: Mapping[str, Filter]):
        self._deciders = deciders

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        rules: dict[str, str] = {}
        left = [one for one in group if one.reward is not None]
        for name, decider in self._deciders.items():
            if left:
                asked = zip(left, decisions(decider, left), strict=True)
                dropped = {one.id: f"{name}/{made.reason}" for one, made in asked if not made.kept}
                rules |= dropped
                left = [one for one in left if one.id not in dropped]
        return decide_each(group, lambda one: rules.get(one.id))


def _left(groups: Groups, decider: _Deciders) -> Iterator[Sequence[Trajectory]]:
    """The collection without what is dropped."""
    for group in groups():
        kept = [one for one, made in zip(group, decider.select(group), strict=True) if made.kept]
        if kept:
            yield kept
