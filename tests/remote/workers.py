"""Work of processes that share a directory, in a module that a spawned process can import."""

from __future__ import annotations

from pathlib import Path

import mqstore


def take_all(path: Path, done: Path) -> None:
    """Take jobs until there are none, and note each."""
    with mqstore.open(path, shared=True) as store:
        jobs, results = store.queue("jobs", codec=mqstore.TEXT), store.queue("results", codec=mqstore.TEXT)
        try:
            while True:
                with jobs.get(timeout=0.3) as task:
                    results.put(task.value)
        except mqstore.QueueEmpty:
            done.touch()
