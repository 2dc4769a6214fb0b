"""Committing a write: staged shards become messages, all of them or none (spark#commit).

    target   what counts                    the step by which it counts                         afterwards
    store    the log and its txn record     the record's rename, in `MessageStore.splice`       staging goes
    set      the manifest                   the manifest's rename                               old stores, staging go
    inbox    the folder in `inbox/`         the bundle's rename; its owner splices it           -

A crash before that step leaves nothing that counts, one behind it all of the batch. `clean_target` removes the rest. A
batch job without a transaction id gets a random one. It is never committed again, so only the owner of an inbox, who
may see a bundle twice after a crash, remembers it.

`abort` may come after a commit that succeeded and then raised. It deletes what is staged, which counts no more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from mqstore.broker.configchecks import OVERWRITE_FILE, check_overwrite
from mqstore.broker.names import SCHEDULE_TOPIC, check_user_topic, is_dlq_topic, is_retry_topic, is_system_topic
from mqstore.broker.parts import Parts, Tables, open_parts, open_tables
from mqstore.broker.topics import TopicConfig
from mqstore.clock import SYSTEM_CLOCK, Clock
from mqstore.columnar.rules import Rules, TopicRule
from mqstore.errors import ConfigError, FlushFailedError, FormatError, MQStoreError, NotAStoreError, StoreLockedError
from mqstore.files.beneath import resolved
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.jsonfile import load_json, save_json
from mqstore.files.lock import WriterLock, refuse_beside_writer, writer_alive
from mqstore.jobs.opening import StoreName, open_store
from mqstore.jobs.options import SinkOptions
from mqstore.jobs.sets import MEMBERS, RECORDED, SET_FILE, read_set
from mqstore.jobs.staging import STAGING, ShardInfo, clean, folders, make_folders, transaction_folder
from mqstore.layout.record import BLANK_BYTES
from mqstore.log.bulk.inbox import topics_entered
from mqstore.log.bulk.txn import read_txn
from mqstore.log.commitlog import ALLOWANCE
from mqstore.log.manifest import MANIFEST, NOT_YET
from mqstore.log.store import MessageStore
from mqstore.options import StoreConfig

__all__ = ["Commit", "abort", "check_lock", "clean_target", "commit", "make_member", "plan_target"]

_log = logging.getLogger("mqstore")

_INBOX: Final = "inbox"
_OURS: Final = frozenset({STAGING, MEMBERS, "lock", SET_FILE, SET_FILE + ".bak", SET_FILE + ".tmp"})
_SEGMENT_BYTES = 64 << 20
_PAGE = 4096
_LOCK_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit to be made: writer, version, and the shards that count, in their order in the log."""

    app: str
    version: int
    shards: Sequence[ShardInfo]
    remembered: bool = True
    """True if (app, version) may come again: a stream's batch, a `txnVersion`."""
    overwrite: bool = False
    query: bool = False
    """True for a streaming query, whose batch may come again until the next one has come."""

    @property
    def topics(self) -> dict[str, TopicRule | None]:
        return {topic: rule for shard in self.shards for topic, rule in shard.topics.items()}

    @property
    def records(self) -> int:
        return sum(shard.records for shard in self.shards)


# -- planning ----------------------------------------------------------------------------------------------------------


def plan_target(options: SinkOptions) -> Rules:
    """Return the rules of the target. Takes no lock and leaves no trace.

    Raises ConfigError if the target is not what `target` says, NotAStoreError and others as opening a store does."""
    root = Path(options.path)
    is_set, is_store = (root / SET_FILE).exists(), (root / MANIFEST).exists() or (root / "commitlog").exists()
    if (is_set or is_store) and is_set != (options.target == "set"):
        kind, target = ("store set", "set") if is_set else ("store", "store")
        raise ConfigError(f"{root} is a {kind}, and option target={options.target} wants another: use target={target}")
    if options.target == "set":
        if not is_set:
            _refuse_foreign(root, _OURS)
        read_set(root)
        return Rules(new_queues=options.queues)
    try:
        store = open_store(StoreName(options.path, options.path))
    except NotAStoreError:
        if options.target == "inbox":
            raise ConfigError(
                f"{root} is no store, and option target=inbox wants one: use target=store, which creates it"
            ) from None
        _refuse_foreign(root, NOT_YET)
        return Rules(new_queues=options.queues)
    with store:
        tables = open_tables(store)
        manifest = store.manifest
        room = manifest.commitlog_segment_bytes - BLANK_BYTES
        largest = min(manifest.max_message_size + ALLOWANCE, room)
        return Rules(
            topics={each.name: _rule(tables, each) for each in tables.topics.configs()},
            new_queues=options.queues,
            group_hash="siphash24" if manifest.group_hash == "siphash24" else "jump",
            levels=len(store.delay_table_ms),
            max_body_bytes=min(manifest.max_message_size, largest),
            max_record_bytes=largest,
            profile=manifest.profile,
        )


def check_lock(options: SinkOptions) -> None:
    """Wait until nobody has the target open for writing, at most `lockTimeout`. Takes no lock.

    Raises StoreLockedError, as `commit` would. Only for target=store.
    """
    until = time.monotonic() + options.lock_timeout_s
    with _advised(options):
        while options.target == "store" and writer_alive(options.path):
            if time.monotonic() >= until:
                refuse_beside_writer(options.path)
            time.sleep(_LOCK_POLL_S)


def _rule(tables: Tables, config: TopicConfig) -> TopicRule:
    refused = ""
    try:
        tables.topics.for_send(config.name)
    except MQStoreError as error:
        refused = str(error)
    return TopicRule(config.write_queues, max(config.write_queues, config.read_queues), refused)


def _refuse_foreign(root: Path, known: Collection[str]) -> None:
    """Raise NotAStoreError for a folder with other things in it, which a reader would not see."""
    foreign = sorted(path.name for path in root.iterdir() if path.name not in known) if root.is_dir() else []
    if foreign or (root.exists() and not root.is_dir()):
        what = f"holds {', '.join(foreign[:3])}, and is no store or store set" if foreign else "is a file"
        raise NotAStoreError(f"{root} {what}: give a folder of its own")


# -- in the task: a shard as a store ---------------------------------------------------------------------------------


def make_member(transaction: Path, shard: ShardInfo, options: SinkOptions, *, fs: FileSystem = REAL) -> None:
    """Make a store of a staged shard, beside it, so that the commit of a set is a few renames.
    It is as small as can be: files of a store are of fixed sizes, and a batch may have three messages."""
    folder = transaction / shard.name
    segment = min(_SEGMENT_BYTES, (shard.bytes // _PAGE + 16) * _PAGE)
    slots = min(100_000, max(64, shard.records))
    config = StoreConfig(
        segment_bytes=max(segment, shard.largest + BLANK_BYTES),
        consumequeue_units=min(16_384, max(64, *shard.queues.values())),
        index_slots=slots,
        index_entries=4 * slots,
        default_queues=options.queues,
        clock=SYSTEM_CLOCK,  # with one of its own a store starts no threads: there is nothing for them to do
    )
    with MessageStore(folder / "store", config=config, fs=fs) as store:
        _admit(open_parts(store), shard.topics, options)
        store.splice([folder], app=transaction.name, version=0)
    fs.unlink(folder / "shard.json")
    fs.unlink(folder / "records.bin")


# -- commit ------------------------------------------------------------------------------------------------------------


def commit(options: SinkOptions, wanted: Commit, *, fs: FileSystem = REAL, clock: Clock = SYSTEM_CLOCK) -> int | None:
    """Publish. Return the number of records written, None for a version that was in.

    Raises StoreLockedError naming the holder (option lockTimeout), ConfigError where the target is no longer what was
    planned, and what a splice raises. Then nothing of it counts, except that FlushFailedError leaves this open.
    Committing again is right in any case.
    """
    root = Path(options.path)
    with _advised(options):
        written = _COMMITS[options.target](root, options, wanted, fs, clock)
    with _left_to_clean(root):  # the batch is in, whatever comes of this
        fs.remove_tree(transaction_folder(root, wanted.app, wanted.version))
        clean(root, options.staging_ttl_s, clock=clock, fs=fs)
    return written


def abort(options: SinkOptions, app: str, version: int, *, fs: FileSystem = REAL) -> None:
    """Delete the staged files of (app, version). Published messages stay.

    A file that cannot be deleted is only logged, since the user gets the error that led here."""
    root = Path(options.path)
    with _left_to_clean(root):
        fs.remove_tree(transaction_folder(root, app, version))


def clean_target(root: Path, ttl_s: float, *, dry_run: bool = False) -> list[Path]:
    """Delete what jobs left in a store or a set and did not touch for `ttl_s` seconds.
    In a set these are also stores that its manifest does not name, and its lock is taken. Returns the folders, with
    `dry_run` those that would be deleted."""
    root = Path(resolved(root))
    if not (root / SET_FILE).exists():
        return clean(root, ttl_s, dry_run=dry_run)
    with nullcontext() if dry_run else _locked_set(root, 30.0, REAL):
        stores = (read_set(root) or {"stores": {}})["stores"]
        named = {root / "/".join(Path(where).parts[:2]) for where in stores.values()}
        others = [path for path in folders(root / MEMBERS) if path not in named]
        return clean(root, ttl_s, others=others, dry_run=dry_run)


@contextmanager
def _left_to_clean(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _log.warning("%s: what a job staged could not be deleted: %s; mqstore spark clean does it", root, error)


@contextmanager
def _advised(options: SinkOptions) -> Iterator[None]:
    """Let lock errors name the option that waits longer, and sync errors what to look for."""
    try:
        yield
    except StoreLockedError as error:
        inbox = ". target=inbox hands over to the process that has it open" if options.target == "store" else ""
        text = f"{error}; option lockTimeout={options.lock_timeout_s:g} s was not enough{inbox}"
        raise StoreLockedError(text, error.pid, error.host, error.since) from error
    except FlushFailedError as error:
        raise FlushFailedError(
            f"{error}. Look whether the messages are in before they are written again; with txnAppId and txnVersion "
            "they are not written twice"
        ) from error


# -- target=store ------------------------------------------------------------------------------------------------------


def _into_store(root: Path, options: SinkOptions, wanted: Commit, fs: FileSystem, clock: Clock) -> int | None:
    store = MessageStore(root, lock_timeout=options.lock_timeout_s, config=StoreConfig(clock=clock), fs=fs)
    written: int | None = None
    try:
        with store:
            parts = open_parts(store)
            _finish_overwrite(parts, root, fs)
            if (last := store.spliced_version(wanted.app)) >= wanted.version:
                return _already(root, wanted, last)
            store._enter_topics_by(lambda noted: _enter(parts, noted))
            _admit(parts, wanted.topics, options)
            if wanted.overwrite:
                _note_overwrite(parts, root, wanted, fs)
            shards = [transaction_folder(root, wanted.app, wanted.version) / each.name for each in wanted.shards]
            # What an overwrite has still to do is done if its version is in, also by a later job.
            remembered = wanted.remembered or wanted.overwrite
            written = store.splice(shards, app=wanted.app, version=wanted.version, remembered=remembered).records
            _finish_overwrite(parts, root, fs)
    except (OSError, MQStoreError) as error:
        if written is None:
            raise
        # Of a job that is told to have failed the messages would be written again.
        _log.error("%s: the messages are in, but what comes after them failed: %s; the next job ends it", root, error)
    return written


def _already(root: Path, wanted: Commit, last: int) -> int | None:
    """Pass over a version that was published before, with a warning: its rows may be other ones.
    Raises ConfigError for a query that went back."""
    if wanted.query and last > wanted.version:
        raise ConfigError(
            f"{root} has batch {last} of query {wanted.app!r}, which is at batch {wanted.version} again: its "
            "checkpoint was put back from a copy, or two runs of the query have one each. Nothing was written. Begin "
            "with a new checkpoint, and say where (startingOffsets, ...)"
        )
    text = "%s: version %d of %r is in (the last one: %d); nothing was written. Other rows need another txnAppId"
    _log.warning(text, root, wanted.version, wanted.app, last)
    return None


def _gone(path: Path) -> FormatError:
    return FormatError(
        f"{path} is not what its task has staged: somebody deleted it before the commit, as mqstore spark clean does, "
        "and jobs with a short stagingTtl. Nothing of the job counts: run it again",
        "shard",
        0,
    )


def _unknown(path: Path, error: OSError) -> FlushFailedError:
    """Return the error for a sync that failed behind the rename by which a batch counts."""
    return FlushFailedError(
        f"{path} is there, and with it all that was written, but it is not known to be on disk: {error}"
    )


def _enter(parts: Parts, noted: Mapping[str, int]) -> None:
    """Enter the topics of a bundle from the inbox, as a broker does."""
    for name, queues in noted.items():
        parts.topics.ensure(check_user_topic(name), queues)


def _admit(parts: Parts, topics: Mapping[str, TopicRule | None], options: SinkOptions) -> None:
    """Enter the topics that are missing. ConfigError if one has changed since the rows were given queues."""
    for name, planned in topics.items():
        if planned is None:
            parts.topics.ensure(name, len(parts.store.delay_table_ms) if name == SCHEDULE_TOPIC else 1)
            continue
        if parts.topics.get(name) is None:
            parts.topics.create(name, queues=options.queues)
        _refuse_altered(parts.store.path, name, planned, _rule(parts, parts.topics.need(name)))


def _refuse_altered(root: str | Path, topic: str, planned: TopicRule, now: TopicRule) -> None:
    """Raise ConfigError if a topic was altered since rows were given queues.
    Nobody might read some of them, and a message group would continue in another queue than producers use."""
    if now != planned:
        what = f"has {now.write_queues} queues to write to and {now.queues} in all"
        raise ConfigError(
            f"{root}: topic {topic!r} was altered while rows for it were written: it "
            f"{'may not be written to' if now.refused else what} now. Write them again"
        )


def _note_overwrite(parts: Parts, root: Path, wanted: Commit, fs: FileSystem) -> None:
    """Note, durably, where the topics end before the splice.
    Old messages are taken from consumers only when the new ones are in. A kill in between leaves both, and a
    repeated commit continues."""
    ends = {
        name: {str(ref.queue_id): parts.store.offsets(*ref)[1] for ref in parts.store.queues(name)}
        for name in wanted.topics
        if not is_system_topic(name) and name in parts.store.topics()
    }
    path = root / OVERWRITE_FILE
    make_folders(path.parent, fs)
    note = {"version": 1, "app": wanted.app, "ver": wanted.version, "ends": ends}
    save_json(path, note, fs, check=check_overwrite)


def _finish_overwrite(parts: Parts, root: Path, fs: FileSystem) -> None:
    """Let the queues of a noted overwrite begin, logically, where the note says, if its messages are in."""
    path = root / OVERWRITE_FILE
    note = load_json(path, writer=True, fs=fs, root=root, check=partial(check_overwrite, file=path)).value
    if note is None or "ends" not in note:
        return
    if parts.store.spliced_version(note["app"]) >= note["ver"]:
        ends = {name: {int(queue_id): end for queue_id, end in each.items()} for name, each in note["ends"].items()}
        parts.offsets.move_starts(ends)
    save_json(path, {"version": 1}, fs, check=check_overwrite)


# -- target=set --------------------------------------------------------------------------------------------------------


def _into_set(root: Path, options: SinkOptions, wanted: Commit, fs: FileSystem, clock: Clock) -> int | None:
    make_folders(root, fs)
    with _locked_set(root, options.lock_timeout_s, fs):
        manifest = read_set(root) or {"version": 1, "stores": {}}
        if not fs.exists(root / SET_FILE):  # before there are stores: from then on one that is missing was lost
            save_json(root / SET_FILE, manifest, fs)
        if wanted.remembered and (last := manifest.get(RECORDED, {}).get(wanted.app, -1)) >= wanted.version:
            return _already(root, wanted, last)
        folder = transaction_folder(root, wanted.app, wanted.version)
        make_folders(root / MEMBERS, fs)
        added = {}
        for shard in wanted.shards:  # whose names have a random part: none is that of a commit that crashed
            name = f"{folder.name}-{shard.name}"
            added[name] = f"{MEMBERS}/{name}"
            try:
                fs.replace(folder / shard.name / "store", root / MEMBERS / name)
            except FileNotFoundError as error:
                raise _gone(folder / shard.name) from error
        fs.sync_directory(root / MEMBERS)
        before = manifest["stores"]
        stores = added if wanted.overwrite else {**before, **added}
        recorded = dict(manifest.get(RECORDED, {}))
        if wanted.remembered:
            recorded[wanted.app] = wanted.version
        wanted_manifest = {**manifest, "stores": stores, RECORDED: recorded}
        try:
            save_json(root / SET_FILE, wanted_manifest, fs)
        except OSError as error:
            if read_set(root) == wanted_manifest:
                raise _unknown(root / SET_FILE, error) from error
            raise
        for where in before.values() if wanted.overwrite else ():
            path = root / where
            # The sink makes folders in one place: what lies deeper, or behind a link, is somebody else's.
            if path.parent == root / MEMBERS and not path.is_symlink():
                with _left_to_clean(root):
                    fs.remove_tree(path)
        return wanted.records


@contextmanager
def _locked_set(root: Path, timeout_s: float, fs: FileSystem) -> Iterator[None]:
    """Hold the set's lock, a store's lock in a file of the same name."""
    lock = WriterLock(root, "mqstore", fs=fs)
    try:
        lock.acquire(timeout_s)
        yield
    finally:
        lock.release()


# -- target=inbox ------------------------------------------------------------------------------------------------------


def _into_inbox(root: Path, options: SinkOptions, wanted: Commit, fs: FileSystem, clock: Clock) -> int | None:
    """Hand the shards over. They are durable on return, and spliced by the owner or the next open."""
    folder = transaction_folder(root, wanted.app, wanted.version)
    target = root / _INBOX / folder.name
    # Before the record: what is taken in meanwhile is in one of them.
    waiting = _waiting_in(root / _INBOX, wanted.app, fs)
    last = read_txn(root, fs).version_of(wanted.app)
    newest = max(last, *waiting, -1)
    if wanted.version in waiting:
        return _already(root, wanted, newest)
    _refuse_behind_refused(root, wanted, last, fs)
    if last >= wanted.version or (wanted.query and newest > wanted.version):
        return _already(root, wanted, newest)
    if not wanted.shards:
        return 0
    entered = topics_entered(root, fs)  # a topic without an entry gets queues by puts
    there = plan_target(options).topics
    for topic, planned in wanted.topics.items():
        if planned is not None and topic in entered:
            _refuse_altered(root, topic, planned, there.get(topic, planned))
    queues = sorted(queue for shard in wanted.shards for queue in shard.queues)
    highest = {topic: queue_id for topic, queue_id in queues if _is_users(topic)}
    create = {  # a topic that was deleted meanwhile comes again, with the queues that rows were given by what it had
        name: max(options.queues, highest.get(name, -1) + 1) for name in wanted.topics if _is_users(name)
    }
    bundle = {
        "version": 1,
        "app": wanted.app,
        "ver": wanted.version,
        "shards": [shard.name for shard in wanted.shards],
        "create": create,
        "highest": highest,
    }
    for shard in wanted.shards:  # one that is missing the owner could only refuse, when the job is long said to be done
        if not all(fs.exists(folder / shard.name / each) for each in ("records.bin", "shard.json")):
            raise _gone(folder / shard.name)
    save_json(folder / "bundle.json", bundle, fs, back_up=False)
    make_folders(root / _INBOX, fs)
    fs.replace(folder, target)
    try:
        fs.sync_directory(root / _INBOX)
        fs.sync_directory(folder.parent)
    except OSError as error:
        raise _unknown(target, error) from error
    return wanted.records


def _refuse_behind_refused(root: Path, wanted: Commit, last: int, fs: FileSystem) -> None:
    """Raise ConfigError if the owner has put aside a bundle of this application: its rows are missing.
    `last` is the version that is in. A bundle of it that came twice is no loss."""
    lost = _waiting_in(root / _INBOX / "refused", wanted.app, fs) - {last}
    if lost and (wanted.remembered or wanted.version in lost):
        first = wanted.version if wanted.version in lost else min(lost)
        raise ConfigError(
            f"{root / _INBOX / 'refused' / f'{wanted.app}-{first}'} holds version {first} of {wanted.app!r}, which was "
            "handed over before, and refused by the store's owner; reason.txt in it says why. To write it again, or to "
            "go on without its rows, delete that folder; another txnAppId writes it though a later version is in"
        )


def _waiting_in(folder: Path, app: str, fs: FileSystem) -> frozenset[int]:
    """Return the versions of an application that lie in the inbox, or in a folder of it."""
    parts = (path.name.rpartition("-") for path in folders(folder, fs))
    return frozenset(int(version) for name, _, version in parts if name == app and version.isdecimal())


def _is_users(topic: str) -> bool:
    """Return True if a bundle may create the topic, which is not one of the engine or of a group."""
    return not (is_system_topic(topic) or is_retry_topic(topic) or is_dlq_topic(topic))


_COMMITS: Final = {"store": _into_store, "set": _into_set, "inbox": _into_inbox}
