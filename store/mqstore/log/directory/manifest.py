"""Manifest of a store, read from its file or derived from the other files (format#manifest, format#sizes).

Only `save` and `write_guard` change files. They run under the writer lock.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from mqstore.clock import Clock
from mqstore.errors import ConfigError, CorruptStoreError, MQStoreError, NotAStoreError, UnsupportedStoreError
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.jsonfile import load_json, save_json
from mqstore.files.segment import segment_start
from mqstore.layout.arrays.scan import find_next, read_run
from mqstore.layout.consumequeue import UNIT_BYTES
from mqstore.layout.indexfile import ENTRY_BYTES, file_bytes, slots_entries_from_length
from mqstore.layout.record import Checksum
from mqstore.log.derived.indexshape import shape_of_file
from mqstore.options import DEFAULT_DELAY_LEVELS, DEFAULT_MESSAGE_BYTES, Profile, StoreConfig, delay_table_ms
from mqstore.version import VERSION

MANIFEST = "mqstore.json"
GUARD = os.path.join("commitlog", "mqstore.profile")
SCHEMA = 1
_TIMERLOG_MIN = 68
"""A unit and the blank after it (delivery#timer-files)."""
_SURPLUS_MAX = 4096
_SIZE_MAX = 0x7FFF_FFFF
_LOOK_BYTES = 1 << 20
_RECORDS = 8192

# `abort` exists if the creator of a store was killed before it wrote the manifest.
NOT_YET = frozenset(
    {"lock", "abort", "tmp", "inbox", "_staging", MANIFEST + ".tmp"}
    | {f"serve.{each}" for each in ("json", "json.tmp", "sock", "start", "log", "log.1")}
)
# Names that must not be links, and the folders in which no name may be a link.
_OWN_FOLDERS = frozenset(
    {"commitlog", "config", "consumequeue", "cut", "inbox", "index", "local_offsets", "timerlog", "tmp", "_staging"}
)
_OWN_FILES = frozenset(
    {"abort", "checkpoint", "lock", "timerwheel", *(MANIFEST + end for end in ("", ".bak", ".tmp", ".bak.tmp"))}
)
_OWN_BELOW = ("config", "cut", "index", "local_offsets", "timerlog")
_CHECKSUM: dict[Profile, Checksum] = {"mqstore": "crc32c-record", "rocketmq": "crc32-body"}
_SIZE_NAMES = (
    "commitlog_segment_bytes",
    "consumequeue_segment_bytes",
    "index_slots",
    "index_entries",
    "timerlog_segment_bytes",
)
_SIZES: dict[Profile, tuple[int, int, int, int, int]] = {
    "mqstore": (64 << 20, 16_384 * UNIT_BYTES, 100_000, 400_000, 8 << 20),
    "rocketmq": (1 << 30, 300_000 * UNIT_BYTES, 5_000_000, 20_000_000, 100 << 20),
}
_Sizes = tuple[int, int, int, int, int]
T = TypeVar("T")
# A file that decodes but has other types is as bad as a file that does not decode.
_TYPES: dict[str, type] = {
    "format": str,
    "schema": int,
    "requires": list,
    "profile": str,
    "checksum": str,
    "store_id": str,
    "commitlog_segment_bytes": int,
    "consumequeue_segment_bytes": int,
    "index_slots": int,
    "index_entries": int,
    "group_hash": str,
    "delay_levels": str,
}
_FIXED = tuple(name for name in _TYPES if name not in ("format", "schema", "requires"))
_LATER = {
    "created_ms": (0, -1 << 63, 1 << 63),
    "timerlog_segment_bytes": (_SIZES["mqstore"][4], _TIMERLOG_MIN, _SIZE_MAX),
    "max_message_size": (DEFAULT_MESSAGE_BYTES, 0, _SIZE_MAX),
}
"""Numbers that a file of an earlier version may lack: their default, minimum and maximum."""


class Manifest(NamedTuple):
    """Properties that a store keeps from its creation on. Sizes are in bytes."""

    profile: Profile
    checksum: Checksum
    store_id: str
    created_ms: int
    commitlog_segment_bytes: int
    consumequeue_segment_bytes: int
    index_slots: int
    index_entries: int
    timerlog_segment_bytes: int
    group_hash: str
    delay_levels: str
    max_message_size: int
    exists: bool
    """True if the directory is already a store, False if it is about to become one."""
    has_file: bool
    """True if the store has, or will have, `mqstore.json`. A Java broker's directory never has it."""
    unknown: Mapping[str, Any] = MappingProxyType({})
    """Keys that a newer program wrote, kept when the file is written."""
    problems: tuple[str, ...] = ()
    derived: str = ""
    """If the file is lost or damaged: why, how to repair it, and the values derived from the store's other files."""
    is_changed: bool = False
    """True if an option of this opening replaces a value of the file."""


def segment_names(directory: Path, fs: FileSystem = REAL) -> list[str]:
    """Return the names of 20 digits in `directory`, sorted, or [] if it does not exist."""
    return [*_lengths_of(directory, fs)]


def _lengths_of(directory: Path, fs: FileSystem) -> dict[str, int]:
    """Return the lengths of the files of `segment_names`."""
    return {name: length for name, length in _listed(fs.scandir_files, directory) if segment_start(name) is not None}


def _manifest(profile: Profile, sizes: _Sizes, config: StoreConfig, **others: Any) -> Manifest:
    """Return the manifest of a store that has no manifest file, or does not exist yet."""
    others.update(zip(_SIZE_NAMES, sizes, strict=True))
    return Manifest(
        profile=profile,
        checksum=_CHECKSUM[profile],
        delay_levels=config.delay_levels or DEFAULT_DELAY_LEVELS,
        max_message_size=DEFAULT_MESSAGE_BYTES if config.max_message_size is None else config.max_message_size,
        **others,
    )


def _sizes_of_new(profile: Profile, config: StoreConfig) -> _Sizes:
    segment, cq_bytes, slots, entries, timerlog = _SIZES[profile]
    cq_bytes = config.consumequeue_units * UNIT_BYTES if config.consumequeue_units else cq_bytes
    asked = (config.segment_bytes or segment, cq_bytes, config.index_slots or slots, config.index_entries or entries)
    return (*asked, timerlog)


def _sizes_of_files(root: Path, profile: Profile, config: StoreConfig, fs: FileSystem) -> _Sizes:
    """Return the sizes of a store without a manifest: from its files, from options, or the profile's defaults."""
    segment, cq_bytes, slots, entries, timerlog = _sizes_of_new(profile, config)
    # Names show the size even if files were shortened, and lengths show it even if some files are missing. A foreign
    # file shows neither. So the most frequent size counts, or the greater of two. A wrong one cuts all segments.
    lengths = {int(name): length for name, length in _lengths_of(root / "commitlog", fs).items()}
    sizes = Counter(b - a for a, b in itertools.pairwise(lengths))
    sizes.update(length for start, length in lengths.items() if length and start % length == 0)
    segment = max(
        (size for size in sizes if 0 < size <= _SIZE_MAX), key=lambda size: (sizes[size], size), default=segment
    )
    queue_lengths = Counter[int]()
    for topic in _listed(fs.scandir_directories, root / "consumequeue"):
        for queue in _listed(fs.scandir_directories, root / "consumequeue" / topic):
            queue_lengths.update(_lengths_of(root / "consumequeue" / topic / queue, fs).values())
        if queue_lengths.total() > 64:
            break
    if queue_lengths:
        common = max(queue_lengths, key=lambda length: (queue_lengths[length], length))
        if common >= UNIT_BYTES and common % UNIT_BYTES == 0:
            cq_bytes = common
    index_names = [n for n in _listed(fs.scandir, root / "index") if n.isdigit()]
    if index_names and config.index_slots is None:
        # The content of a file decides. If all files are empty or damaged, the ratio of the broker's defaults decides.
        shapes = (shape_of_file(root / "index" / name, fs) for name in index_names[:8])
        guess = next((shape for shape in shapes if shape is not None), None)
        guess = guess or slots_entries_from_length(os.stat(root / "index" / index_names[0]).st_size)
        if guess is not None:
            slots, entries = guess
    elif index_names and config.index_entries is None and config.index_slots is not None:
        length = os.stat(root / "index" / index_names[0]).st_size
        entries = max(2, (length - file_bytes(slots, 0)) // ENTRY_BYTES)
    return segment, cq_bytes, slots, entries, timerlog


def sizes_found(root: Path, profile: Profile, config: StoreConfig | None = None, fs: FileSystem = REAL) -> Manifest:
    """Derive the manifest of a directory that has none from its files (format#sizes)."""
    config = config or StoreConfig()
    sizes = _sizes_of_files(root, profile, config, fs)
    return _manifest(profile, sizes, config, store_id="", created_ms=0, group_hash="jump", exists=True, has_file=False)


def stored(
    root: Path, config: StoreConfig, fs: FileSystem = REAL, segments: Mapping[str, int] | None = None
) -> Manifest:
    """Return the manifest in the file. A Java broker's store has no file, so it is derived from the other files.
    `segments` has the lengths of the files in `commitlog`, if they are known.
    Raises CorruptStoreError if the file is damaged or lost, UnsupportedStoreError if a newer program wrote it."""
    path = root / MANIFEST
    repair = f"mqstore recover {root} --rebuild config"
    if path.exists() or path.with_name(f"{MANIFEST}.bak").exists():
        value, problems = load_json(path, writer=False, fs=fs, root=root)
        found = decode(value, path, problems)
        if contradiction := contradiction_of(found, root, fs, segments):
            raise CorruptStoreError(f"{path}: {contradiction}", str(path), repair=repair)
        return found
    if (root / GUARD).exists() or checksum_found(root, fs) == "crc32c-record":
        text = f"{path} is missing, the manifest of this store of profile mqstore"
        raise CorruptStoreError(text, str(path), repair=repair)
    return sizes_found(root, "rocketmq", config, fs)


def derived(root: Path, fs: FileSystem = REAL) -> tuple[Manifest, str]:
    """Derive a replacement for a lost or damaged manifest. Return it with a sentence about it.
    Readable fields of the file are kept. The checksum of the first record shows the profile, files show the sizes."""
    value = None
    with suppress(MQStoreError):
        value = load_json(root / MANIFEST, writer=False, fs=fs, root=root).value
    profile: Profile = "rocketmq" if checksum_found(root, fs) == "crc32-body" else "mqstore"
    kept = kept_of(value)
    found = sizes_found(root, profile, fs=fs)._replace(has_file=True, **kept)
    lost = [name for name in ("delay_levels", "group_hash", "max_message_size") if name not in kept]
    defaults = f"; {' and '.join(lost)} start from defaults" if lost else ""
    return found, (
        f"profile {profile}, segments of {found.commitlog_segment_bytes} bytes, queue files of "
        f"{found.consumequeue_segment_bytes}{defaults}"
    )


def _listed(listing: Callable[[Path], list[T]], path: Path) -> list[T]:
    return listing(path) if path.is_dir() else []


def checksum_found(root: Path, fs: FileSystem = REAL) -> Checksum | None:
    """Return the kind of checksum that a record of the log passes, or None if no record shows it.
    Usually the first record shows it. It may be damaged, so later ones are tried, too. With the wrong checksum the
    whole log would be cut."""
    kinds: tuple[Checksum, ...] = ("crc32c-record", "crc32-body")  # any record without a body passes the second one
    names = [name for name in segment_names(root / "commitlog", fs) if int(name) < 1 << 62]
    for before in (1, _LOOK_BYTES):
        for name in names:
            data: mmap.mmap | bytes = b""
            with suppress(MQStoreError, OSError), fs.opened(root / "commitlog" / name, os.O_RDONLY) as fd:
                length = fs.size(fd)
                data = fs.map(fd, length, writable=False) if length else b""
            for kind in kinds if data else ():
                if find_next(data, 0, length, int(name), kind, before) is not None:
                    return kind
    return None


def decode(value: Any, path: Path, problems: list[str]) -> Manifest:
    """Return the manifest in the JSON `value` of the file `path`.
    Raises CorruptStoreError if it is not a manifest, UnsupportedStoreError if a newer program wrote it."""

    def bad(detail: str) -> CorruptStoreError:
        return CorruptStoreError(
            f"{path} is not a manifest: {detail}", str(path), repair=f"mqstore recover {path.parent} --rebuild config"
        )

    schema = value.get("schema") if isinstance(value, dict) else None
    if type(schema) is int and schema > SCHEMA:  # first, since a newer manifest may differ in anything else
        raise _newer(path, schema, value.get("requires") or ())
    if not isinstance(value, dict) or value.get("format") != "mqstore":
        raise bad('it is not a JSON object with "format": "mqstore"')
    for key, kind in _TYPES.items():
        if type(value.get(key)) is not kind:
            raise bad(f"{key} must be {kind.__name__}, found {value.get(key)!r}")
    later = {key: value.get(key, default) for key, (default, _, _) in _LATER.items()}
    for key, number in later.items():
        _, least, most = _LATER[key]
        if type(number) is not int or not least <= number <= most:
            raise bad(f"{key} must be int from {least} to {most}, found {number!r:.80}")
    if value["schema"] < 1:
        raise bad(f"schema {value['schema']}")
    if value["requires"]:
        raise _newer(path, value["schema"], value["requires"])
    profile = value["profile"]
    if profile not in _CHECKSUM or value["checksum"] != _CHECKSUM[cast(Profile, profile)]:
        raise bad(f"profile {profile!r} with checksum {value['checksum']!r}")
    if value["group_hash"] not in ("jump", "siphash24"):
        raise bad(f"group_hash {value['group_hash']!r}")
    sizes = [value[name] for name in _SIZE_NAMES[:4]]
    if min(sizes) < 1 or max(sizes) > _SIZE_MAX or sizes[1] % UNIT_BYTES:
        raise bad(f"impossible sizes {sizes}")
    try:
        delay_table_ms(value["delay_levels"])
    except ConfigError as error:
        raise bad(f"delay_levels {value['delay_levels']!r:.80}: {error}") from error
    known = {*_TYPES, *_LATER, "created_by"}
    return Manifest(
        **{name: value[name] for name in _FIXED},
        **later,
        exists=True,
        has_file=True,
        unknown={k: v for k, v in value.items() if k not in known} | {"created_by": value.get("created_by", "")},
        problems=tuple(problems),
    )


def _newer(path: Path, schema: int, requires: Iterable[Any]) -> UnsupportedStoreError:
    names = tuple(map(str, requires)) if isinstance(requires, (list, tuple)) else ()
    return UnsupportedStoreError(
        f"{path.parent} was written by a newer mqstore (schema {schema}, requires {list(names)}); "
        f"this version supports schema {SCHEMA}. Upgrade mqstore",
        schema,
        names,
    )


def kept_of(value: Any) -> dict[str, Any]:
    """Return the fields of a bad manifest that may be right and that no other file shows."""
    kept: dict[str, Any] = {}
    if isinstance(value, dict):
        if isinstance(store_id := value.get("store_id"), str) and store_id:
            kept["store_id"] = store_id
        if (group_hash := value.get("group_hash")) in ("jump", "siphash24"):
            kept["group_hash"] = group_hash
        if isinstance(levels := value.get("delay_levels"), str):
            with suppress(ConfigError):
                delay_table_ms(levels)
                kept["delay_levels"] = levels
        size = value.get("max_message_size", DEFAULT_MESSAGE_BYTES)
        if type(size) is int and 0 <= size <= _SIZE_MAX:
            kept["max_message_size"] = size
    return kept


def contradiction_of(manifest: Manifest, root: Path, fs: FileSystem, segments: Mapping[str, int] | None = None) -> str:
    """Return how the sizes in a manifest contradict the files, or "" if they may be right.
    With wrong sizes, a sound store would look truncated, and opening would cut it."""
    segments = _lengths_of(root / "commitlog", fs) if segments is None else segments
    lengths = list(segments.values())
    distances = {behind - start for start, behind in itertools.pairwise(sorted(map(int, segments)))}
    # If the names confirm the size, all files may have lost or gained bytes.
    confirmed = min(distances, default=0) == manifest.commitlog_segment_bytes
    if not confirmed and _differ(lengths, manifest.commitlog_segment_bytes):
        return f"commitlog_segment_bytes is {manifest.commitlog_segment_bytes}, but no segment has that length"
    lengths = []
    for topic in _listed(fs.scandir_directories, root / "consumequeue")[:8]:
        for queue in _listed(fs.scandir_directories, root / "consumequeue" / topic)[:8]:
            lengths += [*_lengths_of(root / "consumequeue" / topic / queue, fs).values()][:8]
            if manifest.consumequeue_segment_bytes in lengths:
                return ""  # enough evidence: thousands of stores may have to be opened
    # An impossible length is damage, even if all files have it.
    possible = any(length and length % UNIT_BYTES == 0 for length in lengths)
    if possible and _differ(lengths, manifest.consumequeue_segment_bytes):
        return f"consumequeue_segment_bytes is {manifest.consumequeue_segment_bytes}, but no queue file has that length"
    return ""


def _differ(lengths: list[int], wanted: int) -> bool:
    """Return True if `lengths` contradict the size `wanted`.
    A single short file, or several of different lengths, are damage and no contradiction. The same is true of a surplus
    of at most a page, which somebody appended."""
    some = [length for length in lengths if length]
    if not some or wanted in some:
        return False
    return max(some) > wanted + _SURPLUS_MAX or (len(some) > 1 and len(set(some)) == 1)


def mixed_sizes(root: Path, segments: Mapping[str, int], size: int, checksum: Checksum, fs: FileSystem) -> str:
    """Return which files have which size, if some segments have another size than `size`, else "".
    Copying two stores into one causes this. A file has another size if it has valid records and begins between two
    segments, or if a record crosses the segment's end."""
    found = [each for each in segments.items() if int(each[0]) < 1 << 62]
    doubtful = [name for name, length in found if length and (int(name) % size or length > size)]
    if not any(_is_of_other_size(root / "commitlog" / name, size, checksum, fs) for name in doubtful):
        return ""
    groups = []
    for length in sorted({length for _, length in found}):
        names = [name for name, each in found if each == length]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        groups.append(f"{', '.join(names[:3])}{more} of {length} bytes")
    return "; ".join(groups)


def _is_of_other_size(path: Path, size: int, checksum: Checksum, fs: FileSystem) -> bool:
    start, at = int(path.name), 0
    try:
        with fs.opened(path, os.O_RDONLY) as fd:
            length = fs.size(fd)
            data = fs.map(fd, length, writable=False)
    except (MQStoreError, OSError):  # loading the log reports it
        return False
    if start % size:
        return find_next(data, 0, length, start, checksum, _LOOK_BYTES) is not None
    while at <= size and (found := find_next(data, at, length, start, checksum, size)) is not None:
        _, at, _ = read_run(data, found, size, start, checksum, _RECORDS)
    return at > size


def resolve(
    root: Path,
    *,
    writer: bool,
    create: bool,
    profile: Profile | None,
    config: StoreConfig,
    clock: Clock,
    fs: FileSystem,
    derive: bool = False,
) -> Manifest:
    """Return the manifest that the directory `root` has, or will have. Writes nothing.

    With `derive`, derive a lost or damaged manifest from the other files.

    Raises NotAStoreError, ConfigError (an option differs from the store's), CorruptStoreError, UnsupportedStoreError.
    """
    if root.exists() and not root.is_dir():
        raise NotAStoreError(f"{root} is a file; a store is a directory")
    names = set(_listed(fs.scandir, root))
    if names & {MANIFEST, f"{MANIFEST}.bak", "commitlog"}:
        segments = _lengths_of(root / "commitlog", fs)
        try:
            found = stored(root, config, fs, segments)
        except CorruptStoreError as error:
            if not derive or not segments:
                raise
            found, sentence = derived(root, fs)
            found = found._replace(derived=f"{error}. Reading uses the values that its files show: {sentence}")
    elif names - NOT_YET:
        some = ", ".join(sorted(names - NOT_YET)[:5])
        raise NotAStoreError(f"{root} is not a store: it contains {some}, but neither {MANIFEST} nor commitlog/")
    else:
        if not (writer and create):
            why = "it is empty or incomplete" if os.path.lexists(root) else "there is no such directory"
            raise NotAStoreError(f"{root} is not a store: {why}")
        chosen = profile or "mqstore"
        if chosen not in _SIZES:
            raise ConfigError(f"profile must be 'mqstore' or 'rocketmq', not {profile!r}")
        return _manifest(
            chosen,
            _sizes_of_new(chosen, config),
            config,
            store_id=os.urandom(16).hex(),
            created_ms=clock.now_ms(),
            group_hash=config.group_hash or "jump",
            exists=False,
            has_file=True,
            unknown={"created_by": f"mqstore {VERSION}"},
        )
    if mixed := mixed_sizes(root, segments, found.commitlog_segment_bytes, found.checksum, fs):
        raise CorruptStoreError(
            f"{root} has files of several stores, whose segments differ in size: {mixed}. Move the files of each store "
            "to a separate directory",
            str(root / "commitlog"),
        )
    return _agree(found, root, profile, config)


def _agree(found: Manifest, root: Path, profile: Profile | None, config: StoreConfig) -> Manifest:
    """Check that the store is the one the caller asked for. Return `found` with the changed options."""
    if profile is not None and profile != found.profile:
        raise ConfigError(
            f"{root} has profile {found.profile!r}, not {profile!r}. A store keeps the profile of its creation. "
            "Copy the messages to another store with `mqstore export` and `mqstore produce --exported`"
        )
    for option, asked, is_ in (
        ("segment_bytes", config.segment_bytes, found.commitlog_segment_bytes),
        ("consumequeue_units", config.consumequeue_units, found.consumequeue_segment_bytes // UNIT_BYTES),
        ("index_slots", config.index_slots, found.index_slots),
        ("index_entries", config.index_entries, found.index_entries),
        ("group_hash", config.group_hash, found.group_hash),
    ):
        if asked is not None and asked != is_:
            raise ConfigError(f"{option}={asked}: {root} was created with {is_}, which cannot be changed")
    options = {"delay_levels": config.delay_levels, "max_message_size": config.max_message_size}
    new: dict[str, Any] = {k: v for k, v in options.items() if v is not None and v != getattr(found, k)}
    return found._replace(**new, is_changed=True) if new else found


def save(manifest: Manifest, root: Path, fs: FileSystem) -> None:
    """Write `mqstore.json` by the protocol of format#json-save."""
    known = {name: getattr(manifest, name) for name in (*_FIXED, *_LATER)}
    save_json(root / MANIFEST, {**manifest.unknown, "format": "mqstore", "schema": SCHEMA, "requires": [], **known}, fs)


_GUARD_TEXT = b"written by mqstore; see mqstore.json\n"


def is_guarded(root: Path) -> bool:
    """Return True if the guard exists. An empty file is not a guard, since a Java broker would remove it."""
    path = root / GUARD
    return path.is_file() and path.stat().st_size == len(_GUARD_TEXT)


def write_guard(root: Path, fs: FileSystem) -> None:
    """Keep a Java broker out. A file of another length makes its load fail before it changes anything."""
    path = root / GUARD
    with fs.opened(path, os.O_RDWR | os.O_CREAT, 0o600) as fd:
        fs.pwrite(fd, _GUARD_TEXT, 0)
        fs.fdatasync(fd)
    fs.sync_directory(path.parent)


def check_own(root: Path, fs: FileSystem, *, whole: bool = False) -> None:
    """Raise StoreIOError, naming the file, if one of the store's own names is a link, a FIFO or the like.

    A writer would change, move or remove files elsewhere through it (`files/safe_open.py` also refuses each call).
    Other names are not checked, such as those in `commitlog/lost+found` of a disk that is mounted there. A writer's
    loading checks the folders of log and consume queues, and here `whole`, except files of queues: listing thousands of
    folders once more takes long.
    """
    if not root.exists():
        return
    there = fs.scandir(root)
    for name in there:
        if name in _OWN_FOLDERS:
            fs.check_own(root / name, "folder")
        elif name in _OWN_FILES:
            fs.check_own(root / name, "regular file")
    levels = dict.fromkeys(_OWN_BELOW, sys.maxsize) | ({"commitlog": 1, "consumequeue": 2} if whole else {})
    for name in filter(there.__contains__, levels):
        _check_below(root / name, fs, levels[name])


def _check_below(folder: Path, fs: FileSystem, levels: int) -> None:
    _, folders = fs.scandir_own(folder)
    for name in folders if levels > 1 else ():
        _check_below(folder / name, fs, levels - 1)
