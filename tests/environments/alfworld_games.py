"""Test games in the format of ALFWorld's data: a domain, a grammar and kitchens.

`write(folder)` creates `json_2.1.1/{train,valid_seen,valid_unseen}/TASK/TRIAL/{game.tw-pddl,traj_data.json}`. The
domain has ALFWorld's types and predicates, from which the problems of its games are built, and the actions that these
kitchens need; `domain` and `grammar` replace them by ALFWorld's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOMAIN = """
(define (domain alfred)
 (:requirements :adl :action-costs :typing)
 (:types agent location receptacle object rtype otype)
 (:predicates
  (atLocation ?a - agent ?l - location)
  (receptacleAtLocation ?r - receptacle ?l - location)
  (objectAtLocation ?o - object ?l - location)
  (openable ?r - receptacle)
  (opened ?r - receptacle)
  (inReceptacle ?o - object ?r - receptacle)
  (receptacleType ?r - receptacle ?t - rtype)
  (canContain ?rt - rtype ?ot - otype)
  (objectType ?o - object ?t - otype)
  (holds ?a - agent ?o - object)
  (holdsAny ?a - agent)
  (isHot ?o - object)
  (heatable ?o - object)
  (pickupable ?o - object)
  (checked ?x)
 )
 (:functions (total-cost) - number)
 (:action look
  :parameters (?a - agent ?l - location)
  :precondition (and (atLocation ?a ?l))
  :effect (and (checked ?l))
 )
 (:action GotoLocation
  :parameters (?a - agent ?lStart - location ?lEnd - location ?r - receptacle)
  :precondition (and (atLocation ?a ?lStart) (receptacleAtLocation ?r ?lEnd))
  :effect (and (not (atLocation ?a ?lStart)) (atLocation ?a ?lEnd) (increase (total-cost) 1))
 )
 (:action OpenObject
  :parameters (?a - agent ?l - location ?r - receptacle)
  :precondition (and (openable ?r) (not (opened ?r)) (atLocation ?a ?l) (receptacleAtLocation ?r ?l))
  :effect (and (opened ?r) (increase (total-cost) 1))
 )
 (:action PickupObject
  :parameters (?a - agent ?l - location ?o - object ?r - receptacle)
  :precondition (and (pickupable ?o) (atLocation ?a ?l) (receptacleAtLocation ?r ?l) (inReceptacle ?o ?r)
   (not (holdsAny ?a)) (or (not (openable ?r)) (opened ?r)))
  :effect (and (not (inReceptacle ?o ?r)) (holds ?a ?o) (holdsAny ?a) (not (objectAtLocation ?o ?l))
   (increase (total-cost) 1))
 )
 (:action PutObject
  :parameters (?a - agent ?l - location ?o - object ?r - receptacle ?ot - otype ?rt - rtype)
  :precondition (and (holds ?a ?o) (atLocation ?a ?l) (receptacleAtLocation ?r ?l)
   (or (not (openable ?r)) (opened ?r)) (objectType ?o ?ot) (receptacleType ?r ?rt) (canContain ?rt ?ot))
  :effect (and (inReceptacle ?o ?r) (objectAtLocation ?o ?l) (not (holds ?a ?o)) (not (holdsAny ?a))
   (increase (total-cost) 1))
 )
 (:action HeatObject
  :parameters (?a - agent ?l - location ?r - receptacle ?o - object)
  :precondition (and (heatable ?o) (receptacleType ?r MicrowaveType) (atLocation ?a ?l)
   (receptacleAtLocation ?r ?l) (holds ?a ?o))
  :effect (and (isHot ?o) (increase (total-cost) 5))
 )
)
"""
SEEN = "{o.indefinite + ' ' + o.name | inreceptacle(o:object, r:receptacle)}"
RULES = {
    "intro": [{"rhs": "A kitchen.\n\n#look.feedback#\n\n#task#"}],
    "look.feedback": [
        {
            "condition": "atlocation(a:agent, l:location) & receptacleatlocation(r:receptacle, l:location)",
            "rhs": "You stand at the [{r.name | atlocation(a:agent, l:location) & "
            "receptacleatlocation(r:receptacle, l:location)}].",
        },
        {"rhs": "You see [{r.indefinite + ' ' + r.name | receptacleatlocation(r:receptacle, l:location)}]."},
    ],
    "inside": [
        {"condition": "openable(r:receptacle) & opened(r:receptacle)", "rhs": f"In it, you see [{SEEN}]."},
        {"condition": "openable(r:receptacle)", "rhs": "It is closed."},
        {"rhs": f"There, you see [{SEEN}]."},
    ],
    "list_empty": [{"rhs": "nothing"}],
    "list_separator": [{"rhs": ", "}],
    "list_last_separator": [{"rhs": ", and "}],
}
ACTIONS = {
    "look": ("look", "#look.feedback#"),
    "GotoLocation": (
        "go to [{r.name | receptacleatlocation(r:receptacle, lend:location)}]",
        "You arrive at {r.name}. #inside#",
    ),
    "OpenObject": ("open {r}", "You open the {r.name}. #inside#"),
    "PickupObject": ("take {o} from {r}", "You take the {o.name}."),
    "PutObject": ("move {o} to {r}", "You move the {o.name} to the {r.name}."),
    "HeatObject": ("heat {o} with {r}", "You heat the {o.name}."),
}
RECEPTACLES = {
    "countertop_bar_1": ("CounterTopType", False),
    "countertop_bar_2": ("CounterTopType", False),
    "microwave_bar_1": ("MicrowaveType", True),
    "sink_bar_1_bar_sinkbasin": ("SinkBasinType", False),
    "cabinet_bar_1": ("CabinetType", True),
}
KINDS = ("AppleType", "MugType")
CONSTANTS = {
    "rtype": ["CounterTopType", "MicrowaveType", "SinkBasinType", "CabinetType", "FridgeType"],
    "otype": [*KINDS, "KnifeType", "ButterKnifeType"],
}
"""Those that ALFWorld's domain names, beside ours."""
GOALS = {
    "pick_and_place_simple": "put a mug in cabinet.",
    "pick_heat_then_place_in_recep": "heat some mug and put it in cabinet.",
}


def grammar() -> str:
    """Return the grammar of the domain, without the task."""
    actions = {f"{name}.feedback": [{"rhs": feedback}] for name, (_, feedback) in ACTIONS.items() if name != "look"}
    parts = [f'grammar :: """{json.dumps(RULES | actions)}""";']
    for name, (template, _) in ACTIONS.items():
        parts.append(f'action {name} {{\n template :: "{template}";\n feedback :: "#{name}.feedback#";\n}}')
    return "\n\n".join(parts)


def problem(task: str, mug: str, apple: str) -> str:
    """Return a kitchen with a mug and an apple in the given receptacles; the mug must go to the cabinet."""
    things = {"mug_bar_7": ("MugType", mug), "apple_bar_3": ("AppleType", apple)}
    places = {name: f"loc_bar_{number}" for number, name in enumerate(RECEPTACLES)}
    names = {
        "agent": ["agent1"],
        "location": ["loc_bar_start", *places.values()],
        "receptacle": list(RECEPTACLES),
        "object": list(things),
        **CONSTANTS,
    }
    facts = ["(= (total-cost) 0)", "(atLocation agent1 loc_bar_start)"]
    for name, (kind, openable) in RECEPTACLES.items():
        facts += [f"(receptacleAtLocation {name} {places[name]})", f"(receptacleType {name} {kind})"]
        facts += [f"(openable {name})"] if openable else []
        facts += [f"(canContain {kind} {thing})" for thing in KINDS]
    for name, (kind, inside) in things.items():
        facts += [f"(objectType {name} {kind})", f"(pickupable {name})", f"(heatable {name})"]
        facts += [f"(inReceptacle {name} {inside})", f"(objectAtLocation {name} {places[inside]})"]
    hot = "(isHot ?o)" if task == "pick_heat_then_place_in_recep" else ""
    goal = f"(inReceptacle ?o ?r) (objectType ?o MugType) (receptacleType ?r CabinetType) {hot}"
    objects = "\n".join(f"  {' '.join(objects)} - {kind}" for kind, objects in names.items())
    return (
        f"(define (problem kitchen)\n (:domain alfred)\n (:objects\n{objects}\n )\n"
        f" (:init\n  {' '.join(facts)}\n )\n"
        f" (:goal (and (exists (?r - receptacle) (exists (?o - object) (and {goal})))))\n"
        " (:metric minimize (total-cost))\n)\n"
    )


def game(task: str, mug: str, apple: str, *, domain: str = DOMAIN, rules: str = "", **more: Any) -> dict[str, Any]:
    """Return the content of game.tw-pddl. more: further values."""
    line = json.dumps([{"rhs": f"Your task is to: {GOALS[task]}"}])
    rules = (rules or grammar()) + f'\n\ngrammar :: """{{"task": {line}}}""";\n'
    game = {"pddl_domain": domain, "grammar": rules, "pddl_problem": problem(task, mug, apple)}
    return {**game, "solvable": True, "walkthrough": None, **more}


def write(folder: Path, *, train: int = 2, valid: int = 1, domain: str = DOMAIN, rules: str = "") -> None:
    """Write the given number of games of each of two tasks, and some that ALFWorld skips."""
    places = [name for name in RECEPTACLES if name != "cabinet_bar_1"]
    number = 0
    for split, count in (("train", train), ("valid_seen", valid), ("valid_unseen", valid)):
        for task in GOALS:
            for _ in range(count):
                mug, apple = places[number % len(places)], places[number // 2 % len(places)]
                trial = folder / "json_2.1.1" / split / f"{task}-Mug-None-Cabinet-{number}" / f"trial_{number}"
                keep(trial, task, game(task, mug, apple, domain=domain, rules=rules))
                number += 1
    others, simple = folder / "json_2.1.1" / "train", "pick_and_place_simple"
    left = game(simple, places[0], places[0], domain=domain, rules=rules)
    keep(others / f"{simple}-Mug-None-Cabinet-990" / "trial_990", simple, left | {"solvable": False})
    keep(others / "pick_and_place_with_movable_recep-Mug-Pot-Cabinet-991" / "trial_991", simple, left)
    keep(others / f"{simple}-MugSliced-None-Cabinet-992" / "trial_992", simple, left)
    keep(others / "pick_and_fly-Mug-None-Cabinet-993" / "trial_993", "pick_and_fly", left)
    (others / f"{simple}-Mug-None-Cabinet-994" / "trial_994").mkdir(parents=True)


def keep(trial: Path, task: str, game: dict[str, Any]) -> None:
    trial.mkdir(parents=True)
    (trial / "game.tw-pddl").write_text(json.dumps(game))
    (trial / "traj_data.json").write_text(json.dumps({"task_type": task}))
