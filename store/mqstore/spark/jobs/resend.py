"""Dead letters of many stores to where they came from, each once (spark.md B7). `mqstore dlq replay` does it in one
store, at least once; what a letter becomes is the same, and decided by the same code (`broker.deadletters`): attempt 1,
no trace of retries, the same unique key. Here each copy bears DLQ_RESENT, which says of which letter it is.

A task goes through the dead letters of one store and stages copies there; the driver publishes store by store:

    config/spark/resent.json
    {"version": 1, "done": n,                    runs up to n are in, and these letters were sent by them
     "sent": {GROUP: [[start, stop], ...]},
     "next": {GROUP: [[start, stop], ...]}}      those of run n + 1, which is in or not; {}: none was begun

    step                                                            a crash right after it leaves
    1 stage the copies                                              nothing
    2 take the lock; another run came first: give up                nothing
    3 write the run's letters into the file                         a run that is not in: its letters do not count
    4 splice, as version n of the application `dlq-resend`          all of the run
    5 write that the run is in into the file                        the same; the next run goes on
    6 note what is sent for others, with the dead letters           the same; the next run notes it

Whether run n + 1 is in says the store's record of splices: so whatever happens, a letter is sent once. That record
forgets who does not come for long, so the file does not count on it for longer than it must. A message that fails again
afterwards is a new letter. One that was given up twice, as two consumers may have done that had it at the same time,
bears one ORIGIN_MESSAGE_ID in two letters: the first is sent, and both count as sent.

A store that a process has open is refused at step 2: there `mqstore dlq replay` is for. Knows no pyspark.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from mqstore.broker import sql92
from mqstore.broker.configchecks import RESENT_FILE, check_resent
from mqstore.broker.deadletters import DeadLetters, origin_of
from mqstore.broker.names import DLQ_PREFIX, is_dlq_topic, is_retry_topic
from mqstore.broker.offsets import after_sent
from mqstore.broker.parts import Parts, open_parts
from mqstore.errors import ConfigError, CorruptStoreError, MQStoreError, StoreLockedError
from mqstore.files.jsonfile import load_json, save_json
from mqstore.files.quiet import QUIET
from mqstore.layout.hosts import LOCAL_HOST, encode_host
from mqstore.layout.properties import DLQ_ORIGIN_MESSAGE_ID, ORIGIN_MESSAGE_ID, UNIQ_KEY, encode_properties
from mqstore.layout.record import CHECKSUM_AT, QUEUE_ID_AT, encode_record
from mqstore.log.message import Message
from mqstore.log.store import MessageStore
from mqstore.log.txn import TXN_FILE, read_txn
from mqstore.spark.encode import Encoded
from mqstore.spark.jobs.dlq import groups_of
from mqstore.spark.jobs.shape import Plan, Progress, Selection, Shaped, Stores, check_followed, check_known, run, select
from mqstore.spark.plan import StoreName, open_store
from mqstore.spark.staging import ShardInfo, discard, make_folders, transaction_folder, write_shards

__all__ = ["DLQ_RESENT", "ResendPlan", "ResendReport", "StoreResend", "dlq_resend", "resend_plan"]

DLQ_RESENT: Final = "DLQ_RESENT"
"""Property of a copy: group and offset of the dead letter that it is of."""
_APP: Final = "dlq-resend"
_PAGE = 1024
_QUEUE = 0

Ranges = list[tuple[int, int]]
"""Offsets of letters, [start, stop) each, ascending."""


@dataclass(frozen=True, slots=True)
class StoreResend(Shaped):
    """What became of the letters of a store."""

    store: str
    resent: int
    """In a plan: that would be."""
    topics: Mapping[str, int]
    """By the topic they are sent to."""
    groups: Mapping[str, int]
    """By the group that gave them up."""
    before: int
    """Sent by an earlier run."""
    doubles: int
    """Left out, as another letter is of the same message."""
    others: int
    """Not asked for."""


@dataclass(frozen=True, slots=True)
class ResendReport(Shaped):
    """What `dlq_resend` has done."""

    resent: int
    stores: tuple[StoreResend, ...]


@dataclass(frozen=True, slots=True)
class ResendPlan(Plan):
    """What `dlq_resend` would send: of letters not what would be read, for all are, but `messages` and `bytes` of new
    records, out of how many `queues` of letters."""

    letters: tuple[StoreResend, ...]
    """Store by store."""


def dlq_resend(
    spark: Any,
    stores: Stores | Selection,
    where: str | None = None,
    *,
    to: str = "origin",
    groups: Iterable[str] | None = None,
    lock_timeout_s: float = 30.0,
    progress: Progress | None = None,
) -> ResendReport:
    """Send dead letters again, in the stores where they lie: to the topic each came from, or all `to` another.

    `where`: an SQL92 expression over their properties. `groups`: only what these gave up. A selection says the rest:
    topics that they came from, when they were filed, and no other option. `spark`: a session, or None to run here.

    A second run sends nothing again. Letters that are sent are let go of, as by a replay.
    Raises ConfigError for a group that no store knows, NotPermittedError, TopicNotFoundError, InvalidMessageError for a
    letter that cannot be sent: then nothing of any store is; StoreLockedError for a store that is open, when the stores
    before it are done.
    """
    job, names = _job_of(stores, where, to, groups, dry_run=False)
    staged: list[_Staged] = []
    done: list[StoreResend] = []
    try:
        staged = _stage_all(spark, job, names, progress)
        for name, each in zip(names, staged, strict=True):
            _publish(name, each, job.writer, lock_timeout_s)
            done.append(each.report)
    finally:
        for number, name in enumerate(names):
            if number >= len(done):
                with suppress(MQStoreError):  # a store that does not read has nothing staged
                    run_there = staged[number].run if staged else _next_run(name)
                    discard(Path(name.path), _APP, run_there, writer=job.writer)
    return ResendReport(sum(each.resent for each in done), tuple(done))


def resend_plan(
    stores: Stores | Selection,
    where: str | None = None,
    *,
    to: str = "origin",
    groups: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> ResendPlan:
    """What `dlq_resend` would send now. Reads every letter; writes nothing. Raises as that does, but for locks."""
    job, names = _job_of(stores, where, to, groups, dry_run=True)
    staged = _stage_all(None, job, names, progress)
    return ResendPlan(
        stores=len(names),
        queues=sum(len(each.letters) for each in staged),
        messages=sum(each.report.resent for each in staged),
        bytes=sum(each.bytes for each in staged),
        tasks=len(names),
        letters=tuple(each.report for each in staged),
    )


def _job_of(
    stores: Stores | Selection, where: str | None, to: str, groups: Iterable[str] | None, *, dry_run: bool
) -> tuple[_Job, Sequence[StoreName]]:
    """What was asked for, checked, and of which stores."""
    chosen = select(stores) if where is None else select(stores, where=where)
    check_followed(chosen, "topics", "filter", bounds=True)
    where = chosen.options.filter
    if where is not None:
        sql92.compile(where)
    if type(to) is not str or not to or is_dlq_topic(to):
        raise ConfigError(f"to={to!r}: give 'origin', or a topic that is none of dead letters")
    picked = None if groups is None else frozenset(groups)
    return _Job(chosen, where, None if to == "origin" else to, picked, dry_run), chosen.stores()


def _stage_all(spark: Any, job: _Job, names: Sequence[StoreName], progress: Progress | None) -> list[_Staged]:
    staged = run(spark, names, partial(_stage, job), progress, "mqstore dlq resend")
    check_known("group", job.groups or (), (name for each in staged for name in each.known))
    return staged


@dataclass(frozen=True, slots=True)
class _Job:
    selection: Selection
    where: str | None
    to: str | None
    groups: frozenset[str] | None
    dry_run: bool
    writer: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Where its tasks stage: of two that are at the same run, one that is given up takes nothing from the other."""


@dataclass(frozen=True, slots=True)
class _Staged:
    """What a task tells the driver of a store."""

    run: int
    shards: tuple[ShardInfo, ...]
    letters: Mapping[str, Ranges]
    """Those that are sent, by group."""
    behind: bool
    """Letters that an earlier run has sent are still listed: it was killed before it let go of them."""
    bytes: int
    """Of the copies."""
    report: StoreResend
    known: frozenset[str]
    """All groups of the store."""


# -- what was sent before ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Resent:
    """What the runs up to `last` have sent, by group."""

    last: int
    sent: Mapping[str, Ranges]

    @classmethod
    def of(cls, path: Path) -> _Resent:
        """Of a store. CorruptStoreError for a file that does not read, or lacks a run. Where `recover --rebuild config`
        has moved a bad one aside, which it asks first, it starts from defaults: what still lies there is sent, also if
        it was sent before."""
        recorded = read_txn(path, QUIET).version_of(_APP)
        file = path / RESENT_FILE
        value = load_json(file, writer=False, fs=QUIET, check=partial(check_resent, file=file), root=path).value
        done = -2 if value is None else value["done"]
        if value is None and (recorded < 0 or any(file.parent.glob(f"{file.name}.*corrupt-*"))):
            return cls(recorded, {})
        if value is None or recorded > done + bool(value["next"]):
            raise CorruptStoreError(
                f"{path / RESENT_FILE} does not tell which dead letters run {recorded} has sent: it was lost, or is "
                f"older than the store. Bring it back, or remove {_APP!r} from {path / TXN_FILE} to send all again",
                str(path / RESENT_FILE),
            )
        sent = _ranges_of(value["sent"])
        if recorded <= done:
            return cls(done, sent)
        later = _ranges_of(value["next"])
        return cls(recorded, {group: _merged(sent.get(group, []), later.get(group, [])) for group in {**sent, **later}})

    def as_json(self, more: Mapping[str, Ranges]) -> dict[str, Any]:
        """With the letters of the next run."""
        return {"version": 1, "done": self.last, "sent": _as_lists(self.sent), "next": _as_lists(more)}


def _ranges_of(value: Mapping[str, Any]) -> dict[str, Ranges]:
    return {group: [(start, stop) for start, stop in ranges] for group, ranges in value.items()}


def _as_lists(letters: Mapping[str, Ranges]) -> dict[str, list[list[int]]]:
    return {group: [[*each] for each in ranges] for group, ranges in sorted(letters.items())}


def _merged(some: Ranges, more: Ranges) -> Ranges:
    """Both, those that touch as one."""
    found: Ranges = []
    for start, stop in sorted([*some, *more]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _next_run(name: StoreName) -> int:
    return _Resent.of(Path(name.path)).last + 1


# -- in the tasks ------------------------------------------------------------------------------------------------------


def _stage(job: _Job, name: StoreName) -> _Staged:
    """Copies of the letters of one store that are to be sent."""
    resent = _Resent.of(Path(name.path))
    number = resent.last + 1
    counts: Counter[str] = Counter()
    topics: Counter[str] = Counter()
    groups: Counter[str] = Counter()
    letters: dict[str, Ranges] = {}
    with open_store(name) as store:
        parts = open_parts(store)
        found = sorted(topic.removeprefix(DLQ_PREFIX) for topic in store.topics() if is_dlq_topic(topic))
        behind = any(_listed(DeadLetters(parts, group), resent.sent.get(group, []), parts) for group in found)

        def copies() -> Iterator[tuple[str, int, bytes]]:
            for group in found:
                if job.groups is not None and group not in job.groups:
                    continue
                mine = DeadLetters(parts, group)
                sent: Ranges = []
                for letter, double in _wanted(job, mine, resent.sent.get(group, []), counts):
                    if double:
                        _extend(sent, letter.offset)  # done with: later runs do not see of which message it was
                        continue
                    topic, queue_id, properties = mine.as_new(letter, job.to)
                    topics[topic] += 1
                    groups[group] += 1
                    _extend(sent, letter.offset)
                    yield topic, queue_id, _record(letter, topic, queue_id, properties, f"{group}:{letter.offset}")
                if sent:
                    letters[group] = sent

        folder = transaction_folder(Path(name.path), _APP, number, job.writer)
        pieces = _pieces(copies())
        profile = store.manifest.profile
        known = frozenset(groups_of(parts))
        shards: list[ShardInfo] = []
        if job.dry_run:
            size = sum(int(piece.sizes.sum()) for piece in pieces)
        else:
            shards += write_shards(pieces, folder, 0, 0, profile=profile)
            size = sum(shard.bytes for shard in shards)
    report = StoreResend(
        name.id,
        topics.total(),
        dict(sorted(topics.items())),
        dict(sorted(groups.items())),
        counts["before"],
        counts["doubles"],
        counts["others"],
    )
    return _Staged(number, tuple(shards), letters, behind, size, report, known)


def _wanted(job: _Job, letters: DeadLetters, before: Ranges, counts: Counter[str]) -> Iterator[tuple[Message, bool]]:
    """The letters of a group that are to be sent now, oldest first, and (True) those of the same messages."""
    passes = _passes(job)
    start_ms, stop_ms = job.selection.times_ms
    first, behind = job.selection.offsets
    sent: set[str] = set()
    """Messages that a letter is sent of now; what is given up later is a failure of its own."""
    for letter in letters:
        properties = letter.stored_properties()
        origin = properties.get(DLQ_ORIGIN_MESSAGE_ID) or properties.get(ORIGIN_MESSAGE_ID) or letter.message_id
        if any(start <= letter.offset < stop for start, stop in before):
            counts["before"] += 1
        elif origin in sent:
            counts["doubles"] += 1
            yield letter, True
        elif (
            not start_ms <= letter.store_timestamp_ms < stop_ms
            or not first <= letter.offset < behind
            or not passes(letter, properties)
        ):
            counts["others"] += 1
        else:
            sent.add(origin)
            yield letter, False


def _passes(job: _Job) -> Callable[[Message, dict[str, str]], bool]:
    matches = None if job.where is None else sql92.compile(job.where).matches
    topics = job.selection.options.topics

    def passes(letter: Message, properties: dict[str, str]) -> bool:
        if topics is not None and origin_of(letter) not in topics:
            return False
        return matches is None or matches(properties)

    return passes


def _extend(ranges: Ranges, offset: int) -> None:
    if ranges and ranges[-1][1] == offset:
        ranges[-1] = (ranges[-1][0], offset + 1)
    else:
        ranges.append((offset, offset + 1))


def _record(letter: Message, topic: str, queue_id: int, properties: dict[str, str], mark: str) -> bytes:
    if UNIQ_KEY not in properties and ORIGIN_MESSAGE_ID not in properties:
        properties = {**properties, ORIGIN_MESSAGE_ID: letter.message_id}  # as `Road.copy` has it
    record = encode_record(
        topic=topic,
        body=bytes(letter.body_view),
        queue_id=queue_id,
        queue_offset=0,
        physical_offset=0,
        born_timestamp_ms=letter.born_timestamp_ms,
        store_timestamp_ms=0,
        checksum="crc32c-record",
        properties=encode_properties({**properties, DLQ_RESENT: mark}),
        flag=letter.flag,
        sys_flag=letter.sys_flag,
        born_host=encode_host(letter.born_host),
        store_host=LOCAL_HOST,
    )
    return record[:CHECKSUM_AT] + bytes(QUEUE_ID_AT - CHECKSUM_AT) + record[QUEUE_ID_AT:]


def _pieces(copies: Iterator[tuple[str, int, bytes]]) -> Iterator[Encoded]:
    while page := [*islice(copies, _PAGE)]:
        queues = Counter((topic, queue_id) for topic, queue_id, _ in page)
        sizes = np.array([len(record) for _, _, record in page], np.int64)
        topics = tuple(dict.fromkeys(topic for topic, _, _ in page))
        yield Encoded(memoryview(b"".join(record for _, _, record in page)), sizes, dict(queues), topics)


# -- publishing --------------------------------------------------------------------------------------------------------


def _publish(name: StoreName, staged: _Staged, writer: str, lock_timeout_s: float) -> None:
    """Steps 2 to 6."""
    path = Path(name.path)
    if not staged.shards and not staged.behind:
        return
    try:
        store = MessageStore(path, lock_timeout=lock_timeout_s)
    except StoreLockedError as error:
        raise StoreLockedError(
            f"{error}; `mqstore dlq replay` sends letters again in the process that has it open", error.pid, error.host,
            error.since,
        ) from error  # fmt: skip
    with store:
        resent = _Resent.of(path)
        if resent.last + 1 != staged.run:
            raise ConfigError(f"{path}: another resend has run meanwhile, and this one has sent nothing; run it again")
        parts = open_parts(store)
        if staged.shards:
            for topic in {topic for shard in staged.shards for topic in shard.topics}:
                if not is_retry_topic(topic):
                    parts.topics.for_send(topic)
            make_folders((path / RESENT_FILE).parent, store.fs)
            save_json(path / RESENT_FILE, resent.as_json(staged.letters), store.fs, check=check_resent)
            folder = transaction_folder(path, _APP, staged.run, writer)
            store.splice([folder / shard.name for shard in staged.shards], app=_APP, version=staged.run)
        after = _Resent.of(path)
        save_json(path / RESENT_FILE, after.as_json({}), store.fs, check=check_resent)
        for group, sent in after.sent.items():
            letters = DeadLetters(parts, group)
            if new := _listed(letters, sent, parts):
                parts.offsets.move_start(letters.topic, _QUEUE, letters.bounds[0])  # what retention took is over
                parts.offsets.note_sent(letters.topic, new)
        parts.offsets.save()
    discard(path, _APP, staged.run)


def _listed(letters: DeadLetters, sent: Ranges, parts: Parts) -> Ranges:
    """Return those of `sent` that hold letters which are still listed."""
    start, end = letters.bounds
    noted = parts.offsets.sent(letters.topic)
    left = [(max(low, start), min(high, end)) for low, high in sent]
    return [(low, high) for low, high in left if after_sent(low, noted) < high]
