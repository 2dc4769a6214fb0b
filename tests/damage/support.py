"""Stores to damage, and what must come back from them: each message whose bytes are whole, and no other.

That is computed from the files by the small parser here (format#record), never by the engine: `listing` reads the
undamaged store, and `judge` compares the bytes of each of its records with those in the damaged one. `check` runs the
commands on copies of the damaged store.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import shutil
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import crc32c
from click.testing import Result

import mqstore
from mqstore import Profile
from tests.children import in_child
from tests.log.support import files
from tests.tools.support import mqstore as command

__all__ = [
    "FORMATS",
    "MAGIC_BLANK",
    "STATES",
    "Made",
    "Record",
    "Shape",
    "check",
    "contents",
    "judge",
    "make",
    "overwrite",
    "queue_files",
    "segments",
    "write",
]

FORMATS = ("mqstore", "rocketmq", "rocketmq with properties checksum")
STATES = ("closed", "killed")

Content = tuple[str, int, int, bytes, str | None, str | None]
"""Topic, queue id, queue offset, body, tag, keys."""

_HEAD = struct.Struct(">iiiiiqq")
"""Total size, magic, checksum, queue id, flag, queue offset, physical offset."""
_MAGIC = 0xDAA320A7
_MAGIC_BYTES = re.compile(_MAGIC.to_bytes(4, "big"))
MAGIC_BLANK = 0xCBD43194 - (1 << 32)
_BODY_AT = 88
"""With IPv4 hosts, which all records here have."""
_FLUSHED_AT = 72
"""Of the watermark in the checkpoint."""


# -- an independent parser ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One message in the log, and its place [start, end)."""

    content: Content
    start: int
    end: int

    @property
    def body_at(self) -> int:
        return self.start + _BODY_AT

    @property
    def topic_at(self) -> int:
        return self.body_at + len(self.content[3]) + 1

    @property
    def properties_at(self) -> int:
        return self.topic_at + len(self.content[0]) + 2


def parse(data: bytes, at: int, physical: int, profile: str) -> Record | None:
    """Return the record at `data[at]`, whose place in the log is `physical`. None if it does not verify."""
    if at + _BODY_AT > len(data):
        return None
    size, magic, checksum, queue_id, _, queue_offset, place = _HEAD.unpack_from(data, at)
    record = data[at : at + size]
    if magic & 0xFFFF_FFFF != _MAGIC or size <= _BODY_AT or len(record) != size or place != physical:
        return None
    (body_size,) = struct.unpack_from(">i", record, _BODY_AT - 4)
    topic_at = _BODY_AT + body_size + 1
    if body_size < 0 or topic_at > size:
        return None
    properties_at = topic_at + record[topic_at - 1] + 2
    if properties_at > size or struct.unpack_from(">h", record, properties_at - 2)[0] != size - properties_at:
        return None
    body, properties = record[_BODY_AT : topic_at - 1], record[properties_at:]
    if profile == "mqstore":
        verifies = crc32c.crc32c(record[:8] + bytes(4) + record[12:]) == checksum & 0xFFFF_FFFF
    else:
        verifies = zlib.crc32(body) & 0x7FFF_FFFF == checksum
        if properties[-20:-11] == b"__CRC32#\x01" and properties[-21:-20] in (b"", b"\x02"):
            verifies = verifies and record[-20:] == _crc_tail(record[:-20])
    if not verifies:
        return None
    pairs = dict(pair.split(b"\x01", 1) for pair in properties.split(b"\x02") if b"\x01" in pair)
    topic, tag, keys = (
        None if text is None else text.decode("utf-8", "replace")
        for text in (record[topic_at : properties_at - 2], pairs.get(b"TAGS"), pairs.get(b"KEYS"))
    )
    return Record((topic or "", queue_id, queue_offset, body, tag, keys), physical, physical + size)


def _crc_tail(front: bytes) -> bytes:
    """Return the property that ends a record which begins with `front`: ten digits, the lowest first."""
    digits = f"{zlib.crc32(front) & 0x7FFF_FFFF:010d}"[::-1]
    return b"__CRC32#\x01" + digits.encode() + b"\x02"


def segments(store: Path) -> list[Path]:
    """Return the files of the log in order."""
    return sorted(file for file in (store / "commitlog").iterdir() if len(file.name) == 20)


def queue_files(store: Path) -> list[Path]:
    """Return the files of all queues in order."""
    return sorted((store / "consumequeue").glob("*/*/*"))


def listing(store: Path, profile: str) -> list[Record]:
    """Return all records of an undamaged store, in order."""
    found = []
    for file in segments(store):
        data, base, at = file.read_bytes(), int(file.name), 0
        while record := parse(data, at, base + at, profile):
            found.append(record)
            at = record.end - base
        size, magic = struct.unpack_from(">ii", data, at)
        assert (magic == MAGIC_BLANK and at + size == len(data)) or not any(data[at:]), (file, at)
    return found


def scan(store: Path, made: Made) -> Counter[Content]:
    """Return all records of a damaged store that verify where they say they lie, wherever one begins.

    A file may have a wrong name: it holds the place that its record says.
    """
    found: dict[int, Content] = {}
    for file in segments(store):
        data = file.read_bytes()
        for match in _MAGIC_BYTES.finditer(data):
            at = match.start() - 4
            if at < 0 or at + _BODY_AT > len(data):
                continue
            (place,) = struct.unpack_from(">q", data, at + 28)
            if place >= 0 and place % made.segment_bytes == at and (record := parse(data, at, place, made.profile)):
                found[place] = record.content
    return Counter(found.values())


def write(store: Path, physical: int, data: bytes) -> None:
    """Overwrite bytes of the log. No file grows."""
    for file in segments(store):
        skipped = max(0, int(file.name) - physical)
        overwrite(file, physical + skipped - int(file.name), data[skipped:])


def overwrite(file: Path, at: int, data: bytes) -> None:
    """Overwrite bytes of a file. It does not grow."""
    with file.open("r+b") as opened:
        room = opened.seek(0, os.SEEK_END) - at
        if room > 0:
            opened.seek(at)
            opened.write(data[:room])


# -- undamaged stores --------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Sizes of a store, and the seed of its messages."""

    messages: int = 300
    topics: int = 3
    body_bytes: int = 2000
    segment_bytes: int = 1 << 16
    seed: int = 1


@dataclass(frozen=True)
class Made:
    """An undamaged store. Tests damage copies of it."""

    path: Path
    profile: Profile
    segment_bytes: int
    records: list[Record]


def make(path: Path, form: str, state: str, shape: Shape = Shape()) -> Made:  # noqa: B008  (a tuple)
    """Make a store of one of `FORMATS` in one of `STATES`.

    After a kill, half of the messages lie behind the flush watermark, and about a quarter is in no queue.
    """
    profile: Profile = "mqstore" if form == "mqstore" else "rocketmq"
    draw = random.Random(shape.seed)
    half = shape.messages // 2
    _put(path, profile, shape, draw, range(half))
    if state == "closed":
        _put(path, profile, shape, draw, range(half, shape.messages))
    else:
        rest = range(half, shape.messages)
        assert in_child(lambda: _put(path, profile, shape, draw, rest, killed=True)) == 0
    assert (path / "abort").exists() == (state == "killed")
    if form == FORMATS[2]:
        _append_crc_tails(path)
    records = listing(path, profile)
    assert len(records) == shape.messages
    return Made(path, profile, shape.segment_bytes, records)


_PLACEHOLDER = "crc-here"
"""A property that takes as many bytes as the properties checksum, which our writer does not write."""


def _put(
    path: Path, profile: Profile, shape: Shape, draw: random.Random, numbers: range, *, killed: bool = False
) -> None:
    clock = mqstore.SimulatedClock()  # no threads: nothing is flushed or listed that is not asked for
    sizes = {"consumequeue_units": 16, "index_slots": 64, "index_entries": 256}
    config = mqstore.StoreConfig(segment_bytes=shape.segment_bytes, **sizes, clock=clock)
    store = mqstore.open(path, profile=profile, config=config)
    for topic in range(shape.topics):
        store.create_topic(f"topic-{topic}", queues=2 + topic % 2)
    for n in numbers:
        topic = draw.randrange(shape.topics)
        size = draw.randrange(8, shape.body_bytes) * draw.choice([1] * 40 + [10])
        store.put(
            f"topic-{topic}",
            draw.randbytes(min(size, shape.segment_bytes // 3)),
            queue_id=draw.randrange(2 + topic % 2),
            tag=draw.choice((None, "paid", "sent")),
            keys=[f"k{n}", "all"][: draw.randrange(3)],
            properties={_PLACEHOLDER: "0" * 10},
        )
        clock.advance(7)
        if killed and n == numbers[len(numbers) // 2]:
            for name in store.topics():
                for queue in store.queues(name):
                    store.offsets(*queue)  # lists what was put so far
    if killed:
        os._exit(0)
    store.close()


def _append_crc_tails(store: Path) -> None:
    """Replace the placeholder in each record by a properties checksum at its end. Places and sizes stay."""
    placeholder = f"{_PLACEHOLDER}\x01{'0' * 10}\x02".encode()
    for record in listing(store, "rocketmq"):
        file = max(file for file in segments(store) if int(file.name) <= record.start)
        at, end = record.start - int(file.name), record.end - int(file.name)
        front = file.read_bytes()[at:end].replace(placeholder, b"")
        assert len(front) == end - at - len(placeholder)
        overwrite(file, at, front + _crc_tail(front))


# -- what must come back -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Messages that a damaged store must give back."""

    whole: Counter[Content]
    found: Counter[Content]
    """Messages of the undamaged store whose records the parser finds in the damaged one."""
    doubtful: frozenset[bytes]
    """Bodies of altered records that verify, as no checksum covers the altered bytes. They may come back or not."""
    lost: int
    is_told: bool | None
    """Whether something must be said to be missing. None: the damaged store does not show whether something is."""

    def problems(self, exported: Counter[Content], added: Counter[Content]) -> Iterator[str]:
        """Yield how an export differs from what must come back together with `added`."""
        expected = self.whole + added
        if missing := self.found - exported:
            yield f"misses {missing.total()} of {self.found.total()} messages that a parser finds, {_some(missing)}"
        if missing := expected - exported:
            yield f"misses {missing.total()} of {expected.total()} whole messages, {_some(missing)}"
        surplus = exported - expected
        wrong = Counter({content: n for content, n in surplus.items() if content[3] not in self.doubtful or n > 1})
        if wrong:
            yield f"has {wrong.total()} messages too many, {_some(wrong)}"


def _some(contents: Counter[Content]) -> str:
    return ", ".join(f"{topic}/{queue_id}@{offset}" for topic, queue_id, offset, *_ in list(contents)[:3])


def judge(made: Made, store: Path) -> Verdict:
    """Return what must come back from `store`, a damaged copy of `made`."""
    before, after = ({int(file.name): file.read_bytes() for file in segments(path)} for path in (made.path, store))
    whole, doubtful, lost = [], [], []
    # A last file that is too short is filled with zeros.
    after = {
        base: data.ljust(made.segment_bytes, bytes(1)) if base == max(after) else data for base, data in after.items()
    }
    # Behind a segment's end there may be another segment, of files that were concatenated.
    copies = [
        data[at : at + made.segment_bytes] for data in after.values() for at in range(0, len(data), made.segment_bytes)
    ]
    places = {}
    for record in made.records:
        base = record.start // made.segment_bytes * made.segment_bytes
        places[record] = base, slice(record.start - base, record.end - base)
    # Files with any record in its place. A copy of such a file is of no use, whatever its name.
    rightful = {base for base, place in places.values() if after.get(base, b"")[place] == before[base][place]}
    for record, (base, place) in places.items():
        data, found = before[base][place], after.get(base, b"")[place]
        if found == data or (base not in rightful and any(other[place] == data for other in copies)):
            whole.append(record)
        elif all(parse(other, place.start, record.start, made.profile) is None for other in copies):
            lost.append(record)
        elif (
            made.profile == "rocketmq" and found[:20] + found[28:] == data[:20] + data[28:] and _has_unit(store, record)
        ):
            whole.append(record)  # its unit outvotes the altered queue offset, which no checksum covers
        else:
            doubtful.append(record)
    told: bool | None = any(_is_shown(made, store, record, whole, after) for record in lost)
    used = {record.start // made.segment_bytes * made.segment_bytes: record.end for record in made.records}
    intact = {base: len(data) for base, data in before.items()} == {base: len(data) for base, data in after.items()}
    intact = intact and all(
        before[base][: end - base + 8] == after[base][: end - base + 8]  # with the header of the BLANK
        for base, end in used.items()
        if end < made.records[-1].end
    )
    last = made.records[-1].end
    base = last // made.segment_bytes * made.segment_bytes
    # Bytes behind the end of a killed store may be what is left of a message.
    intact = intact and not ((made.path / "abort").exists() and any(after[base][last - base :]))
    if not told and (lost or doubtful or not intact):
        told = None
    return Verdict(
        Counter(record.content for record in whole),
        scan(store, made) & Counter(record.content for record in made.records),
        frozenset(record.content[3] for record in doubtful),
        len(lost),
        told,
    )


def _has_unit(store: Path, record: Record) -> bool:
    topic, queue_id, offset, *_ = record.content
    for file in (store / "consumequeue" / topic / str(queue_id)).glob("*"):
        at, data = offset * 20 - int(file.name), file.read_bytes()
        if 0 <= at <= len(data) - 20:
            return struct.unpack_from(">qi", data, at) == (record.start, record.end - record.start)
    return False


def _is_shown(made: Made, store: Path, lost: Record, whole: list[Record], after: dict[int, bytes]) -> bool:
    """Return True if the damaged store shows that something was in the place of `lost`.

    What lies behind must be known, and that the log began before it.
    """
    original, checkpoint = made.path / "checkpoint", store / "checkpoint"
    is_known = checkpoint.exists() and checkpoint.read_bytes() == original.read_bytes()
    (flushed,) = struct.unpack_from(">q", original.read_bytes(), _FLUSHED_AT)
    base = lost.start // made.segment_bytes * made.segment_bytes
    others = {file.read_bytes() for file in segments(made.path) if int(file.name) != base}  # a file with a wrong name
    began = any(record.end <= lost.start for record in whole) or after.get(base, b"") not in {b"", *others}
    began |= is_known and made.profile == "mqstore"  # a Java broker may have removed the first segments
    ended_later = any(record.start >= lost.end for record in whole) or (is_known and lost.end <= flushed)
    listed = _has_unit(store, lost)  # a unit of its record alone shows that there was one
    return (began or (listed and not after)) and (ended_later or listed)


# -- the commands ------------------------------------------------------------------------------------------------------


contents = partial(files, lock=False)
"""Returns the bytes of each file of a store, by name, without `lock`."""


def check(made: Made, store: Path, *, may_refuse: bool = False, may_find_more: bool = False) -> list[str]:
    """Return what commands do wrong with `store`, a damaged copy of `made`. Changes `store`.

    `may_refuse`: opening for writing may be refused with an error that names `mqstore recover`. `may_find_more`:
    `export` and `recover` may exit with 1 although no message is lost: a damaged unit may look like that of a lost one.
    """
    opened = store.with_name(store.name + "-opened")
    shutil.copytree(store, opened)
    checks = _Checks(judge(made, store), may_find_more)
    checks.before_recovery(store)
    checks.recovery(store)
    checks.opening(opened, may_refuse)
    return checks.problems


@dataclass
class _Checks:
    verdict: Verdict
    may_find_more: bool
    problems: list[str] = field(default_factory=list)

    def before_recovery(self, store: Path) -> None:
        before = contents(store)
        result = self.export("export", store)
        if result is not None:
            self.expect(self.is_as_told(result), "export has the wrong exit code", result)
        self.expect(contents(store) == before, "export changes the store")

    def recovery(self, store: Path) -> None:
        before = contents(store)
        verified = self.run("verify", store)
        planned = self.run("recover", store, "--dry-run")
        self.expect(contents(store) == before, "recover --dry-run changes the store")
        result = self.run("recover", store)
        recovered = contents(store)
        if result is not None:
            code = result.exit_code
            self.expect(self.is_as_told(result), "recover has the wrong exit code", result)
            if planned is not None:
                changed = {name for name in before.keys() | recovered.keys() if before.get(name) != recovered.get(name)}
                if code or changed - {"abort", "checkpoint"}:  # each opening for writing makes these two anew
                    self.expect(planned.exit_code == 1, "recover --dry-run says that there is nothing to do", planned)
                    if verified is not None and not verified.exit_code:
                        self.problems.append("verify finds nothing, though recover has something to do")
                elif not changed:
                    self.expect(planned.exit_code == 0, "recover --dry-run says that there is something to do", planned)
        self.export("export after recover", store)
        second = self.run("recover", store, "--json")
        if second is not None:
            report = json.loads(second.stdout)
            new = [finding for finding in report["findings"] if not finding["known"]]
            self.expect(second.exit_code == 0 and not new, f"a second recover finds something: {new[:2]}", second)
            self.expect(not report["changed"], "a second recover says that it changed something", second)
        again = contents(store)
        changed = sorted(name for name in again.keys() | recovered.keys() if again.get(name) != recovered.get(name))
        self.expect(not changed, f"a second recover changes {', '.join(changed)}")
        verified = self.run("verify", store)
        self.expect(verified is None or verified.exit_code == 0, "verify after recover finds something", verified)

    def is_as_told(self, result: Result) -> bool:
        told, code = self.verdict.is_told, result.exit_code
        return told is None or code == told or (code == 1 and self.may_find_more)

    def opening(self, store: Path, may_refuse: bool) -> None:
        try:
            with mqstore.open(store, config=mqstore.StoreConfig(clock=mqstore.SimulatedClock())) as opened:
                receipt = opened.put("topic-0", b"one more", keys="new")
        except mqstore.MQStoreError as error:
            self.expect(may_refuse and "mqstore recover" in str(error), f"opening is refused: {error}")
            return
        added: Content = (receipt.queue.topic, receipt.queue.queue_id, receipt.offset, b"one more", None, "new")
        self.export("export after opening", store, [added])

    def export(self, step: str, store: Path, added: Iterable[Content] = ()) -> Result | None:
        result = self.run("export", store)
        if result is not None:
            found: Counter[Content] = Counter()
            for row in map(json.loads, result.stdout.splitlines()):
                place = (row["topic"], row["queue_id"], row["queue_offset"])
                found[(*place, base64.b64decode(row["body"]), row["tags"], row["keys"])] += 1
            self.problems += [f"{step} {problem}" for problem in self.verdict.problems(found, Counter(added))]
        return result

    def run(self, *arguments: object) -> Result | None:
        """Run a command. An error that is none of mqstore's is a problem, and so is a refusal."""
        try:
            result = command(*arguments)
        except Exception as error:
            self.problems.append(f"{arguments[0]} raises {error!r}")
            return None
        self.expect(result.exit_code in (0, 1), f"{arguments[0]} is refused", result)
        return result if result.exit_code in (0, 1) else None

    def expect(self, holds: bool, problem: str, result: Result | None = None) -> None:
        if not holds:
            said = (
                ""
                if result is None
                else f" (exit code {result.exit_code}: {' '.join((result.stderr or result.stdout).split())[-300:]})"
            )
            self.problems.append(problem + said)
