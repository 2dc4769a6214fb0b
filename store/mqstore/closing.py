"""Base class of objects that are closed at the end of their `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import NoReturn, Self


class Closing(ABC):
    @abstractmethod
    def close(self) -> None:
        """Release all resources."""

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, also as part of a queue or a consumer."""
        steps = "open the store in the other process, with shared=True"
        raise TypeError(f"a store, its queues and its clients cannot be pickled or copied: {steps}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
