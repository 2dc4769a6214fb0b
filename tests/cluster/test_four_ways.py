"""The program of docs/cluster.md in four ways, and the table of that page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

import mqstore
from mqstore import Store
from mqstore.remote.cluster.degrade import DIFFERENCES
from tests.cluster.support import Cluster
from tests.pages import ROOT, examples

PAGE = ROOT / "docs" / "cluster.md"
LETTERS = [f"{book} is on its way" for book in ("Emma", "Dracula", "Ulysses")]


@contextmanager
def served(path: Path) -> Iterator[Store]:
    with mqstore.open(path) as store, store.serve("127.0.0.1:0") as server, mqstore.connect(server.address) as far:
        yield far


WAYS: dict[str, Callable[[Path], AbstractContextManager[Store]]] = {
    "open": mqstore.open,
    "shared": lambda path: mqstore.open(path, shared=True),
    "connect": served,
}


def sell(store: Store) -> list[str]:
    """Run the program of the page."""
    [program] = examples(PAGE)
    definitions, opening, _ = program.partition("with mqstore.open(")
    assert opening
    names: dict[str, Callable[[Store], list[str]]] = {"__name__": "example"}  # type: ignore[dict-item]
    exec(compile(definitions, "cluster.md", "exec"), names)
    return names["sell"](store)


@pytest.mark.parametrize("way", WAYS)
def test_program_runs_on_a_directory(way: str, tmp_path: Path) -> None:
    with WAYS[way](tmp_path / "bookshop") as store:
        assert sell(store) == LETTERS


def test_program_runs_on_a_cluster(cluster: Cluster) -> None:
    with mqstore.connect(f"127.0.0.1:1;{cluster.name_server}") as store:  # the first name server is away
        assert sell(store) == LETTERS


def test_page_lists_every_difference() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]

    assert {name: tuple(rest) for name, *rest in rows if name in DIFFERENCES} == DIFFERENCES
