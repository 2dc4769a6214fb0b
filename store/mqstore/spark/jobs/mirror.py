"""What comes into stores, copied into another as it comes, each message once: `replay` that goes on (spark.md B7, B5).

A mirror is no Structured Streaming query, though it can run its tasks in Spark: a query hands on rows, and a copy made
of rows has lost flags, attempts and hosts. Here tasks copy records as bytes, with Spark and without, and the loop that
asks for batch after batch is in this process. Where the stream stands is what the streaming source says
(`mqstore.spark.progress`); the checkpoint is a folder of our own:

    metadata.json      {"version": 1, "id", "dest", "target", "initial": offset}      written once
    offsets/N          {"start": offset, "end": offset}                               batch N is decided
    commits/N          {"written": n}                                                 batch N is in the target
    lock               one loop at a time

    step                                         a crash right after it: the next run
    1 find the end, write offsets/N              does batch N with the same bounds
    2 stage and commit as (mirror-id, N)         finds N in the target and stages nothing
    3 write commits/N                            goes on with N + 1

Between two offsets there is one sequence of messages, so batch N is the same however often it is done, and the target
takes (mirror-id, N) once. Who deletes the checkpoint starts another mirror, which copies everything again.

`written` is the last batch that had messages, so that the target remembers it: a target that does not is another one
than was written to, or was restored from a backup, and what comes next must not be put behind what it lacks. A
checkpoint of an earlier version has not noted it, and does with the next batch. A target that remembers a batch which
was not decided yet has got it by a later state of the checkpoint than this one.

Retention of the source goes on: a mirror that stood still too long fails with what it has lost, or goes on with what is
left (`failOnDataLoss=false`). Knows no pyspark.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from mqstore.broker.parts import open_parts
from mqstore.errors import ConfigError
from mqstore.files.beneath import resolved
from mqstore.files.filesystem import REAL
from mqstore.files.jsonfile import save_json
from mqstore.files.lock import WriterLock
from mqstore.layout.properties import encode_properties
from mqstore.log.store import MessageStore
from mqstore.spark import publish
from mqstore.spark.copying import Spread
from mqstore.spark.jobs.replay import REPLAY_ID, REPLAY_STORE_TIME
from mqstore.spark.jobs.rewrite import (
    Destination,
    Rewrite,
    Wishes,
    execute,
    living,
    parts_of,
    prepare,
    queue_selection,
    sinks_of,
)
from mqstore.spark.jobs.shape import Plan, Progress, Selection, Shaped, Stores, select
from mqstore.spark.pacing import Limit
from mqstore.spark.plan import Slice
from mqstore.spark.progress import StreamProgress
from mqstore.spark.sinkoptions import SinkOptions
from mqstore.spark.staging import make_folders

__all__ = ["MirrorReport", "mirror", "mirror_plan"]

Trigger = Literal["available-now", "continuous"]
_METADATA: Final = "metadata.json"
_INTERVAL_MAX_S: Final = 86_400
_KEPT: Final = 16
"""Batches whose files stay in the checkpoint: for people, the last one is enough."""


@dataclass(frozen=True, slots=True)
class MirrorReport(Shaped):
    """What one run of a mirror has done."""

    id: str
    dest: str
    target: str
    batches: int
    messages: int
    bytes: int
    """Of records."""
    topics: Mapping[str, int]
    """Messages by topic of the target."""
    damaged: int
    next_batch: int


def mirror(
    spark: Any,
    src: Stores | Selection,
    dest: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    *,
    trigger: Trigger = "available-now",
    max_messages: int | None = None,
    max_bytes: int | None = None,
    interval_s: float = 1.0,
    rename: Mapping[str, str] | None = None,
    queues: int | None = None,
    spread: Spread = "queue",
    keep_time: bool = False,
    tag: bool = False,
    system: bool = False,
    target: str = "store",
    stop: Callable[[], bool] = lambda: False,
    wait: Callable[[float], object] = time.sleep,
    progress: Progress | None = None,
) -> MirrorReport:
    """Copy into `dest` what is in `src` and was not copied before: until there is no more (`available-now`: of what is
    there when it starts), or until `stop` says so, looked at after each batch (`continuous`).

    `checkpoint`: a folder that belongs to this mirror alone, outside of all stores. A batch has `max_messages` or
    `max_bytes` at most, or all there is. `interval_s`: how long `continuous` waits when there is nothing. A new mirror
    begins at the oldest message, or where the source options say (`startingOffsets`, ...). Everything else as with
    `replay`.

    ConfigError for arguments, a checkpoint of something else and a target that lost what it was given,
    StoreLockedError for one that is in use; what is in the target then stays, and the next run goes on.
    """
    if trigger not in ("available-now", "continuous"):
        raise ConfigError(f"trigger={trigger!r}: there are available-now and continuous")
    if not 0 <= interval_s <= _INTERVAL_MAX_S:
        raise ConfigError(f"interval_s={interval_s!r} is not a number of seconds from 0 to {_INTERVAL_MAX_S}")
    limit = _limit(max_messages, max_bytes)
    wishes = Wishes(dict(rename or {}), queues, spread, system, grow=True)
    folder = Path(os.path.abspath(os.fspath(checkpoint)))
    chosen, options, _ = _checked(src, dest, folder, target, wishes)
    folder = Path(resolved(folder))
    positions = StreamProgress(chosen.options)
    counts: Counter[str] = Counter()
    topics: Counter[str] = Counter()
    with _Checkpoint.opened(folder, options, StreamProgress(chosen.options).initial) as kept:
        if trigger == "available-now":
            positions.fix_target()
        while True:
            kept.check_target(options)
            batch = kept.undone() or kept.decide(positions, limit)
            if batch is None:
                if trigger == "available-now" or stop():
                    break
                wait(interval_s)
                continue
            number, begin, end = batch
            tasks = living(positions.partitions(begin, end))
            to = prepare(chosen, {options.path: options}, tasks, wishes, all_topics=False)
            _grow(to[0])
            rewrite = Rewrite(
                chosen.options,
                to,
                kept.app,
                number,
                mark=encode_properties({REPLAY_ID: kept.id}) if tag else b"",
                store_time=REPLAY_STORE_TIME if keep_time else None,
            )
            done = execute(
                spark, rewrite, parts_of(tasks, to, None), kept.id, progress=progress, title="mqstore mirror"
            )
            kept.done(number, written=done.messages > 0 or done.already)
            counts.update(batches=1, messages=done.messages, bytes=done.dests[0].bytes, damaged=done.damaged)
            topics.update(done.dests[0].topics)
            if stop():
                break
        return MirrorReport(
            kept.id,
            options.path,
            target,
            counts["batches"],
            counts["messages"],
            counts["bytes"],
            dict(sorted(topics.items())),
            counts["damaged"],
            kept.next,
        )


def mirror_plan(
    src: Stores | Selection,
    dest: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    *,
    max_messages: int | None = None,
    max_bytes: int | None = None,
    rename: Mapping[str, str] | None = None,
    queues: int | None = None,
    spread: Spread = "queue",
    system: bool = False,
    target: str = "store",
) -> Plan:
    """What `mirror` with these arguments would read now, in all batches together. Raises what it raises before it
    begins."""
    _limit(max_messages, max_bytes)
    wishes = Wishes(dict(rename or {}), queues, spread, system, grow=True)
    folder = Path(os.path.abspath(os.fspath(checkpoint)))
    chosen, options, everything = _checked(src, dest, folder, target, wishes)
    folder = Path(resolved(folder))
    if not _exists(folder):
        return Plan.of_slices(everything)
    positions = StreamProgress(chosen.options)
    kept = _Checkpoint(folder, _metadata(folder, options))
    kept.check_target(options)
    begin = kept.begin
    return Plan.of_slices(living(positions.partitions(begin, positions.latest(begin))))


def _checked(
    src: Stores | Selection, dest: str | os.PathLike[str], checkpoint: Path, target: str, wishes: Wishes
) -> tuple[Selection, SinkOptions, list[list[Slice]]]:
    """Look at arguments and target before anything is written: the messages, the target, and all that a mirror which
    begins now would read."""
    chosen = _from_the_start(queue_selection(select(src)))
    if _exists(checkpoint):  # which says where to go on: where a new one would begin may be gone by now
        chosen = chosen.with_options(starting_offsets="earliest", starting_timestamp_ms=None, starting_group=None)
    [options] = sinks_of(dest, target=target).values()
    _refuse_foreign(checkpoint)
    if not _exists(checkpoint):  # one that an earlier version has let in goes on
        _refuse_overlap(checkpoint, {"target": [options.path], "source": [name.path for name in chosen.stores()]})
    tasks = living(chosen.tasks())
    prepare(chosen, {options.path: options}, tasks, wishes, all_topics=False)
    return chosen, options, tasks


def _grow(to: Destination) -> None:
    """Give topics of a store as many queues as those of the source have got meanwhile; never fewer. A crash in between
    leaves empty queues. Raises as opening a store and altering a topic."""
    there = to.plan.rules.topics
    more = {name: count for name, count in to.create.items() if name in there and there[name].queues < count}
    if more and to.options.target == "store":
        with MessageStore(to.options.path, lock_timeout=to.options.lock_timeout_s) as store:
            topics = open_parts(store).topics
            for name, count in more.items():
                config = topics.need(name)
                read, write = max(config.read_queues, count), max(config.write_queues, count)
                topics.alter(name, read_queues=read, write_queues=write)


def _limit(max_messages: int | None, max_bytes: int | None) -> Limit | None:
    if max_messages is not None and max_bytes is not None:
        raise ConfigError("max_messages and max_bytes exclude each other; give one of them")
    most = max_messages if max_messages is not None else max_bytes
    if most is None:
        return None
    if type(most) is not int or most < 1:
        raise ConfigError(f"max_messages or max_bytes is {most!r}, and must be a number from 1")
    return Limit(most, "messages" if max_messages is not None else "bytes")


def _from_the_start(selection: Selection) -> Selection:
    """A mirror has no end, and begins at the oldest message unless the options say otherwise."""
    options = selection.options
    ends = (options.ending_offsets or "latest", options.ending_timestamp_ms) != ("latest", None)
    if ends or selection.offsets != Selection(options).offsets or selection.times_ms != Selection(options).times_ms:
        raise ConfigError(
            "a mirror has no bounds (start, stop, --from, --to, endingOffsets, endingTimestamp): where a new one "
            "begins say the source options startingOffsets, startingTimestamp or startingGroup"
        )
    said = (options.starting_offsets, options.starting_timestamp_ms, options.starting_group)
    return selection.with_options(starting_offsets="earliest") if said == (None, None, None) else selection


class _Checkpoint:
    """The folder, while its lock is held."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.id: str = metadata["id"]
        self.app = f"mirror-{self.id}"
        """Who writes, for the target."""
        self._path = path
        self._last: dict[str, Any] = {"start": metadata["initial"], "end": metadata["initial"]}
        numbers = sorted(_numbers(path / "offsets"))
        self.next = 0
        self._undone = False
        self._written: int | None = None
        if numbers:
            self.next = numbers[-1]
            self._last = _read(path / "offsets" / str(self.next), _are_bounds)
            commits = _numbers(path / "commits")
            self._undone = self.next not in commits
            self.next += not self._undone
            if commits:
                done = _read(path / "commits" / str(max(commits)), _is_commit, _DONE_AGAIN)
                self._written = done.get("written")

    @classmethod
    @contextmanager
    def opened(cls, path: Path, options: SinkOptions, initial: Callable[[], dict[str, Any]]) -> Iterator[_Checkpoint]:
        """The checkpoint, made if it is not there. ConfigError for one of another mirror."""
        _refuse_foreign(path)
        start = None if _exists(path) else initial()  # may raise: before anything is written
        for folder in (path, path / "offsets", path / "commits"):
            make_folders(folder)
        lock = WriterLock(path, "mqstore", fs=REAL)
        try:
            lock.acquire(0.0)
            if start is not None and not _exists(path):
                save_json(path / _METADATA, {"id": uuid.uuid4().hex, **_belongs_to(options), "initial": start})
            yield cls(path, _metadata(path, options))
        finally:
            lock.release()

    @property
    def begin(self) -> dict[str, Any]:
        """Up to where everything is known to be in the target."""
        begin: dict[str, Any] = self._last["start" if self._undone else "end"]
        return begin

    def check_target(self, options: SinkOptions) -> None:
        """ConfigError for a target that does not have what was written to it, or has more than that."""
        if publish.is_committed(options, self.app, self.next + self._undone):
            raise ConfigError(
                f"{options.path} has batch {self.next + self._undone} of this mirror, of which {self._path} knows "
                "nothing: the checkpoint was put back from a copy. The batch would hold other messages now, and count "
                "as copied. Take another checkpoint, and say by source options where it is to begin "
                "(startingOffsets, ...); or another target, too, for all that there is"
            )
        if self._written is not None and not publish.is_committed(options, self.app, self._written):
            raise ConfigError(
                f"{options.path} lacks batch {self._written} of this mirror, which {self._path} says was written "
                "there: the target was restored or replaced since. Bring back the one that has it; or begin anew, with "
                "another checkpoint and another target, for that copies all again"
            )

    def undone(self) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """The batch that was decided and is not known to be done."""
        return (self.next, self._last["start"], self._last["end"]) if self._undone else None

    def decide(
        self, positions: StreamProgress, limit: Limit | None
    ) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
        """The next batch, written down; None if there is nothing new."""
        begin = self._last["end"]
        end = positions.latest(begin, limit)
        if end == begin:
            return None
        self._last = {"start": begin, "end": end}
        save_json(self._path / "offsets" / str(self.next), self._last)
        self._undone = True
        return self.next, begin, end

    def done(self, number: int, *, written: bool) -> None:
        """`written`: the batch had messages; the target remembers no other."""
        self._written = number if written else self._written
        save_json(self._path / "commits" / str(number), {} if self._written is None else {"written": self._written})
        self._undone = False
        self.next = number + 1
        for folder in ("commits", "offsets"):
            for old in _numbers(self._path / folder):
                if old <= number - _KEPT:
                    (self._path / folder / str(old)).unlink(missing_ok=True)


def _exists(path: Path) -> bool:
    return (path / _METADATA).exists()


def _refuse_foreign(path: Path) -> None:
    """ConfigError for a folder that has files of something else."""
    if path.exists() and not _exists(path) and {each.name for each in path.iterdir()} - {"lock", "offsets", "commits"}:
        raise ConfigError(f"{path} is no checkpoint of a mirror: give a folder of its own")


def _refuse_overlap(checkpoint: Path, others: Mapping[str, list[str]]) -> None:
    """ConfigError for a checkpoint in a store or around it: a source is left without a trace, and a folder that has
    other files becomes no store."""
    folder = Path(os.path.realpath(checkpoint))
    for what, paths in others.items():
        for path in paths:
            place = Path(os.path.realpath(path))
            if folder.is_relative_to(place) or place.is_relative_to(folder):
                raise ConfigError(
                    f"checkpoint {checkpoint} and {what} {path} lie in one another: give the checkpoint a folder of "
                    "its own, outside of stores"
                )


def _belongs_to(options: SinkOptions) -> dict[str, Any]:
    """What stays the same as long as a checkpoint lives."""
    return {"version": 1, "dest": os.path.realpath(options.path), "target": options.target}


def _metadata(path: Path, options: SinkOptions) -> dict[str, Any]:
    """Of the checkpoint. ConfigError for one of another mirror."""
    metadata = _read(path / _METADATA)
    for name, value in _belongs_to(options).items():
        if metadata.get(name) != value:
            raise ConfigError(
                f"{path} is the checkpoint of a mirror with {name} {metadata.get(name)!r}, not {value!r}: give another "
                "folder"
            )
    if type(metadata.get("id")) is not str or not metadata["id"] or type(metadata.get("initial")) is not dict:
        raise _damaged(path / _METADATA, ValueError("it lacks what a mirror writes there"))
    return metadata


def _numbers(folder: Path) -> set[int]:
    return {int(each.name) for each in folder.iterdir() if each.name.isdecimal()}


def _are_bounds(value: dict[str, Any]) -> bool:
    """What the offsets say is for `decode_offset` to judge."""
    return all(type(value.get(name)) is dict for name in ("start", "end"))


def _is_commit(value: dict[str, Any]) -> bool:
    return "written" not in value or (type(value["written"]) is int and value["written"] >= 0)


_BEGIN_ANEW: Final = (
    "bring it back as it was; or begin anew, with another checkpoint and source options for where (startingOffsets, "
    "...), or with another target, too, for all that there is"
)
_DONE_AGAIN: Final = "delete this file: the batch is done again, and what the target has of it is not copied twice"


def _read(path: Path, right: Callable[[dict[str, Any]], bool] = bool, remedy: str = _BEGIN_ANEW) -> dict[str, Any]:
    """A file of the checkpoint, of which `right` says whether it has the right members. ConfigError for another one."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # not JSON, or 100,000 brackets
        raise _damaged(path, error, remedy) from error
    if not isinstance(value, dict) or not right(value):
        raise _damaged(path, ValueError("it lacks what a mirror writes there"), remedy)
    return value


def _damaged(path: Path, error: Exception, remedy: str = _BEGIN_ANEW) -> ConfigError:
    return ConfigError(f"{path}, of the checkpoint, is damaged ({error}): {remedy}")
