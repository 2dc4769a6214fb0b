"""JSON files, never absent, partial or silently reset (format#json-dialects, format#json-save).

Such files are the manifest, topics, groups, committed offsets, delay progress and others.

==========================  ==========================================================================================
name                        content
==========================  ==========================================================================================
``X.json``                  the value
``X.json.bak``              the value before it
``X.json.tmp``              a value being written, never read
``X.json.bak.tmp``          a second name of ``X.json`` before it becomes ``.bak``, never read
``X.json.corrupt-<ms>``     a file that did not decode, moved aside by a writer
==========================  ==========================================================================================

Saving, with the state after a crash right after each step (old = the previous value, which may be "never written")::

    1  write X.json.tmp, fdatasync           X old            tmp is synced before any name leads to it
    2  X.json -> X.json.bak, by a hard link  X old, bak old   skipped when X.json does not decode: a good .bak stays
    3  X.json.tmp -> X.json                  X new, bak old   one rename, so never absent, never partial
    4  sync the folder                       and durable      the renames may reach the disk in any order, since every
                                                              file they lead to was synced before

Step 2 reads X.json, unless it is still in the state (`FileState`) in which the caller's last save left it.

A *quick save* omits the syncs: the kernel has the value, so it survives `kill -9`, and a power cut may tear it. ::

    1  write X.json.tmp                        X old
    2  X.json -> X.json.bak, sync the folder   X old, bak old   only by the first quick save after a synced one
    3  X.json.tmp -> X.json                    X new, bak old   after a power cut X is old, or newer, or torn

A later synced save leaves the ``.bak`` unchanged, since the file that it replaces may be torn on disk.

Limits keep a foreign file from exhausting memory: an object of five bytes takes 230 as a dict. Both are checked before
decoding, and before writing. 10,000 topics, or 100,000 offsets, need a tenth of that. The worst file within them costs
`mqstore inspect` 0.6 GiB: 17 bytes for a byte of long strings, 600 for a value.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from mqstore.clock import SYSTEM_CLOCK, Clock
from mqstore.errors import CorruptStoreError, FormatError, MQStoreError, StoreIOError
from mqstore.files.filesystem import FILE_MODE, REAL, FileSystem
from mqstore.layout.jsontext import STORE, decode

#: Limits of a file (see above). A file beyond them is refused with StoreIOError and left alone: it is not damaged.
JSON_BYTES_MAX = STORE.size
#: Maximum number of commas and opening brackets anywhere, which are at least as many as the values.
JSON_VALUES_MAX = STORE.values

Check = Callable[[dict[str, Any]], object]
FileState = tuple[int, int, int]
"""Inode, length in bytes and modification time in ns of a file. Any change of its content changes this."""
NO_CHECKS: Mapping[str, Check] = MappingProxyType({})
"""For callers that check no file."""

_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True).encode
# Either a string, left alone, or an unquoted integer key with the brace or comma before it. The string's closing quote
# is optional and its body possessive, so that broken input is scanned once, not once for each quotation mark.
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*+"?|([{,]\s*+)(-?[0-9]++)(\s*+:)', re.DOTALL)


class LoadedJson(NamedTuple):
    """Content of a file, None if it was never written, and a sentence for each of its `problems`."""

    value: dict[str, Any] | None
    problems: list[str]


def decode_json(data: bytes) -> dict[str, Any]:
    """Decode the object in `data`, in either dialect. The last of equal keys counts, as in Java. A byte order mark, as
    some editors put it first, is skipped.

    Raises `FormatError` for everything else: no bytes, another type on top, NaN, too much nesting, not UTF-8.

    >>> decode_json(b'{"offsetTable":{"T@g":{0:250,1:251}}}')
    {'offsetTable': {'T@g': {'0': 250, '1': 251}}}
    """
    if not data:
        raise FormatError("the file is empty", "json", 0)
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise FormatError("not UTF-8", "json", error.start) from error
    try:
        try:
            value = decode(text)
        except FormatError:
            value = decode(_TOKEN.sub(_quote_key, text))
    except FormatError as error:
        if not isinstance(cause := error.__cause__, json.JSONDecodeError):
            raise
        # Columns shifted when keys were quoted, but lines did not.
        line_start = 0
        for _ in range(cause.lineno - 1):
            line_start = data.index(b"\n", line_start) + 1
        raise FormatError(f"not JSON: {cause.msg} in line {cause.lineno}", "json", line_start) from cause
    if not isinstance(value, dict):
        raise FormatError(f"the top level must be an object, not {type(value).__name__}", "json", 0)
    return value


def _quote_key(match: re.Match[str]) -> str:
    before, digits, after = match.groups()
    return match[0] if digits is None else f'{before}"{digits}"{after}'


class EncodedEntry(str):
    """Line of a table in a JSON file: a key and its value, encoded by `encode_entry`."""

    __slots__ = ()


def encode_entry(key: str | int, value: object) -> EncodedEntry:
    """Encode one entry of a table, which `encode_json` accepts in place of the value. Raises the same errors.

    >>> encode_entry("orders", {"perm": 6, "order": False})
    '"orders": {"order": false, "perm": 6}'
    """
    return EncodedEntry(_dumps({key: value})[1:-1])


def encode_json(value: dict[str, Any]) -> bytes:
    """Encode strict JSON: UTF-8, sorted keys, a line for each member and each entry of a table.
    Integer keys become strings. Raises ValueError for NaN and infinities, TypeError for types that JSON lacks."""
    text: list[str] = []
    for name in sorted(value):
        member = value[name]
        text += [",\n  " if text else "{\n  ", _dumps(str(name)), ": "]
        if member and isinstance(member, dict):
            lines = [
                entry if type(entry := member[key]) is EncodedEntry else encode_entry(key, entry)
                for key in sorted(member)
            ]
            text += ["{\n    ", ",\n    ".join(lines), "\n  }"]
        else:
            text.append(_dumps(member))
    text.append("\n}\n" if text else "{}\n")
    # Only an escape can represent a lone surrogate, which comes from a name that was not UTF-8.
    return "".join(text).encode("utf-8", "backslashreplace")


def load_json(
    path: str | os.PathLike[str],
    *,
    writer: bool,
    fs: FileSystem = REAL,
    clock: Clock = SYSTEM_CLOCK,
    check: Check | None = None,
    root: str | os.PathLike[str] | None = None,
) -> LoadedJson:
    """Return the last good value of `path`, or of its ``.bak``. The value is None if neither was ever written.

    `check(value)` raises ValueError if the object has the wrong shape, which counts as not decoding. A `writer` moves a
    bad main file aside and replaces it by its ``.bak``'s value, if the disk permits. A reader changes nothing. `root`
    is the store directory that an error message names (default: the file's folder, or that folder's parent if it is
    ``config``).

    Raises `CorruptStoreError` if no good value is left although there was one. Raises `StoreIOError` if a file cannot
    be read. Falling back would then set offsets back without need.
    """
    main = os.fspath(path)
    backup = main + ".bak"
    value, fault = _read(main, fs, check)
    if value is not None:
        return LoadedJson(value, [])
    backup_value, backup_fault = _read(backup, fs, check)
    if backup_value is None:
        if fault is None and backup_fault is None:
            return LoadedJson(None, [])
        what = "; ".join(
            f"{name} {'is missing' if why is None else 'is damaged: ' + why}"
            for name, why in ((main, fault), (backup, backup_fault))
        )
        raise CorruptStoreError(
            what, main, repair=f"mqstore recover {shlex.quote(_store_of(main, root))} --rebuild config"
        )
    what = "missing" if fault is None else f"damaged ({fault})"
    problem = f"{main} is {what}; the value of {backup} was taken"
    if writer:
        if fault is not None:
            problem += f", the damaged file was moved to {_move_aside(main, fs, clock)}"
        with suppress(OSError, MQStoreError):
            mode = stat.S_IMODE(fs.stat(backup).st_mode)
            _write_new(main + ".tmp", _encode_checked(backup_value, main), fs, mode)
            fs.replace(main + ".tmp", main)
            fs.sync_directory(os.path.dirname(main) or ".")
    return LoadedJson(backup_value, [problem])


def save_json(
    path: str | os.PathLike[str],
    value: dict[str, Any],
    fs: FileSystem = REAL,
    *,
    check: Check | None = None,
    file_mode: int = FILE_MODE,
    synced: bool = True,
    back_up: bool = True,
    last: FileState | None = None,
) -> FileState:
    """Save `value` at `path`, durably, and keep the previous value at ``.bak``. The folder must exist.

    With `synced` false this is a quick save. `back_up` must be true if the file at `path` is on disk, and false if it
    comes from a quick save. `load_json` describes `check`. Returns the state of the new file, to be passed as `last` to
    the next save. A file that is still in this state is known to be good.

    Raises StoreIOError for a value that is too large to be loaded again. After an error `path` has the old value, or
    the new one if only the last sync failed. The call may be repeated. One caller at a time for each file.

    Cost: two syncs (the file, the folder), and one read of the old file unless it is in state `last`. A quick save
    without `back_up` has no such cost.
    """
    main = os.fspath(path)
    folder = os.path.dirname(main) or "."
    content = _encode_checked(value, main)
    state = _write_new(main + ".tmp", content, fs, file_mode, synced=synced)
    try:
        is_last = last is not None and fs.exists(main) and state_of(main, fs) == last
        if back_up and (is_last or _read(main, fs, check).value is not None):
            _back_up(main, fs, file_mode)
            if not synced:
                fs.sync_directory(folder)
        fs.replace(main + ".tmp", main)
    except OSError:
        _remove_quietly(main + ".tmp", fs)
        raise
    if synced:
        fs.sync_directory(folder)
    return state


def sync_json(path: str | os.PathLike[str], fs: FileSystem = REAL) -> None:
    """Make the file at `path` durable if it exists, since a killed process may have quick-saved it."""
    with suppress(FileNotFoundError), fs.opened(path, os.O_RDONLY) as fd:
        fs.fdatasync(fd)


def check_backup(
    path: str | os.PathLike[str],
    *,
    writer: bool,
    fs: FileSystem = REAL,
    clock: Clock = SYSTEM_CLOCK,
    check: Check | None = None,
) -> str | None:
    """Return the fault of the ``.bak`` of a `path` that loaded well, since loading does not read it then.
    A `writer` moves a bad backup aside and replaces it by the value of `path`, before the next save overwrites it."""
    main = os.fspath(path)
    backup = main + ".bak"
    fault = _read(backup, fs, check).fault
    if fault is None:
        return None
    problem = f"{backup} is damaged ({fault}); {main} is good"
    if writer:
        problem += f"; it was moved to {_move_aside(backup, fs, clock)} and replaced by the good one's value"
        sync_json(main, fs)
        _back_up(main, fs, stat.S_IMODE(fs.stat(main).st_mode))
        fs.sync_directory(os.path.dirname(main) or ".")
    return problem


def set_aside_json(
    path: str | os.PathLike[str], *, fs: FileSystem = REAL, clock: Clock = SYSTEM_CLOCK, check: Check | None = None
) -> list[str]:
    """Move `path` and its ``.bak`` aside if they are bad, and return the new names.
    For repair: afterwards the file loads from the good one, or as never written."""
    moved = []
    for name in (os.fspath(path), os.fspath(path) + ".bak"):
        if _read(name, fs, check).fault is not None:
            moved.append(_move_aside(name, fs, clock))
    return moved


def read_json(path: str | os.PathLike[str], fs: FileSystem) -> bytes:
    """Return the content of a JSON file, for `decode_json`. Raises StoreIOError if it is beyond the limits."""
    try:
        data = fs.read_whole(path, JSON_BYTES_MAX)
    except StoreIOError as error:
        if error.errno != errno.EFBIG:
            raise
        text = f"{error.strerror} (JSON_BYTES_MAX); {_TOO_LARGE}"
        raise StoreIOError(errno.EFBIG, text, error.filename, error.operation) from error
    _check_limits(data, os.fspath(path), "read")
    return data


_TOO_LARGE = (
    "if the store really has so many topics and groups, delete unused ones with the program that wrote the file; "
    "otherwise move the file away, and its backup is used, or no value without one"
)


def _encode_checked(value: dict[str, Any], path: str) -> bytes:
    """Encode as `encode_json` does. Raises StoreIOError for a value that could not be loaded again."""
    content = encode_json(value)
    _check_limits(content, path, "save")
    return content


def _check_limits(data: bytes, path: str, operation: str) -> None:
    text = ""
    if len(data) > JSON_BYTES_MAX:
        text = f"{len(data)} bytes, more than the {JSON_BYTES_MAX} that such a file may have (JSON_BYTES_MAX)"
    elif (values := sum(map(data.count, (b",", b"{", b"[")))) > JSON_VALUES_MAX:
        text = f"{values} values, more than the {JSON_VALUES_MAX} that such a file may have (JSON_VALUES_MAX)"
    if text:
        raise StoreIOError(errno.EFBIG, f"{text}; {_TOO_LARGE}", path, operation)


class _Read(NamedTuple):
    value: dict[str, Any] | None
    fault: str | None  # both None: no such file


def _read(path: str, fs: FileSystem, check: Check | None) -> _Read:
    try:
        data = read_json(path, fs)
    except FileNotFoundError:
        return _Read(None, None)
    try:
        value = decode_json(data)
        if check is not None:
            check(value)
    except ValueError as error:
        return _Read(None, str(error))
    return _Read(value, None)


def state_of(file: int | str | os.PathLike[str], fs: FileSystem) -> FileState:
    """Return the state of a file by its descriptor or path."""
    found = fs.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _write_new(path: str, content: bytes, fs: FileSystem, mode: int, *, synced: bool = True) -> FileState:
    """Write a new file and sync it if `synced`. Never overwrites a leftover, since a backup may be a link to it."""
    fs.unlink(path, missing_ok=True)
    try:
        with fs.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as fd:
            fs.pwrite(fd, content, 0)
            if synced:
                fs.fdatasync(fd)
            return state_of(fd, fs)
    except OSError:
        _remove_quietly(path, fs)
        raise


def _back_up(main: str, fs: FileSystem, mode: int) -> None:
    """Give the file at `main` the name ``.bak`` as well. An older ``.bak`` stays until the rename."""
    temporary = main + ".bak.tmp"
    fs.unlink(temporary, missing_ok=True)
    try:
        fs.link(main, temporary)
    except OSError:
        # The file system has no hard links, or the file has too many. For any other cause the copy fails, too.
        _write_new(temporary, fs.read_whole(main, JSON_BYTES_MAX), fs, mode)
    try:
        fs.replace(temporary, main + ".bak")
        # POSIX: renaming between two names of one file does nothing and keeps both. They are two names of one file if a
        # crash came between steps 2 and 3 of the previous save.
        fs.unlink(temporary, missing_ok=True)
    except OSError:
        _remove_quietly(temporary, fs)
        raise


def _move_aside(path: str, fs: FileSystem, clock: Clock) -> str:
    stamp_ms = clock.now_ms()
    while fs.exists(aside := f"{path}.corrupt-{stamp_ms}"):  # never over an earlier one
        stamp_ms += 1
    fs.replace(path, aside)
    fs.sync_directory(os.path.dirname(path) or ".")
    return aside


def _remove_quietly(path: str, fs: FileSystem) -> None:
    """Remove a leftover while an error is being raised. The next save removes it if this cannot."""
    with suppress(OSError, MQStoreError):
        fs.unlink(path, missing_ok=True)


def _store_of(path: str, root: str | os.PathLike[str] | None) -> str:
    if root is not None:
        return os.fspath(root)
    folder = os.path.dirname(os.path.abspath(path))
    return os.path.dirname(folder) if os.path.basename(folder) == "config" else folder
