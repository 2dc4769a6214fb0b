"""The descriptor cache: bounded, never closing what a thread is using, never serving a file that was replaced."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqstore.errors import StoreClosedError
from mqstore.files.descriptors import DescriptorCache, File
from mqstore.files.filesystem import REAL
from tests.faults import FaultyFileSystem


class HookedFileSystem(FaultyFileSystem):
    """Calls `hook(operation)` inside pread and open, where another thread might run."""

    hook: Callable[[str], None] | None = None

    def _call(self, operation: str) -> None:
        hook, self.hook = self.hook, None
        if hook is not None:
            hook(operation)

    def pread(self, fd: int, length: int, position: int) -> bytes:
        self._call("pread")
        return super().pread(fd, length, position)

    def open(self, path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        self._call("open")
        return fd

    def opened(self) -> list[str]:
        return [Path(call.path).name for call in self.calls if call.operation == "open"]

    def closed(self) -> list[str]:
        return [Path(call.path).name for call in self.calls if call.operation == "close"]


@pytest.fixture
def fs() -> HookedFileSystem:
    return HookedFileSystem()


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    for name in "abcd":
        (tmp_path / name).write_bytes(name.encode() * 4)
    return [str(tmp_path / name) for name in "abcd"]


def test_the_least_recently_used_goes_first(fs: HookedFileSystem, paths: list[str]) -> None:
    a, b, c, _ = paths
    cache = DescriptorCache(fs, 2)
    for path in (a, b, a, c, a, b):
        cache.pread(path, 1, 0)
    assert fs.opened() == ["a", "b", "c", "b"]
    assert fs.closed() == ["b", "c"]
    assert len(cache) == 2
    cache.close()


def test_a_descriptor_in_use_is_not_evicted(fs: HookedFileSystem, paths: list[str]) -> None:
    a, b, c, _ = paths
    cache = DescriptorCache(fs, 1)

    def meanwhile(_: str) -> None:
        assert cache.pread(b, 4, 0) == b"bbbb"
        assert cache.pread(c, 4, 0) == b"cccc"
        assert "a" not in fs.closed()

    fs.hook = meanwhile
    assert cache.pread(a, 4, 0) == b"aaaa"
    assert len(cache) == 1
    cache.close()
    assert sorted(fs.closed()) == sorted(fs.opened())


@pytest.mark.parametrize("how", ["forget", "close"])
def test_a_descriptor_let_go_in_use_is_closed_by_its_user(fs: HookedFileSystem, paths: list[str], how: str) -> None:
    cache = DescriptorCache(fs, 2)

    def meanwhile(_: str) -> None:
        cache.forget(paths[0]) if how == "forget" else cache.close()
        assert fs.closed() == []

    cache.pread(paths[0], 1, 0)
    fs.hook = meanwhile
    assert cache.pread(paths[0], 4, 0) == b"aaaa"
    assert fs.closed() == ["a"]
    cache.close()
    assert fs.closed() == ["a"]


def test_forget_lets_a_replaced_file_be_seen(fs: HookedFileSystem, paths: list[str]) -> None:
    cache = DescriptorCache(fs, 2)
    cache.pread(paths[0], 1, 0)
    os.replace(paths[1], paths[0])
    cache.forget(paths[0])
    cache.forget("never seen")
    assert cache.pread(paths[0], 4, 0) == b"bbbb"
    cache.close()


def test_a_file_replaced_while_it_is_being_opened_is_not_kept(fs: HookedFileSystem, paths: list[str]) -> None:
    cache = DescriptorCache(fs, 2)

    def meanwhile(_: str) -> None:  # our thread has the old file open but not yet in the table
        os.replace(paths[1], paths[0])
        cache.forget(paths[0])

    fs.hook = meanwhile
    assert cache.pread(paths[0], 4, 0) == b"aaaa"
    assert cache.pread(paths[0], 4, 0) == b"bbbb"
    cache.close()
    assert fs.closed() == ["a", "a"]


def test_a_closed_cache_refuses(fs: HookedFileSystem, paths: list[str]) -> None:
    cache = DescriptorCache(fs, 2)
    cache.close()
    cache.close()
    with pytest.raises(StoreClosedError):
        cache.pread(paths[0], 1, 0)


def test_file_outlives_the_finalizers_of_a_garbage_cycle(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    read = []

    class Owner:
        def __init__(self) -> None:
            self.file = File(REAL, str(tmp_path / "file"), os.O_RDONLY)
            self.cycle = self

        def __del__(self) -> None:
            read.append(os.pread(self.file.fd, 4, 0))

    fd = Owner().file.fd
    gc.collect()

    assert read == [b"data"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_data_ends_before_the_holes_of_a_file(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.write(b"data")
        file.truncate(1 << 20)
    cache = DescriptorCache()

    assert 4 <= cache.data_end(str(tmp_path / "sparse"), 1 << 20) <= 1 << 20
    assert cache.pread(str(tmp_path / "sparse"), 4, 0) == b"data"
    assert cache.data_end(str(tmp_path / "missing"), 1 << 20) == 0
    cache.close()


@pytest.mark.parametrize("order", [("file", "user"), ("user", "file")])
def test_descriptor_is_closed_after_all_finalizers_of_its_cycle(tmp_path: Path, order: tuple[str, str]) -> None:
    """The collector calls finalizers in any order, and that of a forgotten store still writes. By a number that was
    closed before it, and had become that of another file, units were written into the commit log."""
    (tmp_path / "a").write_bytes(b"x")
    sizes: list[int] = []

    class User:
        made: dict[str, Any]
        number: int

        def __del__(self) -> None:
            sizes.append(os.fstat(self.number).st_size)

    def use() -> int:
        made: dict[str, Any] = {}
        for name in order:
            made[name] = User() if name == "user" else File(REAL, str(tmp_path / "a"), os.O_RDONLY)
        user = made["user"]
        user.made, user.number = made, made["file"].fd
        return int(user.number)

    number = use()
    gc.collect()
    assert sizes == [1]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
