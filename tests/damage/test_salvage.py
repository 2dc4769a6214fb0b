"""Random damage to random stores, by the rule of the matrix: all whole messages come back, and no others.

make salvage N=5000                       as many stores; a smaller number is part of `make test`
MQSTORE_CAMPAIGN_CASE=<seed> pytest ...   one store again, by the seed that its failure shows
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.damage.kinds import KINDS, Target, flip
from tests.damage.support import FORMATS, STATES, Shape, check, make, overwrite, segments

ROUNDS = int(os.environ.get("MQSTORE_CAMPAIGN_ROUNDS", "4"))
ONE = os.environ.get("MQSTORE_CAMPAIGN_CASE", "")
PARTS = max(2, ROUNDS // 50)
"""Tests that share the seeds, so that each processor has some and each test ends in time."""
SPARED = ("lock", "mqstore.json", "mqstore.profile", "abort")
"""A damaged manifest is refused. An abort mark of another boot lets opening cut the log at the first damage."""
# Where no file has the length that the manifest says, a store may be refused: which of them is wrong cannot be told.
# A checkpoint of another store may show the log's end in front of damage; what lies behind is moved to cut/.
_SPARED_KINDS = ("abort", "all segments too", "checkpoint of another store")
SALVAGED = [name for name in KINDS if not any(words in name for words in _SPARED_KINDS)]


def _flips(file: Path, draw: random.Random) -> None:
    for _ in range(draw.randrange(1, 9)):
        flip(file, draw.randrange(file.stat().st_size), draw.randrange(8))


def _zeros(file: Path, draw: random.Random) -> None:
    overwrite(file, draw.randrange(file.stat().st_size) // 512 * 512, bytes(draw.randrange(1, 4097)))


def _random_bytes(file: Path, draw: random.Random) -> None:
    overwrite(file, draw.randrange(file.stat().st_size), draw.randbytes(draw.randrange(1, 5001)))


ANYWHERE: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped bits": _flips,
    "zeros": _zeros,
    "random bytes": _random_bytes,
}


def _damage(target: Target) -> tuple[list[str], bool]:
    """Do one to four kinds of damage. Return what was done, and whether opening may be refused."""
    draw, done, may_refuse = target.draw, [], False
    for _ in range(draw.randrange(1, 5)):
        if draw.random() < 0.5:
            name = draw.choice(SALVAGED)
            with suppress(OSError, LookupError):  # the files may be gone by the damage before
                KINDS[name].damage(target)
            may_refuse |= KINDS[name].may_refuse
            done.append(name)
        else:
            name = draw.choice(list(ANYWHERE))
            files = sorted(file for file in target.path.rglob("*") if file.is_file() and file.stat().st_size)
            if not (left := [file for file in files if file.name not in SPARED and file.suffix != ".bak"]):
                continue
            file = draw.choice(left)
            ANYWHERE[name](file, draw)
            done.append(f"{name} in {file.relative_to(target.path)}")
    return done, may_refuse


def _another(path: Path, form: str, state: str, shape: Shape) -> Path:
    return path if path.exists() else make(path, form, state, shape._replace(seed=shape.seed + 1)).path


def _salvage(seed: int, folder: Path) -> str:
    """Damage the store of a seed. Return what commands do wrong with it, "" for nothing."""
    draw = random.Random(seed)
    shape = Shape(
        messages=draw.randrange(10, 120),
        topics=draw.randrange(2, 5),  # of one alone topics.json has no backup
        body_bytes=draw.choice((30, 300, 2000)),
        segment_bytes=draw.choice((1 << 12, 1 << 14, 1 << 16)),
        seed=seed,
    )
    form, state = draw.choice(FORMATS), draw.choice(STATES)
    made = make(folder / "made", form, state, shape)
    store = Path(shutil.copytree(made.path, folder / "store"))
    done, may_refuse = _damage(Target(made, store, draw, lambda: _another(folder / "another", form, state, shape)))
    lengths = {file.stat().st_size for file in segments(store)}
    if lengths and made.segment_bytes not in lengths:
        return ""  # refused: damage and a wrong manifest cannot be told apart
    problems = check(made, store, may_refuse=may_refuse, may_find_more=True)
    if not problems:
        return ""
    return f"MQSTORE_CAMPAIGN_CASE={seed}: {form}, {state}, {shape}, {done}\n    " + "\n    ".join(problems)


@pytest.mark.parametrize("part", range(PARTS))
def test_whole_messages_come_back_from_random_damage(tmp_path: Path, part: int) -> None:
    seeds = [int(ONE)] if ONE else range(part, ROUNDS, PARTS)
    failed = []
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        if problems := _salvage(seed, folder):
            failed.append(problems)
        shutil.rmtree(folder)
    assert not failed, f"{len(failed)} of {len(seeds)} stores:\n" + "\n".join(failed[:50])
