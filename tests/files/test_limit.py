from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mqstore.errors import StoreIOError
from mqstore.files import filesystem
from mqstore.files.descriptors import DescriptorCache
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.readonly_fs import QUIET
from tests.scarce import free_descriptors


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


def test_free_descriptors_are_counted() -> None:
    before = filesystem.free_descriptors()
    fd = os.open(os.devnull, os.O_RDONLY)
    assert filesystem.free_descriptors() == before - 1
    os.close(fd)
    with free_descriptors(20):
        assert 0 < filesystem.free_descriptors() <= 21
