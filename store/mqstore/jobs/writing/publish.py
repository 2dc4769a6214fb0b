"""Commit of a write: staged shards become messages, all of them or none (spark#commit).

    target   published state                committing step                                     afterwards deleted
    store    the log and its txn record     the record's rename, in `MessageStore.splice`       staging
    set      the manifest                   the manifest's rename                               old stores, staging
    inbox    the folder in `inbox/`         the bundle's rename; its owner splices it           -

A crash before that step publishes nothing, a crash after it the whole batch. `clean_target` deletes the leftovers. The
random id of a batch job is never committed again, so its version is not recorded, except by the owner of an inbox, who
may see a bundle twice after a crash.

`abort` may be called after a commit that succeeded and then raised. It only deletes staged files, never messages.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from mqstore.broker.background.context import Parts, Tables, open_parts, open_tables
from mqstore.broker.tables.configchecks import OVERWRITE_FILE, check_overwrite
from mqstore.broker.tables.names import SCHEDULE_TOPIC, check_user_topic, is_dlq_topic, is_retry_topic, is_system_topic
from mqstore.broker.tables.topics import TopicConfig
from mqstore.clock import SYSTEM_CLOCK, Clock
from mqstore.columnar.inputs import Rules, TopicRule
from mqstore.errors import ConfigError, FlushFailedError, FormatError, MQStoreError, NotAStoreError, StoreLockedError
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.jsonfile import load_json, save_json
from mqstore.files.lock import WriterLock, refuse_beside_writer, writer_alive
from mqstore.files.safe_open import resolved
from mqstore.jobs.options.options import SinkOptions
from mqstore.jobs.reading.opening import StoreName, open_store
from mqstore.jobs.reading.store_set import MEMBERS, RECORDED, SET_FILE, read_set
from mqstore.jobs.writing.staging import STAGING, ShardInfo, clean, folders, make_folders, transaction_folder
from mqstore.layout.record import BLANK_BYTES
from mqstore.log.bulk.inbox import queues_entered
from mqstore.log.bulk.txn import read_txn
from mqstore.log.commitlog import ALLOWANCE
from mqstore.log.directory.manifest import MANIFEST, NOT_YET
from mqstore.log.store import MessageStore
from mqstore.logger import log as _log
from mqstore.options import StoreConfig

_INBOX: Final = "inbox"
_OURS: Final = frozenset({STAGING, MEMBERS, "lock", SET_FILE, SET_FILE + ".bak", SET_FILE + ".tmp"})
_SEGMENT_BYTES = 64 << 20
_PAGE = 4096
_LOCK_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Commit:
    """Request of a commit: writer, version, and the shards in the order of the log."""

    app: str
    version: int
    shards: Sequence[ShardInfo]
    remembered: bool = True
    """True if (app, version) may be committed again: a stream's batch, a `txnVersion`."""
    overwrite: bool = False
    query: bool = False
    """True for a streaming query, whose last batch may be committed again."""

    @property
    def topics(self) -> dict[str, TopicRule | None]:
        return {topic: rule for shard in self.shards for topic, rule in shard.topics.items()}

    @property
    def records(self) -> int:
        return sum(shard.records for shard in self.shards)


# -- planning ----------------------------------------------------------------------------------------------------------


def plan_target(options: SinkOptions) -> Rules:
    """Return the rules of the target. Takes no lock and changes nothing.

    Raises ConfigError if option `target` does not match the kind of the target, and the errors of opening a store."""
    root = Path(options.path)
    is_set, is_store = (root / SET_FILE).exists(), (root / MANIFEST).exists() or (root / "commitlog").exists()
    if (is_set or is_store) and is_set != (options.target == "set"):
        kind, target = ("store set", "set") if is_set else ("store", "store")
        raise ConfigError(f"{root} is a {kind}: use target={target}, not target={options.target}")
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
                f"{root} is not a store, which option target=inbox needs: use target=store, which creates it"
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
    """Wait until no process has the target open for writing, at most `lockTimeout`. Only for target=store.

    Takes no lock. Raises StoreLockedError, as `commit` would.
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
    """Raise NotAStoreError for a folder that has other files."""
    foreign = sorted(path.name for path in root.iterdir() if path.name not in known) if root.is_dir() else []
    if foreign or (root.exists() and not root.is_dir()):
        what = f"is not a store directory (contains {', '.join(foreign[:3])})" if foreign else "is a file"
        raise NotAStoreError(f"{root} {what}: give a new folder")


# -- in the task: a shard as a store ---------------------------------------------------------------------------------


def make_member(transaction: Path, shard: ShardInfo, options: SinkOptions, *, fs: FileSystem = REAL) -> None:
    """Create a store from a staged shard, in the shard's folder, so that the commit of a set is a few renames.
    Its files, which have fixed sizes, are made as small as possible, because a batch may have only a few messages."""
    folder = transaction / shard.name
    segment = min(_SEGMENT_BYTES, (shard.bytes // _PAGE + 16) * _PAGE)
    slots = min(100_000, max(64, shard.records))
    config = StoreConfig(
        segment_bytes=max(segment, shard.largest + BLANK_BYTES),
        consumequeue_units=min(16_384, max(64, *shard.queues.values())),
        index_slots=slots,
        index_entries=4 * slots,
        default_queues=options.queues,
        clock=SYSTEM_CLOCK,  # a store with a given clock starts no threads, and this one needs none
    )
    with MessageStore(folder / "store", config=config, fs=fs) as store:
        _admit(open_parts(store), shard.topics, options)
        store.splice([folder], app=transaction.name, version=0)
    fs.unlink(folder / "shard.json")
    fs.unlink(folder / "records.bin")


# -- commit ------------------------------------------------------------------------------------------------------------


def commit(options: SinkOptions, wanted: Commit, *, fs: FileSystem = REAL, clock: Clock = SYSTEM_CLOCK) -> int | None:
    """Publish the shards. Return the number of records written, or None if the version was published before.

    Raises StoreLockedError with the lock's owner (option lockTimeout), ConfigError if the target has changed since it
    was planned, and the errors of a splice. Then nothing was published, except that FlushFailedError leaves this open.
    It is always safe to commit again.
    """
    root = Path(options.path)
    with _advised(options):
        written = _COMMITS[options.target](root, options, wanted, fs, clock)
    with _left_to_clean(root):  # the batch is published, so a failure here must not fail the job
        fs.remove_tree(transaction_folder(root, wanted.app, wanted.version))
        clean(root, options.staging_ttl_s, clock=clock, fs=fs)
    return written


def abort(options: SinkOptions, app: str, version: int, *, fs: FileSystem = REAL) -> None:
    """Delete the staged files of (app, version). Published messages stay.

    A file that cannot be deleted is only logged, since the user gets the error that caused the abort."""
    root = Path(options.path)
    with _left_to_clean(root):
        fs.remove_tree(transaction_folder(root, app, version))


def clean_target(root: Path, ttl_s: float, *, dry_run: bool = False) -> list[Path]:
    """Delete leftovers of jobs in a store or a set that have not changed for `ttl_s` seconds.
    In a set these include stores that its manifest does not list, and its lock is taken. Return the deleted folders, or
    with `dry_run` those that would be deleted."""
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
        _log.warning("%s: cannot delete the staged files of a job (%s); run mqstore spark clean", root, error)


@contextmanager
def _advised(options: SinkOptions) -> Iterator[None]:
    """Add advice to lock and sync errors."""
    try:
        yield
    except StoreLockedError as error:
        inbox = ". target=inbox hands the messages to the process that has it open" if options.target == "store" else ""
        text = f"{error}; option lockTimeout={options.lock_timeout_s:g} s was not enough{inbox}"
        raise StoreLockedError(text, error.pid, error.host, error.since) from error
    except FlushFailedError as error:
        raise FlushFailedError(
            f"{error}. Before you write the messages again, check whether they are in the store; with txnAppId and "
            "txnVersion they are never written twice"
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
            # The version of an overwrite is recorded, so that a later job can finish it after a crash.
            remembered = wanted.remembered or wanted.overwrite
            written = store.splice(shards, app=wanted.app, version=wanted.version, remembered=remembered).records
            _finish_overwrite(parts, root, fs)
    except (OSError, MQStoreError) as error:
        if written is None:
            raise
        # Not raised: the user would write the messages of a failed job again.
        _log.error("%s: the messages are written, but cleanup failed (%s); the next job finishes it", root, error)
    return written


def _already(root: Path, wanted: Commit, last: int) -> int | None:
    """Skip a version that was published before, with a warning, since its rows may be different ones.
    Raises ConfigError for a query whose batch numbers went back."""
    if wanted.query and last > wanted.version:
        raise ConfigError(
            f"{root} has batch {last} of query {wanted.app!r}, but the query is at batch {wanted.version} again: its "
            "checkpoint was restored from a copy, or two runs have a checkpoint each. Nothing was written. Start with "
            "a new checkpoint and an option that says where to begin (startingOffsets, ...)"
        )
    text = "%s: version %d of %r was written before (last %d); nothing was written. New rows need another txnAppId"
    _log.warning(text, root, wanted.version, wanted.app, last)
    return None


def _gone(path: Path) -> FormatError:
    return FormatError(
        f"{path} was deleted or changed between its task and the commit, for example by mqstore spark clean or by a "
        "job with a short stagingTtl. Nothing was written: run the job again",
        "shard",
        0,
    )


def _unknown(path: Path, error: OSError) -> FlushFailedError:
    """Return the error for a sync that failed after the rename that publishes a batch."""
    return FlushFailedError(f"{path} and all messages were written, but may not be on disk: {error}")


def _enter(parts: Parts, noted: Mapping[str, int]) -> None:
    """Create the topics of a bundle from the inbox, as a broker does."""
    for name, queues in noted.items():
        parts.topics.ensure(check_user_topic(name), queues)


def _admit(parts: Parts, topics: Mapping[str, TopicRule | None], options: SinkOptions) -> None:
    """Create missing topics. ConfigError if one has changed since its rows were assigned to queues."""
    for name, planned in topics.items():
        if planned is None:
            parts.topics.ensure(name, len(parts.store.delay_table_ms) if name == SCHEDULE_TOPIC else 1)
            continue
        if parts.topics.get(name) is None:
            parts.topics.create(name, queues=options.queues)
        _refuse_altered(parts.store.path, name, planned, _rule(parts, parts.topics.require(name)))


def _refuse_altered(root: str | Path, topic: str, planned: TopicRule, now: TopicRule) -> None:
    """Raise ConfigError if a topic was altered since its rows were assigned to queues.
    Some rows might be in queues that nobody reads, and a message group in another queue than producers use."""
    if now != planned:
        what = f"has {now.write_queues} queues to write to and {now.queues} in all"
        raise ConfigError(
            f"{root}: topic {topic!r} was altered while its rows were written: it now "
            f"{'may not be written to' if now.refused else what}. Run the job again"
        )


def _note_overwrite(parts: Parts, root: Path, wanted: Commit, fs: FileSystem) -> None:
    """Save the ends of the topics durably before the splice.
    Old messages are hidden from consumers only after the new ones are written. A kill in between leaves both, and a
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
    """Move the logical starts of queues to the saved ends, if the messages of the overwrite are written."""
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
        if not fs.exists(root / SET_FILE):  # before the first store, so that a later missing manifest means a loss
            save_json(root / SET_FILE, manifest, fs)
        if wanted.remembered and (last := manifest.get(RECORDED, {}).get(wanted.app, -1)) >= wanted.version:
            return _already(root, wanted, last)
        folder = transaction_folder(root, wanted.app, wanted.version)
        make_folders(root / MEMBERS, fs)
        added = {}
        for shard in wanted.shards:  # names have a random part, so none exists from a crashed commit
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
            # The sink creates stores only in this folder. A deeper one, or a link, was added by somebody else.
            if path.parent == root / MEMBERS and not path.is_symlink():
                with _left_to_clean(root):
                    fs.remove_tree(path)
        return wanted.records


@contextmanager
def _locked_set(root: Path, timeout_s: float, fs: FileSystem) -> Iterator[None]:
    """Hold the set's lock, which works like a store's lock."""
    lock = WriterLock(root, "mqstore", fs=fs)
    try:
        lock.acquire(timeout_s)
        yield
    finally:
        lock.release()


# -- target=inbox ------------------------------------------------------------------------------------------------------


def _into_inbox(root: Path, options: SinkOptions, wanted: Commit, fs: FileSystem, clock: Clock) -> int | None:
    """Move the shards to the inbox. They are durable on return, and spliced by the owner or the next open."""
    folder = transaction_folder(root, wanted.app, wanted.version)
    target = root / _INBOX / folder.name
    # Read before the txn record: a bundle that the owner splices meanwhile is then in one of the two.
    waiting = _waiting_in(root / _INBOX, wanted.app, fs)
    last = read_txn(root, fs).version_of(wanted.app)
    newest = max(last, *waiting, -1)
    if wanted.version in waiting:
        return _already(root, wanted, newest)
    _refuse_after_refused(root, wanted, last, fs)
    if last >= wanted.version or (wanted.query and newest > wanted.version):
        return _already(root, wanted, newest)
    if not wanted.shards:
        return 0
    entered = queues_entered(root, fs)  # a topic without an entry cannot have been altered
    there = plan_target(options).topics
    for topic, planned in wanted.topics.items():
        if planned is not None and topic in entered:
            _refuse_altered(root, topic, planned, there.get(topic, planned))
    queues = sorted(queue for shard in wanted.shards for queue in shard.queues)
    highest = {topic: queue_id for topic, queue_id in queues if _is_users(topic)}
    create = {  # a topic deleted meanwhile is created again, with at least the queues that its rows were assigned to
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
    for shard in wanted.shards:  # the owner can only refuse a bundle, after the job has succeeded, so check now
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


def _refuse_after_refused(root: Path, wanted: Commit, last: int, fs: FileSystem) -> None:
    """Raise ConfigError if the owner has refused a bundle of this application: its rows are missing.
    `last` is the last written version. A second bundle of it is not a loss."""
    lost = _waiting_in(root / _INBOX / "refused", wanted.app, fs) - {last}
    if lost and (wanted.remembered or wanted.version in lost):
        first = wanted.version if wanted.version in lost else min(lost)
        raise ConfigError(
            f"{root / _INBOX / 'refused' / f'{wanted.app}-{first}'} has version {first} of {wanted.app!r}, which the "
            "store's owner has refused; see reason.txt in it. Delete that folder to write it again or to continue "
            "without its rows; if a later version was written, write it with another txnAppId"
        )


def _waiting_in(folder: Path, app: str, fs: FileSystem) -> frozenset[int]:
    """Return the versions of an application in a folder: the inbox, or its folder of refused bundles."""
    parts = (path.name.rpartition("-") for path in folders(folder, fs))
    return frozenset(int(version) for name, _, version in parts if name == app and version.isdecimal())


def _is_users(topic: str) -> bool:
    """Return True for a topic that a bundle may create: not a system, retry or dead-letter topic."""
    return not (is_system_topic(topic) or is_retry_topic(topic) or is_dlq_topic(topic))


_COMMITS: Final = {"store": _into_store, "set": _into_set, "inbox": _into_inbox}
