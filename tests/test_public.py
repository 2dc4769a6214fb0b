"""The public API: its size, which may only shrink, and a page for each name."""

from __future__ import annotations

import importlib
import inspect
import re
from importlib import metadata

import mqstore
import mqstore.aio
from mqstore.broker.broker import Broker
from tests.pages import ROOT

MODULES = ("mqstore", "mqstore.admin", "mqstore.engine", "mqstore.jobs")
MEMBERS_MAX = 349
"""Limit for the exported names and the public members of exported classes. Lower it when one goes."""
BROKER_MAX = 50
"""The same for `Store.broker`, whose class has no public name."""


def _public() -> dict[str, object]:
    return {f"{module}.{name}": value for module in MODULES for name, value in _names(module)}


def _names(module: str) -> list[tuple[str, object]]:
    loaded = importlib.import_module(module)
    return [(name, getattr(loaded, name)) for name in loaded.__all__]


def _members(value: object) -> list[str]:
    """Return the public members of a class that its built-in bases do not have."""
    if not inspect.isclass(value):
        return []
    bases = [base for base in (object, Exception, tuple, dict) if issubclass(value, base)]
    found = (name for name, _ in inspect.getmembers(value) if not name.startswith("_"))
    return [name for name in found if not any(hasattr(base, name) for base in bases)]


def test_public_api_does_not_grow() -> None:
    distinct = {id(value): value for value in _public().values()}

    assert sum(1 + len(_members(value)) for value in distinct.values()) <= MEMBERS_MAX
    assert len(_members(Broker)) <= BROKER_MAX


def test_each_public_name_is_on_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    words = {word for page in pages for word in re.findall(r"\w+", page.read_text())}

    assert [name for name in _public() if name.rpartition(".")[2] not in words] == []


def test_completion_shows_the_public_names_only() -> None:
    for module in (mqstore, mqstore.aio):
        shown = set(dir(module))
        assert shown - {"admin", "aio", "engine", "errors", "testing"} == set(module.__all__)
        assert [name for name in shown if not hasattr(module, name)] == []
    assert not hasattr(mqstore, "nothing")


def test_version_is_that_of_the_package() -> None:
    assert mqstore.__version__ == metadata.version("mqstore")
