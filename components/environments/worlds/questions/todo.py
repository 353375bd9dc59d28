"""Lists, projects and due dates: questions over tasks."""

from __future__ import annotations

import random
from datetime import date, timedelta
from typing import Annotated, Any

from components.environments.tools import Invalid, tool
from components.environments.worlds.questions.base import Asked, Look, Questions, only, told
from components.specs.registered import registered

TODAY = date(2031, 6, 2)
PEOPLE = ("Anouk", "Basil", "Chiara", "Dmitri", "Esther", "Farid", "Gudrun", "Hamid", "Ilse", "Jorge")
PROJECTS = ("Atlas", "Beacon", "Cobalt", "Delta", "Ember", "Fjord", "Granite", "Helix")
LISTS = ("Home", "Office", "Errands", "Research", "Garden", "Travel")
VERBS = ("Order", "Check", "Write", "Repair", "Plan", "Review", "Collect", "Paint", "Send", "Sort")
THINGS = ("invoices", "the printer", "a poster", "the fence", "tickets", "samples", "the archive", "seeds", "the map")


@registered("environment.todo")
class Todo(Questions):
    __doc__ = Questions.__doc__

    about = (
        f"Today is {TODAY}. Tasks have ids, such as t12; a task that is not done is open, and overdue when it was due "
        "before today. A task that waits for another one can only be done after it."
    )

    @classmethod
    def world(cls, draw: random.Random) -> dict[str, Any]:
        people, lists = draw.sample(PEOPLE, 6), draw.sample(LISTS, 5)
        projects = {
            name: {"lead": draw.choice(people), "deadline": str(TODAY + timedelta(draw.randrange(10, 90)))}
            for name in draw.sample(PROJECTS, 6)
        }
        titles = draw.sample([f"{verb} {thing}" for verb in VERBS for thing in THINGS], 30)
        keys = [f"t{key}" for key in draw.sample(range(10, 100), len(titles))]
        tasks = {}
        for number, (key, title) in enumerate(zip(keys, titles, strict=True)):
            tasks[key] = {
                "title": title,
                "list": lists[min(draw.randrange(5), draw.randrange(5))],  # lists of different lengths
                "project": sorted(projects)[min(draw.randrange(6), draw.randrange(6))],
                "owner": draw.choice(people),
                "due": str(TODAY + timedelta(draw.randrange(-20, 40))),
                "done": draw.random() < 0.35,
                "priority": draw.choice(("low", "normal", "high")),
                "minutes": draw.randrange(1, 25) * 5,
                "waits_for": keys[draw.randrange(number)] if number and draw.random() < 0.6 else "",
            }
        return {"people": people, "lists": lists, "projects": projects, "tasks": tasks}

    @tool
    def lists(self) -> str:
        """The names of all lists and projects."""
        return told(lists=self.data["lists"], projects=sorted(self.data["projects"]))

    @tool
    def tasks_in(self, list: Annotated[str, "its name"]) -> str:
        """The tasks of a list."""
        if list not in self.data["lists"]:
            raise Invalid(f"no list {list[:40]}; there are {', '.join(self.data['lists'])}")
        return told(tasks=[key for key, one in self.data["tasks"].items() if one["list"] == list])

    @tool
    def find_task(self, title: str) -> str:
        """The task with a title."""
        for key, one in self.data["tasks"].items():
            if one["title"].lower() == title.strip().lower():
                return told(task=key)
        raise Invalid(f"no task is called {title[:60]}")

    @tool
    def view_task(self, task: Annotated[str, "such as t12"]) -> str:
        """Title, list, project, owner, due date, state, priority and minutes of a task, and what it waits for."""
        if task not in self.data["tasks"]:
            raise Invalid(f"no task {task[:40]}")
        return told(**self.data["tasks"][task])

    @tool
    def view_project(self, project: Annotated[str, "its name"]) -> str:
        """Lead, deadline and tasks of a project."""
        if project not in self.data["projects"]:
            raise Invalid(f"no project {project[:40]}; there are {', '.join(sorted(self.data['projects']))}")
        tasks = [key for key, one in self.data["tasks"].items() if one["project"] == project]
        return told(**self.data["projects"][project], tasks=tasks)

    # Questions

    def ask_detail(self, look: Look, draw: random.Random) -> Asked:
        title, found = self._task(look, draw)
        field, words = draw.choice(
            (("due", "When is '{}' due?"), ("owner", "Who owns '{}'?"), ("minutes", "How many minutes does '{}' take?"))
        )
        return words.format(title), found[field]

    def ask_lead(self, look: Look, draw: random.Random) -> Asked:
        title, found = self._task(look, draw)
        return f"Who leads the project of '{title}'?", look("view_project", project=found["project"])["lead"]

    def ask_slack(self, look: Look, draw: random.Random) -> Asked:
        title, found = self._task(look, draw)
        deadline = look("view_project", project=found["project"])["deadline"]
        days = (date.fromisoformat(deadline) - date.fromisoformat(found["due"])).days
        return f"How many days before the deadline of its project is '{title}' due? Negative if after it.", days

    def ask_first(self, look: Look, draw: random.Random) -> Asked:
        """The beginning of a chain of tasks that wait for each other."""
        title, found = self._task(look, draw)
        if not found["waits_for"]:
            return None
        while found["waits_for"]:
            found = look("view_task", task=found["waits_for"])
        question = f"Go from '{title}' to the task that it waits for, and on in the same way to the one that waits for "
        return question + "none. What is the title of that one?", found["title"]

    def ask_count(self, look: Look, draw: random.Random) -> Asked:
        """How many tasks of a list are open, overdue or of a priority."""
        name = draw.choice(self.data["lists"])
        tasks = look("tasks_in", list=name)["tasks"]
        if not 2 <= len(tasks) <= 9:
            return None
        found = [look("view_task", task=task) for task in tasks]
        still = [one for one in found if not one["done"]]
        words, count = draw.choice(
            (
                ("are open", len(still)),
                ("are overdue", sum(one["due"] < str(TODAY) for one in still)),
                ("are open and of high priority", sum(one["priority"] == "high" for one in still)),
            )
        )
        return f"How many tasks of the list {name} {words}?", count

    def ask_next(self, look: Look, draw: random.Random) -> Asked:
        """The open task of a project that is due first or last."""
        name = draw.choice(sorted(self.data["projects"]))
        tasks = look("view_project", project=name)["tasks"]
        if not 2 <= len(tasks) <= 9:
            return None
        word, last = draw.choice((("first", False), ("last", True)))
        found = [look("view_task", task=task) for task in tasks]
        still = sorted((one for one in found if not one["done"]), key=lambda one: one["due"], reverse=last)
        if len(still) < 2 or not only([one["due"] for one in still]):
            return None
        return f"Which open task of the project {name} is due {word}? Its title, please.", still[0]["title"]

    def ask_load(self, look: Look, draw: random.Random) -> Asked:
        """Minutes of open tasks, of a person or of all, in a list."""
        name, who = draw.choice(self.data["lists"]), draw.choice([*self.data["people"], ""])
        tasks = look("tasks_in", list=name)["tasks"]
        if not 2 <= len(tasks) <= 9:
            return None
        found = [look("view_task", task=task) for task in tasks]
        minutes = sum(one["minutes"] for one in found if not one["done"] and who in ("", one["owner"]))
        if not minutes:
            return None
        whose = f"of {who} " if who else ""
        return f"How many minutes do the open tasks {whose}in the list {name} take together?", minutes

    def _task(self, look: Look, draw: random.Random) -> tuple[str, dict[str, Any]]:
        title = self.data["tasks"][draw.choice(sorted(self.data["tasks"]))]["title"]
        return title, look("view_task", task=look("find_task", title=title)["task"])
