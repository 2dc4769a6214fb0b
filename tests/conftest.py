"""What all rooms' tests share: stores that the real Java engine wrote, and what that engine reads back from them.

`tests/golden/NAME.tar.xz` is a store directory, `NAME.jsonl.xz` the Java engine's own listing of it, one JSON object
a line, told apart by `kind`: `queue`, `message`, `lost` (a unit whose record is gone), `key` (what a query finds),
`store`.

    clean     400 puts of every sort, shut down cleanly
    crashed   500 puts, halted: `abort` is there, checkpoint and index are as they were
    propcrc   120 puts with the CRC property at the end of each record
    rolled    900 puts over 54 small commitlog segments
    trimmed   `rolled` without its first 15 segments, opened and closed once more by the Java engine
"""

from __future__ import annotations

import gc
import importlib
import json
import lzma
import os
import pkgutil
import resource
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage
from hypothesis import HealthCheck, settings

import mqstore
import mqstore_tools
from mqstore.files import system
from mqstore.log.store import _open_stores as open_stores

GOLDEN_NAMES = ("clean", "crashed", "propcrc", "rolled", "trimmed")
_GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class GoldenStore:
    """A store at `path`, which the test may change at will, and the lines of its listing, which it may not."""

    name: str
    path: Path
    lines: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def segments(self) -> list[tuple[int, bytes]]:
        """(start offset, bytes) of each commitlog segment, in order."""
        files = sorted((self.path / "commitlog").iterdir())
        return [(int(file.name), file.read_bytes()) for file in files]

    @property
    def units(self) -> dict[tuple[str, int], bytes]:
        """The bytes of each queue's unit files, joined, by (topic, queue id)."""
        return {
            (queue.parent.name, int(queue.name)): b"".join(file.read_bytes() for file in sorted(queue.iterdir()))
            for queue in (self.path / "consumequeue").glob("*/*")
        }


Golden = Callable[[str], GoldenStore]
"""The type of the fixture `golden`."""


@cache
def _listing(name: str) -> list[dict[str, Any]]:
    with lzma.open(_GOLDEN / f"{name}.jsonl.xz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def unpack_archive(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as file:
        file.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
        file.extractall(folder)


@pytest.fixture
def foreign(tmp_path: Path) -> Callable[[str], Path]:
    """`foreign(name)`: one of the stores with kinds of queues that only RocketMQ writes (tests/log/test_foreign.py)."""
    unpack_archive(_GOLDEN / "foreign.tar.xz", tmp_path)
    return lambda name: tmp_path / name


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """`golden(name)` unpacks a golden store into a directory of the caller's own, a new one at each call."""
    masters: dict[str, Path] = {}

    def unpack(name: str) -> GoldenStore:
        if name not in masters:
            folder = tmp_path_factory.mktemp("golden")
            unpack_archive(_GOLDEN / f"{name}.tar.xz", folder)
            masters[name] = folder / name
        copy = tmp_path_factory.mktemp(name) / name
        shutil.copytree(masters[name], copy)
        return GoldenStore(name, copy, _listing(name))

    return unpack


# Stores that tests have killed keep their descriptors for long, and 1,024, as many a shell has it, are soon used up.
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(_hard, 20_000) if _hard > 0 else 20_000, _hard))

_SYNCING = ("/crash/", "/files/", "/stress/")


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_disks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests cut no machine's power: what such a cut leaves is shown on file layers that record and drop (tests/crash,
    tests/faults.py). So only the rooms about syncing itself wait for disks. MQSTORE_TEST_SYNC=1 makes all of them."""
    if os.environ.get("MQSTORE_TEST_SYNC") == "1" or any(room in request.node.nodeid for room in _SYNCING):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(system, "sync_data", lambda fd: None)
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """Tests ask for hundreds of collections, stores that are opened twice among them. They need not look at all that
    earlier modules have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_open_stores() -> Iterator[None]:
    """Close stores that a test left open. Collected later, they would warn in the middle of another test."""
    before = set(open_stores)
    yield
    for store in set(open_stores) - before:
        with suppress(Exception):  # of a disk that the test has broken
            store.closer()


# A run of all tests is one of many: what this one does not draw another does. HYPOTHESIS_PROFILE=default draws more.
# No test says for itself how many. None knows how fast the machine is, and what else it does: nothing fails for taking
# long. A test whose examples share a fixture gives each of them a place of its own there.
_UNASKED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
for _name, _examples in (("quick", 10), ("default", 100)):
    settings.register_profile(_name, max_examples=_examples, deadline=None, suppress_health_check=_UNASKED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

_CAMPAIGNS = ("/campaigns/", "/crash/", "/damage/", "/fuzz/", "/model/", "/stress/")
_COVERED = 1
"""Of a test with many parameters so many are measured. Measuring doubles the time of a test, and they go the same ways:
what is printed is a lower bound."""
_LONGEST = ("/stress/", "_run_twice_in_one_directory", "_question_is_answered", "_under_load_")
"""Parts of the names of tests that take ten seconds and more."""
_UNMEASURED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: at the end one processor would wait for the other. What goes over the same lines again and
    again, campaigns and drawn examples, is not measured."""
    items.sort(key=lambda item: not any(name in item.nodeid for name in _LONGEST))
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        seen[name] += 1
        drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        item.stash[_UNMEASURED] = seen[name] > _COVERED or drawn or any(room in item.nodeid for room in _CAMPAIGNS)


@contextmanager
def _unmeasured() -> Iterator[None]:
    """Not by the marker `no_cover`: that leaves fixtures measured and, in the processes of xdist, where pytest-cov has
    two measurements one upon the other, stops only the upper one."""
    stopped: list[Coverage] = []
    while (running := Coverage.current()) is not None:
        running.stop()
        stopped.append(running)
    try:
        yield
    finally:
        for each in reversed(stopped):
            each.start()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Rewriting asserts takes twice as long when it is measured. So what importing runs is measured before.
    No garbage collection looks at the thousands of collected tests. Tests ask for hundreds of collections."""
    if Coverage.current() is not None:
        for package in (mqstore, mqstore_tools):
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                with suppress(ImportError):  # no pyspark
                    importlib.import_module(module.name)
    gc.disable()
    with _unmeasured():
        try:
            return (yield)
        finally:
            gc.collect()
            gc.freeze()
            gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with _unmeasured() if item.stash[_UNMEASURED] else nullcontext():
        return (yield)
