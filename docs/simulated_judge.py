"""Simulated judge for a measurement: it shows how good a judge must be for RULER to train a policy. It is not a model.

    python -m docs.simulated_judge [--port 8000] [--fresh-errors] [--swap-after REQUESTS --swap-to ACCURACY]
    python -m docs.recipes run tic_tac_toe -- reward=ruler reward.model.url=http://127.0.0.1:8000/v1 \
        reward.model.model=accuracy-0.75

A server on this machine with OpenAI's chat completions, which answers RULER's questions about games of tic-tac-toe. It
reads only the transcripts in the question, as a model does: the last message of a game says how it ended. The name of
the model states the accuracy. With the score of the game's end (`SCORES`) s, the answer for an episode is

    s       with probability accuracy
    1 - s   otherwise: the judge takes a good game for a bad one

Accuracy 1 is a perfect judge; at 0.5 the mean score of every game is 0.5, so that the scores carry no information.
Errors of episodes are independent. They are a function of the request, so that a repeated request has the same answer
and an interrupted run resumes; `+reward.model.extra.seed=1` gives other errors. A model's errors are not independent: a
policy can learn to exploit them (`docs/guides/judges.md`, Guards).

With `--fresh-errors` each request has errors of its own, like those of a model at a temperature above 0. `--swap-after`
replaces the judge after a number of requests by one of another accuracy, under the same name, as a provider may
(`docs/guides/judge_drift.md`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from aiohttp import web

SCORES = {"You win.": 1.0, "A draw.": 0.4, "You lose.": 0.2}
"""Score of a game by the line with which its transcript ends."""
UNFINISHED = 0.0
"""Score of a game that did not end within the agent's turns, which invalid moves use up."""
MODEL = re.compile(r"accuracy-(0(?:\.\d+)?|1(?:\.0+)?)")
CONTEXT = re.compile(r"<context>\n(.*?)\n</context>", re.DOTALL)
EPISODE = re.compile(r'<trajectory id="([^"]*)">\n(.*?)\n</trajectory>', re.DOTALL)
GAME = "tic-tac-toe"
"""Word in the system message of a game."""


def main() -> None:
    """Run the server until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m docs.simulated_judge", description="Simulated judge of games.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--fresh-errors", action="store_true", help="each request has errors of its own")
    parser.add_argument("--swap-after", type=int, metavar="REQUESTS", help="requests before the judge is replaced")
    parser.add_argument("--swap-to", type=float, metavar="ACCURACY", help="accuracy of the judge that replaces it")
    options = parser.parse_args()
    if (options.swap_after is None) != (options.swap_to is None):
        parser.error("--swap-after and --swap-to belong together")
    swap = None if options.swap_after is None else (options.swap_after, options.swap_to)
    web.run_app(application(fresh_errors=options.fresh_errors, swap=swap), host="127.0.0.1", port=options.port)


def application(*, fresh_errors: bool = False, swap: tuple[int, float] | None = None) -> web.Application:
    """Return the server. fresh_errors: errors of a request are independent of those of equal requests. swap: number of
    requests after which the judge has another accuracy, and this accuracy."""
    app = web.Application(client_max_size=2**24)
    app[STATE] = Behaviour(fresh_errors, swap)
    app.add_routes([web.post("/v1/chat/completions", _complete)])
    return app


@dataclass
class Behaviour:
    """State of a server."""

    fresh_errors: bool
    swap: tuple[int, float] | None
    requests: int = 0
    """Number of requests so far."""


STATE = web.AppKey("state", Behaviour)


async def _complete(request: web.Request) -> web.Response:
    body = await request.json()
    state = request.app[STATE]
    state.requests += 1
    model = str(body.get("model"))
    if not (match := MODEL.fullmatch(model)):
        return _error(404, f"model {model!r} does not exist; expected accuracy-P with P from 0 to 1: accuracy-0.75")
    try:
        ends = read_ends(str(body["messages"][-1]["content"]))
    except ValueError as error:
        return _error(400, str(error))
    swapped = state.swap is not None and state.requests > state.swap[0]
    accuracy = state.swap[1] if swapped and state.swap else float(match[1])
    source = body | {"request": state.requests} if state.fresh_errors else body
    scores = [
        {"trajectory_id": name, "explanation": end or "unfinished", "score": score(end, accuracy, source, name)}
        for name, end in ends.items()
    ]
    message = {"role": "assistant", "content": json.dumps({"scores": scores})}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return web.json_response(
        {"id": "0", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}
    )


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)


def read_ends(question: str) -> dict[str, str]:
    """Return the end of each episode of a question, by id: a key of SCORES, or "" for a game that did not end. Raises
    ValueError for a question about other transcripts."""
    context = CONTEXT.search(question)
    start = json.loads(context[1]) if context else []
    ends = {}
    for episode, text in EPISODE.findall(question):
        messages = [*start, *json.loads(text)]
        if not messages or GAME not in messages[0].get("content", ""):
            raise ValueError(f"episode {episode} is no game of {GAME}; the simulated judge reads only these")
        last = messages[-1].get("content", "").rpartition("\n")[2]
        ends[episode] = last if messages[-1]["role"] != "assistant" and last in SCORES else ""
    if not ends:
        raise ValueError("the question has no episodes; expected one of RULER (reward=ruler)")
    return ends


def score(end: str, accuracy: float, body: dict[str, Any], episode: str) -> float:
    """Return the score of an episode with this end; the error is a function of the request and the episode's id."""
    digest = hashlib.sha256(json.dumps([body, episode], sort_keys=True).encode()).digest()
    right = SCORES.get(end, UNFINISHED)
    return right if int.from_bytes(digest[:8]) / 2**64 < accuracy else 1 - right


if __name__ == "__main__":
    main()
