"""Errors of background tasks, which have no caller to raise them to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

__all__ = ["TaskErrors"]

_log = logging.getLogger("mqstore")


class TaskErrors:
    """Current error of each background task of the store at `path`. A new error is logged once."""

    def __init__(self, path: Path) -> None:
        self.messages: dict[str, str] = {}
        """Messages by task. A task that succeeds again is removed."""
        self._path = path

    def note(self, task: str, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        if self.messages.get(task) != text:
            _log.error("%s: %s: %s", self._path, task, text)
            self.messages[task] = text

    def warn(self, task: str, text: str) -> None:
        """Record a state that is not a failure. It is logged once, until `clear`."""
        if task not in self.messages:
            _log.warning("%s: %s: %s", self._path, task, text)
            self.messages[task] = text

    def clear(self, task: str) -> None:
        self.messages.pop(task, None)

    def attempt(self, task: str, call: Callable[[], object]) -> None:
        """Call `call`, and record its error."""
        try:
            call()
            self.clear(task)
        except Exception as error:
            self.note(task, error)
