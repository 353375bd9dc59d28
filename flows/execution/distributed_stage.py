"""One stage in several processes (`components.compute.process_group`). Rank 0 runs the stage as in a single process;
the other ranks compute in its folders and write no artifact."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.artifacts import Artifact, Draft
from components.compute.launch import STOPPED
from components.compute.memory import give_back
from components.compute.process_group import ProcessGroup
from components.compute.runners import error_to_json
from components.errors import EspalierError, ResourceError, SpecError
from flows.stages.base import Context, Request, silent
from flows.stages.execute import Status, resolve, run_stage

logger = logging.getLogger(__name__)


def lead_stage(request: Request, context: Context, group: ProcessGroup) -> tuple[Artifact, Status]:
    """Run the stage on rank 0; return the result of `run_stage`. Tell the other ranks when the work begins, or that the
    stage is cached."""

    def begin(draft: Path, scratch: Path) -> None:
        group.send_work({"draft": str(draft), "scratch": str(scratch)})

    try:
        return run_stage(request, replace(context, begin=begin))
    finally:
        group.send_work({})


def follow_stage(request: Request, context: Context, group: ProcessGroup) -> None:
    """Run the stage on another rank. Raises WaitTimeout if rank 0 does not respond."""
    work = group.receive_work(context.lock_timeout + group.timeout)
    if not work:
        return
    stage, spec, inputs, key = resolve(request, context)
    own = replace(context, key=key, seed=request.seed, scratch=Path(work["scratch"]))
    stage.function(spec, inputs, Draft(Path(work["draft"])), own)


def attempt(
    request: Callable[[], Request] | None,
    context: Context,
    timeout: float,
    say: Callable[[Mapping[str, Any]], None],
    next_line: Callable[[], str],
) -> int:
    """Run a stage in this process, one of several, or one after the other until one fails. Return the exit code of
    `flows.stage`.

    request: returns the only request; None: rank 0 reads requests from `next_line`, all for the same device, and sends
    them to the other ranks. say: writes a line of the report; only rank 0 calls it."""
    group = None
    try:
        group = ProcessGroup(timeout)
        parsed = _next_request(group, next_line) if request is None else request()
        group.join(device(parsed.spec))
        _run(parsed, context, group, say)
        while request is None:
            release(context)
            group.next_stage()
            _run(_next_request(group, next_line), context, group, say)
        return 0
    except EspalierError as error:
        assert group is not None
        if not group.first:  # rank 0 may be unable to report it, such as within a collective operation
            logger.error("%s", error)
        with contextlib.suppress(KeyboardInterrupt):  # the launcher ends the remaining processes
            group.report_failure(error_to_json(error), say, awaited=False)
        return 2 if isinstance(error, SpecError | ResourceError) else 1
    except KeyboardInterrupt:  # the launcher also sends it after another rank failed
        if group is None or not group.first or (failure := group.failure()) is None:
            return STOPPED
        say({"error": failure})
        return 1
    except Exception as error:
        logger.exception("the stage failed in this process")
        if group is None:
            return 1
        try:
            group.report_failure({"type": type(error).__name__, "message": str(error)}, say, awaited=True)
        except KeyboardInterrupt:
            return STOPPED
        return 1


def _next_request(group: ProcessGroup, next_line: Callable[[], str]) -> Request:
    if group.first:
        group.send_request(line := next_line())
    else:
        line = group.receive_request()
    return Request.from_json(json.loads(line))


def _run(request: Request, context: Context, group: ProcessGroup, say: Callable[[Mapping[str, Any]], None]) -> None:
    if group.first:
        artifact, status = lead_stage(request, context, group)
        say({"key": artifact.key, "digest": artifact.digest, "status": status})
    else:
        follow_stage(request, replace(context, progress=silent, on_wait=logger.info, watch=None), group)


def release(context: Context) -> None:
    """Free the memory of a GPU, which belongs to the engine between two trainings. On a CPU the model stays loaded, as
    in the process of the flow."""
    import torch

    if torch.cuda.is_available():
        context.warm.close()
        give_back()
        torch.cuda.empty_cache()


def device(spec: Mapping[str, Any]) -> str:
    """Return `model.device` of a stage's spec; `auto` if it has none."""
    return str((spec.get("model") or {}).get("device", "auto"))
