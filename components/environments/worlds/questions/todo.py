"""Questions over tasks with lists, projects and due dates."""

from __future__ import annotations

import random
from datetime import date, timedelta
from typing import Annotated, Any

from components.environments.tools import InvalidAction, to_json, tool
from components.environments.worlds.questions.base import Look, QuestionAndAnswer, Questions, require, require_unique
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
        return to_json(lists=self.data["lists"], projects=sorted(self.data["projects"]))

    @tool
    def tasks_in(self, list: Annotated[str, "its name"]) -> str:
        """The tasks of a list."""
        if list not in self.data["lists"]:
            raise InvalidAction(f"no list {list[:40]}; there are {', '.join(self.data['lists'])}")
        return to_json(tasks=[key for key, task in self.data["tasks"].items() if task["list"] == list])

    @tool
    def find_task(self, title: str) -> str:
        """The task with a title."""
        for key, task in self.data["tasks"].items():
            if task["title"].lower() == title.strip().lower():
                return to_json(task=key)
        raise InvalidAction(f"no task is called {title[:60]}")

    @tool
    def view_task(self, task: Annotated[str, "such as t12"]) -> str:
        """Title, list, project, owner, due date, state, priority and minutes of a task, and what it waits for."""
        if task not in self.data["tasks"]:
            raise InvalidAction(f"no task {task[:40]}")
        return to_json(**self.data["tasks"][task])

    @tool
    def view_project(self, project: Annotated[str, "its name"]) -> str:
        """Lead, deadline and tasks of a project."""
        if project not in self.data["projects"]:
            raise InvalidAction(f"no project {project[:40]}; there are {', '.join(sorted(self.data['projects']))}")
        tasks = [key for key, task in self.data["tasks"].items() if task["project"] == project]
        return to_json(**self.data["projects"][project], tasks=tasks)

    # Questions

    def ask_detail(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        title, task = self._task(look, draw)
        field, words = draw.choice(
            (("due", "When is '{}' due?"), ("owner", "Who owns '{}'?"), ("minutes", "How many minutes does '{}' take?"))
        )
        return words.format(title), task[field]

    def ask_lead(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        title, task = self._task(look, draw)
        return f"Who leads the project of '{title}'?", look("view_project", project=task["project"])["lead"]

    def ask_slack(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        title, task = self._task(look, draw)
        deadline = look("view_project", project=task["project"])["deadline"]
        days = (date.fromisoformat(deadline) - date.fromisoformat(task["due"])).days
        return f"How many days before the deadline of its project is '{title}' due? Negative if after it.", days

    def ask_first(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        """Ask for the first task of a chain of tasks that wait for each other."""
        title, task = self._task(look, draw)
        require(bool(task["waits_for"]))
        while task["waits_for"]:
            task = look("view_task", task=task["waits_for"])
        question = f"Go from '{title}' to the task that it waits for, and on in the same way to the one that waits for "
        return question + "none. What is the title of that one?", task["title"]

    def ask_count(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        """Ask for the number of open, overdue or high-priority tasks of a list."""
        name = draw.choice(self.data["lists"])
        open_tasks = self._open_tasks(look, look("tasks_in", list=name))
        words, count = draw.choice(
            (
                ("are open", len(open_tasks)),
                ("are overdue", sum(task["due"] < str(TODAY) for task in open_tasks)),
                ("are open and of high priority", sum(task["priority"] == "high" for task in open_tasks)),
            )
        )
        return f"How many tasks of the list {name} {words}?", count

    def ask_next(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        """Ask for the open task of a project that is due first or last."""
        name = draw.choice(sorted(self.data["projects"]))
        open_tasks = self._open_tasks(look, look("view_project", project=name))
        word, last = draw.choice((("first", False), ("last", True)))
        open_tasks.sort(key=lambda task: task["due"], reverse=last)
        require(len(open_tasks) >= 2)
        require_unique([task["due"] for task in open_tasks])
        return f"Which open task of the project {name} is due {word}? Its title, please.", open_tasks[0]["title"]

    def ask_load(self, look: Look, draw: random.Random) -> QuestionAndAnswer:
        """Ask for the total minutes of the open tasks in a list, of one person or of all."""
        name, who = draw.choice(self.data["lists"]), draw.choice([*self.data["people"], ""])
        open_tasks = self._open_tasks(look, look("tasks_in", list=name))
        minutes = sum(task["minutes"] for task in open_tasks if who in ("", task["owner"]))
        require(minutes > 0)
        whose = f"of {who} " if who else ""
        return f"How many minutes do the open tasks {whose}in the list {name} take together?", minutes

    def _open_tasks(self, look: Look, view: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the tasks that are not done, of a list or a project of two to nine tasks."""
        require(2 <= len(view["tasks"]) <= 9)
        tasks = [look("view_task", task=task) for task in view["tasks"]]
        return [task for task in tasks if not task["done"]]

    def _task(self, look: Look, draw: random.Random) -> tuple[str, dict[str, Any]]:
        title = self.data["tasks"][draw.choice(sorted(self.data["tasks"]))]["title"]
        return title, look("view_task", task=look("find_task", title=title)["task"])
