"""Each kind of damage to each kind of store: all whole messages come back, and no others, at each of three times.

before recovery    by `export`, which changes nothing and whose exit code says whether something is missing
after `recover`    which changes nothing when it is run again, and after which `verify` finds nothing
after opening for writing, with the message that is then put

Every second case runs without the compiled parts. `make salvage` runs all cases in both ways.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.damage.kinds import KINDS, Target
from tests.damage.support import FORMATS, STATES, Made, Shape, check, contents, judge, make
from tests.without import compiled_parts_left_out

COLUMNS = tuple(product(FORMATS, STATES))
ALL = "MQSTORE_CAMPAIGN_ROUNDS" in os.environ
CASES = [
    (name, *column, way)
    for number, name in enumerate(KINDS)
    for cell, (column, way) in enumerate(product(COLUMNS, ("compiled", "Python")))
    if ALL or cell == number % 12
    if (name, column[0]) != ("flags", "rocketmq")  # no checksum covers them: such a message is not known to be whole
]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """`made(form, state, seed=1)`: an undamaged store, the same at each call."""

    @cache
    def find(form: str, state: str, seed: int = 1) -> Made:
        return make(tmp_path_factory.mktemp("made") / "store", form, state, Shape(seed=seed))

    return find


@pytest.mark.parametrize(("form", "state"), COLUMNS)
def test_an_undamaged_store_loses_nothing(made: Callable[..., Made], tmp_path: Path, form: str, state: str) -> None:
    store = Path(shutil.copytree(made(form, state).path, tmp_path / "store"))

    assert not check(made(form, state), store)


@pytest.mark.parametrize(("name", "form", "state", "way"), CASES)
def test_whole_messages_come_back(
    made: Callable[..., Made], tmp_path: Path, name: str, form: str, state: str, way: str
) -> None:
    undamaged, kind = made(form, state), KINDS[name]
    store = Path(shutil.copytree(undamaged.path, tmp_path / "store"))
    kind.damage(Target(undamaged, store, random.Random(name), lambda: made(form, state, seed=2).path))
    assert contents(store) != contents(undamaged.path)
    if form != "rocketmq":  # there no checksum covers headers and properties
        assert (judge(undamaged, store).lost > 0) == kind.loses

    with nullcontext() if way == "compiled" else compiled_parts_left_out():
        problems = check(undamaged, store, may_refuse=kind.may_refuse, may_find_more=kind.may_find_more)

    assert not problems, "\n".join(problems)
