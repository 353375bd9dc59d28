"""Chain of filters: each one decides about the trajectories that the previous ones kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from components.errors import Problem, SpecError
from components.filters.decisions import decide_each
from components.filters.protocol import AnyFilter, Filter, Groups, decides_per_group
from components.filters.select import decider_of, decisions
from components.specs import Target
from components.specs.registered import registered
from components.trajectories.schema import Selection, Trajectory

_NAME = re.compile(r"[A-Za-z0-9_-]+")


@registered("filter.chain")
class Chain:
    """Filter that keeps the trajectories that all of its filters keep.

    Args:
        filters: Filters by name, in the order in which they are applied. A group with no remaining trajectory is not
            passed on; a filter that surveys the collection surveys the trajectories that remain.

    The reason of a dropped trajectory is NAME/REASON, which distinguishes two filters with the same rule.
    """

    def __init__(self, filters: Annotated[dict[str, Any], Field(min_length=1)]):
        if not isinstance(filters, Mapping) or not filters:
            message = f"{filters!r:.80} is not a non-empty mapping of names to filters, in order"
            raise SpecError([Problem("filter.filters", message)])
        for name in filters:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                message = f"{name!r} is not a valid filter name; expected letters, digits, _ and - (as in metric names)"
                raise SpecError([Problem("filter.filters", message)])
        self.filters: dict[str, AnyFilter] = dict(filters)

    @property
    def per_group(self) -> bool:
        """True if all of its filters decide about each group by itself."""
        return all(decides_per_group(filter_) for filter_ in self.filters.values())

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments for a stage key, as a list of pairs: stage keys ignore the order of a mapping."""
        return {"filters": [[name, filter_] for name, filter_ in arguments["filters"].items()]}

    def survey(self, groups: Groups) -> Filter:
        deciders: dict[str, Filter] = {}
        for name, filter_ in self.filters.items():
            deciders[name] = decider_of(filter_, partial(_remaining, groups, _Deciders(dict(deciders))))
        return _Deciders(deciders)


def links(filter_: Target) -> dict[str, Any]:
    """Return the members of a configured chain by the suffix of their key path; of another filter, itself under ""."""
    if filter_.factory() is not Chain:
        return {"": filter_}
    return {
        f".filters.{name}{end}": link
        for name, member in filter_.arguments["filters"].items()
        for end, link in (links(member).items() if isinstance(member, Target) else [("", member)])
    }


class _Deciders:
    def __init__(self, deciders: Mapping[str, Filter]):
        self._deciders = deciders

    def select(self, group: Sequence[Trajectory]) -> list[Selection]:
        rules: dict[str, str] = {}
        remaining = [trajectory for trajectory in group if trajectory.reward is not None]
        for name, decider in self._deciders.items():
            if remaining:
                verdicts = zip(remaining, decisions(decider, remaining), strict=True)
                dropped = {
                    trajectory.id: f"{name}/{selection.reason}"
                    for trajectory, selection in verdicts
                    if not selection.kept
                }
                rules |= dropped
                remaining = [trajectory for trajectory in remaining if trajectory.id not in dropped]
        return decide_each(group, lambda trajectory: rules.get(trajectory.id))


def _remaining(groups: Groups, decider: _Deciders) -> Iterator[Sequence[Trajectory]]:
    """Yield the groups without the dropped trajectories; skip groups that become empty."""
    for group in groups():
        remaining = [
            trajectory for trajectory, selection in zip(group, decider.select(group), strict=True) if selection.kept
        ]
        if remaining:
            yield remaining
