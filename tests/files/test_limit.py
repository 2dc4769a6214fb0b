from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mqstore.errors import StoreIOError
from mqstore.files import limit
from mqstore.files.descriptors import DescriptorCache
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.readonly_fs import QUIET
from tests.scarce import free_descriptors

MAPPINGS_ARE_FREE = sys.platform == "linux" or sys.version_info >= (3, 13)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    made = [tmp_path / str(n) for n in range(8)]
    for path in made:
        path.write_bytes(b"%d" % int(path.name) * 4096)
    return [str(path) for path in made]


def open_and_close(fs: FileSystem, path: str) -> None:
    fs.close(fs.open(path, os.O_RDONLY))


CALLS: dict[str, Callable[[FileSystem, str], object]] = {
    "open": open_and_close,
    "scandir": lambda fs, path: fs.scandir(os.path.dirname(path)),
    "scandir_files": lambda fs, path: fs.scandir_files(os.path.dirname(path)),
    "scandir_directories": lambda fs, path: fs.scandir_directories(os.path.dirname(path)),
    "sync_directory": lambda fs, path: fs.sync_directory(os.path.dirname(path)),
}


@pytest.mark.parametrize("fs", [REAL, QUIET], ids=["real", "quiet"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_that_finds_no_descriptor_is_made_again(
    paths: list[str], fs: FileSystem, call: Callable[[FileSystem, str], object]
) -> None:
    caches = [DescriptorCache(fs, 10, writable=False) for _ in range(2)]
    with free_descriptors(4):
        for number, path in enumerate(paths[:4]):
            caches[number % 2].pread(path, 1, 0)
        call(fs, paths[4])
        assert [len(cache) for cache in caches] == [0, 0]
        assert caches[0].pread(paths[5], 1, 0) == b"5"
    for cache in caches:
        cache.close()


def test_exhausted_descriptors_raise(paths: list[str]) -> None:
    for call in CALLS.values():
        with free_descriptors(0), pytest.raises(StoreIOError) as caught:
            call(REAL, paths[0])
        assert caught.value.errno == errno.EMFILE


def test_a_descriptor_in_use_is_not_given_back(paths: list[str]) -> None:
    class Reading(FileSystem):
        def pread(self, fd: int, length: int, position: int) -> bytes:
            with pytest.raises(StoreIOError):
                REAL.open(paths[1], os.O_RDONLY)
            return super().pread(fd, length, position)

    cache = DescriptorCache(Reading(), 10)
    with free_descriptors(1):
        assert cache.pread(paths[0], 4, 0) == b"0000"
    cache.close()


@pytest.mark.skipif(not MAPPINGS_ARE_FREE, reason="before CPython 3.13 a mapping keeps a descriptor there")
@pytest.mark.parametrize("writable", [False, True])
def test_mappings_keep_no_descriptor(paths: list[str], writable: bool) -> None:
    mappings = []
    with free_descriptors(1):
        for path in paths:
            fd = REAL.open(path, os.O_RDWR)
            mappings.append(REAL.map(fd, 4096, writable=writable))
            REAL.close(fd)
    for number, mapping in enumerate(mappings):
        assert mapping[:] == b"%d" % number * 4096
        assert memoryview(mapping).readonly is not writable
    if writable:
        mappings[3][:5] = b"hello"
        assert Path(paths[3]).read_bytes()[:6] == b"hello3"
    Path(paths[2]).write_bytes(b"other" + bytes(4091))
    assert mappings[2][:5] == b"other"


def test_free_descriptors_are_counted() -> None:
    before = limit.free_descriptors()
    fd = os.open(os.devnull, os.O_RDONLY)
    assert limit.free_descriptors() == before - 1
    os.close(fd)
    with free_descriptors(20):
        assert 0 < limit.free_descriptors() <= 21
