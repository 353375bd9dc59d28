"""The environments of AgentGym: how each of its servers speaks.

Every environment is a server of its own, and no two families of them speak alike: what `/create` takes and answers,
whether an instance is called `env_idx` or `id`, what `/reset` takes, where the first observation comes from, what the
reward of a step means, and what an action looks like. A `Kind` holds all that is different; nothing else in the client
knows which environment it plays.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from components.environments.tools import Invalid


@dataclass(frozen=True, slots=True)
class Action:
    """What an agent wants to do."""

    text: str
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Kind:
    """One of AgentGym's environments."""

    system: str
    """What the agent must know, without how it writes an action."""
    rounds: int
    """Steps of an episode at most, as AgentGym plays it."""
    key: Literal["env_idx", "id"]
    """What an instance is called, in bodies and queries. Servers with `id` answer an error as HTTP 200."""
    reset: Callable[[int], dict[str, Any]]
    """The body of /reset for an item, besides the instance."""
    first: Callable[[Any], Any] | None
    """The first observation in the answer of /reset; None: it has to be asked for by /observation."""
    send: Callable[[Action], str]
    """An action as the server reads it. Raises Invalid."""
    create: dict[str, Any] | None = None
    """The body of /create."""
    prefix: str = ""
    """Path below the server's address."""
    state: str = "observation"
    """Key of a step's observation."""
    value: Callable[[dict[str, Any]], Any] = lambda answer: answer["reward"]
    """The value in the answer of a step."""
    scale: float = 1.0
    """Values are divided by this: a score of 1 is the best."""
    running: bool = False
    """A value is the score so far, and may fall; else the best value of the episode is its score."""
    threshold: float = 0.99
    """A score above this is a success."""
    listed: bool = False
    """The server has /list_envs: the instances that it knows."""
    instances: int = 32
    """Instances that one process uses at most."""
    timeout: float = 60.0
    """Seconds that a request may take."""
    items: int | None = None
    """How many items there are, where the server fixes it."""
    names: tuple[str, ...] = ()
    """Other names in item ids."""
    sort: Callable[[int], tuple[str, int]] = lambda item: ("", 0)
    """Type and difficulty of an item, where its number says them."""
    refusals: tuple[str, ...] = ()
    """How observations begin with which the server turns an action down."""


def _line(action: Action) -> str:
    """The action is one line: what comes after it is talk."""
    found = [line.strip() for line in action.text.splitlines() if line.strip()]
    if not found:
        raise Invalid("there is no action")
    return found[0]


def _fenced(text: str) -> str:
    """What stands in the first code fence, where there is one."""
    _, fence, rest = text.partition("```")
    if not fence:
        return text.strip()
    return re.sub(r"\A[A-Za-z]*(?=[ \t]*\n)|\Asql\b", "", rest.partition("```")[0]).strip()


def _sql(action: Action) -> str:
    if statement := _fenced(action.text):
        return statement
    raise Invalid("there is no SQL")


def _browser(action: Action) -> str:
    """The server takes what stands in the first code fence of an answer."""
    if command := _line(Action(_fenced(action.text))):
        return f"```{command}```"
    raise Invalid("there is no action")


def _function(action: Action) -> str:
    """The server looks for `Action:` and reads to the end of that line."""
    text = " ".join(action.text.split("\n")).strip().removeprefix("Action:").strip()
    if not re.match(r"\w+\s+with\s+Action Input:", text):
        raise Invalid("expected NAME with Action Input: {...}")
    return f"Action: {text}"


def _craft(action: Action) -> str:
    """The server knows letters, digits and commas."""
    return " ".join(re.sub(r"[^A-Za-z0-9, ]+", " ", _line(action)).split())


def _move(action: Action) -> str:
    text = _line(action).lower()
    return f"move {text}" if text in ("up", "down", "left", "right") else text


def _word(action: Action) -> str:
    """The server reads letters with spaces between them."""
    text = "".join(_line(action).lower().split())
    if not re.fullmatch("[a-z]{5}", text):
        raise Invalid("expected one word of five letters")
    return " ".join(text)


def _tags(action: Action) -> str:
    """The server reads tags, and marks an answer down that shows no thought."""
    if not any(_closed(action.text, name) for name in ("search", "answer")):
        raise Invalid("expected <search>...</search> or <answer>...</answer>")
    return f"<think>{action.thought}</think>\n{action.text}" if action.thought else action.text


def _closed(text: str, tag: str) -> bool:
    """Return whether the tag is opened, and closed later."""
    start = text.find(f"<{tag}>")
    return start >= 0 and text.find(f"</{tag}>", start) >= 0


def _searchqa_sort(item: int) -> tuple[str, int]:
    ends = (
        (3610, "nq", 1), (14923, "triviaqa", 1), (29190, "popqa", 1), (36595, "hotpotqa", 2),
        (49171, "2wikimultihopqa", 2), (51588, "musique", 2), (51713, "bamboogle", 2), (130881, "nq", 1),
        (221329, "hotpotqa", 2),
    )  # fmt: skip
    return next(((kind, difficulty) for end, kind, difficulty in ends if item < end), ("", 0))


def _babyai_sort(item: int) -> tuple[str, int]:
    """Level item % 40 + 1, seed item // 40. The levels are ordered from walking to a ball up to missions of several
    parts."""
    level = item % 40 + 1
    ends = ((11, "go to"), (16, "open"), (21, "pick up"), (23, "put next"), (29, "unlock"), (34, "find"), (40, "synth"))
    return next(name for end, name in ends if level <= end), 1 + (level - 1) // 8


def _first_of_two(answer: Any) -> Any:
    return answer[0] if isinstance(answer, list) and answer else None


def _same(answer: Any) -> Any:
    return answer


def _observation(answer: Any) -> Any:
    return answer.get("observation") if isinstance(answer, dict) else None


def _described(answer: Any) -> Any:
    """ScienceWorld says the task beside the observation."""
    if not isinstance(answer, dict) or not isinstance(answer.get("task_description"), str):
        return None
    return f"{answer['task_description']}\n{answer.get('observation')}"


def _functions(about: str, calls: str, **other: Any) -> Kind:
    """One of the environments that are functions to be called; their servers are alike."""
    system = (
        f"{about} An action is one call, in one line: NAME with Action Input: JSON object of its arguments.\n"
        f"Functions: {calls}.\nEnd with finish."
    )
    return Kind(
        system,
        key="env_idx",
        create={"id": 0},
        reset=lambda item: {"id": item},
        first=_same,
        send=_function,
        running=True,
        listed=True,
        refusals=("Format error", "Observation: ERROR"),
        **other,
    )


_DATED = "(latitude, longitude, start_date, end_date)"
_NOW = "(latitude, longitude, current_date)"
KINDS: dict[str, Kind] = {
    "webshop": Kind(
        "You shop on a web page: find the product that the instruction describes, choose its options, buy it. An "
        "action is search[words], where the page has a search bar, or click[text] of a button, link or option that "
        "the page shows. click[Buy Now] ends it.",
        rounds=10,
        key="env_idx",
        reset=lambda item: {"session_id": item},
        first=None,
        send=_line,
        state="state",
        listed=True,
    ),
    "sqlgym": Kind(
        "You are told of an SQLite database and asked a question. Your action is the one SQL statement whose result "
        "answers it; you have one try.",
        rounds=1,
        key="env_idx",
        reset=lambda item: {"item_id": item},
        first=_first_of_two,
        send=_sql,
        state="state",
        listed=True,
        instances=8,  # with so many, its /create gives away those that it has
        items=10962,
        names=("bird",),
        sort=lambda item: ("train" if item < 9428 else "dev", 0),
    ),
    "webarena": Kind(
        "You use a web browser to reach an objective; elements of the page have numbers. Actions: click [number], "
        "type [number] [text] [1 to press enter, else 0], hover [number], press [keys], scroll [down] or scroll [up], "
        "new_tab, tab_focus [number], close_tab, goto [url], go_back, go_forward. End with stop [answer], and with "
        "stop [N/A] where it cannot be done.",
        rounds=25,
        key="env_idx",
        reset=lambda item: {"seed": 0, "idx": item},
        first=None,
        send=_browser,
        listed=True,
        instances=1,  # it keeps the task and the page in one place for all
        timeout=300.0,  # its /create logs in everywhere first
        items=812,
    ),
    "weather": _functions(
        "You answer questions about the weather.",
        "get_user_current_date(), get_user_current_location(), get_latitude_longitude(name), "
        f"get_historical_temp{_DATED}, get_historical_rain{_DATED}, get_historical_snow{_DATED}, "
        f"get_temp_forecast{_DATED}, get_rain_forecast{_DATED}, get_snow_forecast{_DATED}, get_current_temp{_NOW}, "
        f"get_current_rain{_NOW}, get_current_snow{_NOW}, get_elevation(latitude, longitude), "
        f"get_distance(latitude1, longitude1, latitude2, longitude2), get_historical_air_quality_index{_DATED}, "
        f"get_current_air_quality_index{_NOW}, get_air_quality_level(air_quality_index), check_valid_actions(), "
        "finish(answer). Dates are YYYY-MM-DD; coordinates must be looked up",
        rounds=10,
        items=343,
    ),
    "movie": _functions(
        "You answer questions about films.",
        "get_search_movie(movie_name), get_search_person(person_name); with (movie_id): get_movie_details, "
        "get_movie_production_companies, get_movie_production_countries, get_movie_cast, get_movie_crew, "
        "get_movie_keywords, get_movie_alternative_titles, get_movie_translation; with (person_id): "
        "get_person_details, get_person_cast, get_person_crew, get_person_external_ids; check_valid_actions(), "
        "finish(answer). Ids must be looked up",
        rounds=12,
        items=238,
    ),
    "academia": _functions(
        "You answer questions about papers and their authors.",
        "loadPaperNet(), loadAuthorNet(), one of them first; neighbourCheck(graph, node), with graph PaperNet or "
        "AuthorNet; paperNodeCheck(node), authorNodeCheck(node), authorEdgeCheck(node1, node2), finish(answer)",
        rounds=12,
        items=20,
    ),
    "sheet": _functions(
        "You edit a spreadsheet. Open it first and look at its values. Cells are named as A1, rows and columns "
        "counted from 1.",
        "open_sheet(name), del_sheet(name), freeze_data(dimension, num), get_A1_annotation(row, col), "
        "insert_cols(values_list, col_idx), insert_rows(values_list, row_idx), delete_batch_data(dimension, "
        "index_list), update_cell(position, value), update_cell_by_formula(start_position, end_position, "
        "position_list, result_position, operator), update_range(start_position, end_position, values_list), "
        "sort_sheet_by_col(col_num, order), merge_cells(start_position, end_position), update_note(position, "
        "content), get_all_values(), get_range_values(start_position, end_position), get_cell_value(position), "
        "get_value_by_formula(start_position, end_position, position_list, operator), filter_cells(query, in_row, "
        "in_column), get_note(position), finish(). Operators are SUM, AVERAGE, COUNT, MAX, MIN, MINUS, PRODUCT",
        rounds=15,
        items=20,
        timeout=180.0,  # it tries a call that fails again, every 10 seconds
    ),
    "todo": _functions(
        "You manage a list of tasks.",
        "get_user_current_date(), get_user_current_location(), get_projects(), update_project(project_id, "
        "is_favorite), get_tasks(project_id), get_task_description(task_id), get_task_duration(task_id), "
        "complete_task(task_id), update_task(task_id, due_date), delete_task(task_id), check_valid_actions(), "
        'finish(answer), with the answer "done" where nothing was asked. Ids must be looked up',
        rounds=15,
        items=155,
    ),
    "alfworld": Kind(
        "You do a task in a household. Every action must be one of the available actions, word for word.",
        rounds=30,
        key="id",
        reset=lambda item: {"game": item, "world_type": "Text"},
        first=_observation,
        send=_line,
        refusals=("Nothing happens",),
    ),
    "sciworld": Kind(
        "You do an experiment in a house with a laboratory. Actions: open OBJ, close OBJ, activate OBJ, deactivate "
        "OBJ, connect OBJ to OBJ, disconnect OBJ, use OBJ, use OBJ on OBJ, look around, look at OBJ, look in OBJ, "
        "read OBJ, move OBJ to OBJ, pick up OBJ, put down OBJ, pour OBJ into OBJ, dunk OBJ into OBJ, mix OBJ, go to "
        "LOCATION, eat OBJ, flush OBJ, focus on OBJ (says that it is what the task is about; a wrong one ends it), "
        "wait, wait1, task, inventory.",
        rounds=30,
        key="id",
        reset=lambda item: {"data_idx": item},
        first=_described,
        send=_line,
        value=lambda answer: answer["score"],
        scale=100.0,
        running=True,
        names=("scienceworld",),
        refusals=("No known action matches",),
    ),
    "babyai": Kind(
        "You move through the rooms of a grid to reach a goal. Every action must be one of the available actions, "
        "word for word.",
        rounds=20,
        key="id",
        reset=lambda item: {"data_idx": item},
        first=_observation,
        send=_line,
        threshold=0.0,  # its score adds up what every step gives; the best single one is ours
        sort=_babyai_sort,
        refusals=("The action is not recognized", "There is a barrier"),
    ),
    "textcraft": Kind(
        "You craft an item by the recipes that are listed. Actions: get COUNT ITEM, for what no recipe makes; craft "
        "COUNT ITEM using COUNT ITEM, COUNT ITEM, exactly as a recipe says; inventory.",
        rounds=20,
        key="id",
        create={},
        reset=lambda item: {"data_idx": item},
        first=_observation,
        send=_craft,
        refusals=("Could not", "Wrong item format"),
    ),
    "maze": Kind(
        "You walk through a maze to its goal. Moving right adds 1 to the second number of your position, moving down "
        "1 to the first. Actions: move up, move down, move left, move right.",
        rounds=15,
        key="id",
        prefix="/maze",
        reset=lambda item: {"game": item},
        first=_observation,
        send=_move,
        items=26,
    ),
    "wordle": Kind(
        "You guess a word of five letters in six tries. Your action is a word. The answer has a letter for each of "
        "yours: g where it is right, y where the word has it elsewhere, b where it has none.",
        rounds=8,
        key="id",
        prefix="/wordle",
        reset=lambda item: {"seed": item},
        first=_observation,
        send=_word,
        refusals=("invalid word",),
    ),
    "searchqa": Kind(
        "You answer a question. An action is <search>words</search>, to search an encyclopedia, or "
        "<answer>answer</answer>, as short as possible.",
        rounds=10,
        key="env_idx",
        create={"id": 0},
        reset=lambda item: {"id": item},
        first=_same,
        send=_tags,
        items=221329,
        sort=_searchqa_sort,
        refusals=("Your previous action is invalid",),
    ),
}
