"""Functions that read a policy's answers in a child process (`components.worker_process`)."""

from __future__ import annotations

from typing import Any

from components.errors import AnswerTooCostly, JudgeError
from components.json_process import RequestFailed
from components.worker_process import CallTooCostly, WorkerProcess


class AnswerWorker(WorkerProcess):
    """A worker process whose errors are those of a reward."""

    def __call__(self, **arguments: Any) -> Any:
        """Return the function's result. Raises AnswerTooCostly, or JudgeError if the function raised."""
        try:
            return super().__call__(**arguments)
        except CallTooCostly as error:
            raise AnswerTooCostly(str(error)) from None
        except RequestFailed as error:
            raise JudgeError(str(error)) from None
