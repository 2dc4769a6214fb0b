"""Every public class shows itself at work, in a doctest that runs. Those of `mqstore.aio` work as the synchronous ones.

Errors are too many for one each, and say more side by side. Each of them is caught by name in some example, of a
docstring or of the pages, or is what a doctest prints of what it caught.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType

import pytest

import mqstore
from tests.pages import PAGES, examples


def _public(module: ModuleType) -> Iterator[type]:
    return (each for name in module.__all__ if inspect.isclass(each := getattr(module, name)))


CLASSES = [
    each
    for module in (mqstore, mqstore.admin, mqstore.engine, mqstore.errors)
    for each in _public(module)
    if each.__module__ != "mqstore.signalsafe"
]
ERRORS = [each for each in CLASSES if issubclass(each, mqstore.MQStoreError)]


def _name(each: type) -> str:
    return f"{each.__module__}.{each.__qualname__}"


def _parts() -> Iterator[ModuleType]:
    """All that can be had without pyspark, whose part raises no errors of its own."""
    for found in pkgutil.walk_packages(mqstore.__path__, "mqstore."):
        if not found.name.startswith("mqstore.spark"):
            yield importlib.import_module(found.name)


def _caught(code: str) -> Iterator[str]:
    """Names of what the handlers in `code` are for."""
    for handler in ast.walk(ast.parse(code)):
        if isinstance(handler, ast.ExceptHandler) and handler.type is not None:
            yield from re.findall(r"\w+", ast.unparse(handler.type))


def _shown() -> set[str]:
    shown: set[str] = set()
    for code in [code for page in PAGES for code in examples(page)]:
        shown.update(_caught(code))
    finder = doctest.DocTestFinder(exclude_empty=True)
    for module in _parts():
        for test in finder.find(module):
            for example in test.examples:
                shown.update(_caught(example.source))
                shown.update(re.findall(r"^(?:[\w.]+\.)?(\w+)(?=:|$)", example.want, re.M))
    return shown


@pytest.mark.parametrize("each", [each for each in CLASSES if each not in ERRORS], ids=_name)
def test_a_public_class_has_a_doctest_of_its_own(each: type) -> None:
    assert doctest.DocTestParser().get_examples(each.__dict__.get("__doc__") or "")


def test_every_error_is_shown_being_raised_and_caught() -> None:
    shown = _shown()

    assert [each.__name__ for each in ERRORS if each.__name__ not in shown] == []
