"""AgentGym environments and the protocol of each of their servers.

Every environment has its own server, and the families differ in their protocol: the bodies of `/create` and `/reset`,
the name of an instance (`env_idx` or `id`), the source of the first observation, the meaning of a step's reward, and
the format of an action. An `AgentGymKind` holds all differences; the rest of the client is independent of the
environment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from components.environments.adapters import agentgym_actions as actions
from components.environments.adapters.agentgym_actions import Action


@dataclass(frozen=True, slots=True)
class AgentGymKind:
    """The protocol of one AgentGym environment."""

    system: str
    """System prompt, without the format of an action."""
    rounds: int
    """Maximum number of steps of an episode, as in AgentGym."""
    key: Literal["env_idx", "id"]
    """Key of the instance in bodies and queries. Servers with `id` report errors with status 200."""
    reset: Callable[[int], dict[str, Any]]
    """Function that returns the body of /reset for an item, without the instance."""
    first: Callable[[Any], Any] | None
    """Function that returns the first observation from the response of /reset; None requests it from /observation."""
    send: Callable[[Action], str]
    """Function that formats an action for the server. Raises InvalidAction."""
    create: dict[str, Any] | None = None
    """Body of /create."""
    prefix: str = ""
    """Path prefix below the URL of the server."""
    state: str = "observation"
    """Key of the observation in the response of a step."""
    value: Callable[[dict[str, Any]], Any] = lambda answer: answer["reward"]
    """Function that returns the value in the response of a step."""
    scale: float = 1.0
    """Divisor of values; the maximum score is 1."""
    running: bool = False
    """True if a value is the current score, which may decrease; otherwise the score is the maximum value so far."""
    threshold: float = 0.99
    """Score above which an episode is a success."""
    listed: bool = False
    """True if the server lists its instances at /list_envs."""
    instances: int = 32
    """Maximum number of instances per process."""
    timeout: float = 60.0
    """Timeout of a request, in seconds."""
    items: int | None = None
    """Number of items; None if the server does not fix it."""
    names: tuple[str, ...] = ()
    """Alternative names in item ids."""
    sort: Callable[[int], tuple[str, int]] = lambda item: ("", 0)
    """Function that returns the type and difficulty of an item; empty and 0 if its number does not determine them."""
    refusals: tuple[str, ...] = ()
    """Prefixes of observations that reject an action."""


def _searchqa_sort(item: int) -> tuple[str, int]:
    ends = (
        (3610, "nq", 1), (14923, "triviaqa", 1), (29190, "popqa", 1), (36595, "hotpotqa", 2),
        (49171, "2wikimultihopqa", 2), (51588, "musique", 2), (51713, "bamboogle", 2), (130881, "nq", 1),
        (221329, "hotpotqa", 2),
    )  # fmt: skip
    return next(((kind, difficulty) for end, kind, difficulty in ends if item < end), ("", 0))


def _babyai_sort(item: int) -> tuple[str, int]:
    """Return the type and difficulty of an item.

    Its level is item % 40 + 1, its seed item // 40. Levels are ordered from walking to a ball to composite missions.
    """
    level = item % 40 + 1
    ends = ((11, "go to"), (16, "open"), (21, "pick up"), (23, "put next"), (29, "unlock"), (34, "find"), (40, "synth"))
    return next(name for end, name in ends if level <= end), 1 + (level - 1) // 8


def _observation(answer: Any) -> Any:
    return answer.get("observation") if isinstance(answer, dict) else None


def _described(answer: Any) -> Any:
    """Return the task description, which ScienceWorld sends beside the observation, and the observation."""
    if not isinstance(answer, dict) or not isinstance(answer.get("task_description"), str):
        return None
    return f"{answer['task_description']}\n{answer.get('observation')}"


def _functions(about: str, calls: str, **other: Any) -> AgentGymKind:
    """Return the kind of an environment whose actions are function calls; their servers share one protocol."""
    system = (
        f"{about} An action is one call, in one line: NAME with Action Input: JSON object of its arguments.\n"
        f"Functions: {calls}.\nEnd with finish."
    )
    return AgentGymKind(
        system,
        key="env_idx",
        create={"id": 0},
        reset=lambda item: {"id": item},
        first=lambda answer: answer,
        send=actions.function_call,
        running=True,
        listed=True,
        refusals=("Format error", "Observation: ERROR"),
        **other,
    )


_DATED = "(latitude, longitude, start_date, end_date)"
_NOW = "(latitude, longitude, current_date)"
KINDS: dict[str, AgentGymKind] = {
    "webshop": AgentGymKind(
        "You shop on a web page: find the product that the instruction describes, choose its options, buy it. An "
        "action is search[words], where the page has a search bar, or click[text] of a button, link or option that "
        "the page shows. click[Buy Now] ends it.",
        rounds=10,
        key="env_idx",
        reset=lambda item: {"session_id": item},
        first=None,
        send=actions.first_line,
        state="state",
        listed=True,
    ),
    "sqlgym": AgentGymKind(
        "You are told of an SQLite database and asked a question. Your action is the one SQL statement whose result "
        "answers it; you have one try.",
        rounds=1,
        key="env_idx",
        reset=lambda item: {"item_id": item},
        first=lambda answer: answer[0] if isinstance(answer, list) and answer else None,
        send=actions.sql,
        state="state",
        listed=True,
        instances=8,  # above this, its /create returns instances that are in use
        items=10962,
        names=("bird",),
        sort=lambda item: ("train" if item < 9428 else "dev", 0),
    ),
    "webarena": AgentGymKind(
        "You use a web browser to reach an objective; elements of the page have numbers. Actions: click [number], "
        "type [number] [text] [1 to press enter, else 0], hover [number], press [keys], scroll [down] or scroll [up], "
        "new_tab, tab_focus [number], close_tab, goto [url], go_back, go_forward. End with stop [answer], and with "
        "stop [N/A] where it cannot be done.",
        rounds=25,
        key="env_idx",
        reset=lambda item: {"seed": 0, "idx": item},
        first=None,
        send=actions.browser_command,
        listed=True,
        instances=1,  # the server shares the task and the page between instances
        timeout=300.0,  # its /create logs in to all sites first
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
        timeout=180.0,  # the server retries failed calls every 10 seconds
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
    "alfworld": AgentGymKind(
        "You do a task in a household. Every action must be one of the available actions, word for word.",
        rounds=30,
        key="id",
        reset=lambda item: {"game": item, "world_type": "Text"},
        first=_observation,
        send=actions.first_line,
        refusals=("Nothing happens",),
    ),
    "sciworld": AgentGymKind(
        "You do an experiment in a house with a laboratory. Actions: open OBJ, close OBJ, activate OBJ, deactivate "
        "OBJ, connect OBJ to OBJ, disconnect OBJ, use OBJ, use OBJ on OBJ, look around, look at OBJ, look in OBJ, "
        "read OBJ, move OBJ to OBJ, pick up OBJ, put down OBJ, pour OBJ into OBJ, dunk OBJ into OBJ, mix OBJ, go to "
        "LOCATION, eat OBJ, flush OBJ, focus on OBJ (says that it is what the task is about; a wrong one ends it), "
        "wait, wait1, task, inventory.",
        rounds=30,
        key="id",
        reset=lambda item: {"data_idx": item},
        first=_described,
        send=actions.first_line,
        value=lambda answer: answer["score"],
        scale=100.0,
        running=True,
        names=("scienceworld",),
        refusals=("No known action matches",),
    ),
    "babyai": AgentGymKind(
        "You move through the rooms of a grid to reach a goal. Every action must be one of the available actions, "
        "word for word.",
        rounds=20,
        key="id",
        reset=lambda item: {"data_idx": item},
        first=_observation,
        send=actions.first_line,
        threshold=0.0,  # AgentGym sums the rewards of all steps; this client takes the maximum
        sort=_babyai_sort,
        refusals=("The action is not recognized", "There is a barrier"),
    ),
    "textcraft": AgentGymKind(
        "You craft an item by the recipes that are listed. Actions: get COUNT ITEM, for what no recipe makes; craft "
        "COUNT ITEM using COUNT ITEM, COUNT ITEM, exactly as a recipe says; inventory.",
        rounds=20,
        key="id",
        create={},
        reset=lambda item: {"data_idx": item},
        first=_observation,
        send=actions.craft,
        refusals=("Could not", "Wrong item format"),
    ),
    "maze": AgentGymKind(
        "You walk through a maze to its goal. Moving right adds 1 to the second number of your position, moving down "
        "1 to the first. Actions: move up, move down, move left, move right.",
        rounds=15,
        key="id",
        prefix="/maze",
        reset=lambda item: {"game": item},
        first=_observation,
        send=actions.move,
        items=26,
    ),
    "wordle": AgentGymKind(
        "You guess a word of five letters in six tries. Your action is a word. The answer has a letter for each of "
        "yours: g where it is right, y where the word has it elsewhere, b where it has none.",
        rounds=8,
        key="id",
        prefix="/wordle",
        reset=lambda item: {"seed": item},
        first=_observation,
        send=actions.spaced_word,
        refusals=("invalid word",),
    ),
    "searchqa": AgentGymKind(
        "You answer a question. An action is <search>words</search>, to search an encyclopedia, or "
        "<answer>answer</answer>, as short as possible.",
        rounds=10,
        key="env_idx",
        create={"id": 0},
        reset=lambda item: {"id": item},
        first=lambda answer: answer,
        send=actions.tagged,
        items=221329,
        sort=_searchqa_sort,
        refusals=("Your previous action is invalid",),
    ),
}
