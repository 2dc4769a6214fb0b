"""Kinds of damage, as data: what is done to the files of a store, and whether it costs messages."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.damage.support import MAGIC_BLANK, Made, Record, overwrite, queue_files, segments, write

__all__ = ["KINDS", "Kind", "Target", "flip"]

BLOCK = 4096
FAR = 1 << 40
"""A multiple of all segment sizes, and behind all logs."""


def flip(file: Path, at: int, bit: int = 0) -> None:
    """Flip a bit of a file."""
    with file.open("rb") as opened:
        opened.seek(at)
        byte = opened.read(1)
    if byte:
        overwrite(file, at, bytes([byte[0] ^ 1 << bit]))


@dataclass(frozen=True)
class Target:
    """A copy of a store, to be damaged."""

    made: Made
    path: Path
    draw: random.Random
    other: Callable[[], Path]
    """Returns the folder of another undamaged store of the same form and state."""

    @property
    def end(self) -> int:
        """End of the log."""
        return self.made.records[-1].end

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    @property
    def abort(self) -> Path:
        return self.path / "abort"

    @property
    def index(self) -> list[Path]:
        """Files of the index in order."""
        return sorted((self.path / "index").iterdir())

    def record(self, part: float) -> Record:
        """Return the record behind this part of all records: 0 the first, 1 the last."""
        return self.made.records[round(part * (len(self.made.records) - 1))]

    def segment(self, part: float) -> Path:
        """Return the segment behind this part of all segments: 0 the first, 1 the last."""
        files = segments(self.path)
        return files[round(part * (len(files) - 1))]

    def queue_file(self, part: float) -> Path:
        """Return the file behind this part of all files of queues."""
        files = queue_files(self.path)
        return files[round(part * (len(files) - 1))]

    def flip(self, physical: int) -> None:
        """Flip a bit of the log."""
        base = physical // self.made.segment_bytes * self.made.segment_bytes
        flip(self.path / "commitlog" / f"{base:020d}", physical - base)

    def zero(self, physical: int, size: int) -> None:
        """Overwrite bytes of the log with zeros."""
        write(self.path, physical, bytes(size))

    def randomize(self, physical: int, size: int) -> None:
        """Overwrite bytes of the log with random ones."""
        write(self.path, physical, self.draw.randbytes(size))

    def randomize_file(self, file: Path) -> None:
        """Overwrite all bytes of a file with random ones."""
        overwrite(file, 0, self.draw.randbytes(file.stat().st_size))

    def end_marker(self, record: Record) -> None:
        """Overwrite the front of a record with the marker that ends a segment."""
        left = self.made.segment_bytes - record.start % self.made.segment_bytes
        write(self.path, record.start, struct.pack(">ii", left, MAGIC_BLANK))

    def spoil_end_markers(self) -> None:
        """Overwrite the markers at the ends of segments: by zeros, by nonsense, by a wrong length."""
        bounds = [(a, b) for a, b in pairwise(self.made.records) if b.start > a.end]
        for n, (before, after) in enumerate(bounds):
            write(self.path, before.end, [bytes(8), b"\1" * 8, struct.pack(">i", after.start - before.start)][n % 3])

    def add_stale_segments(self) -> None:
        """Add files after the log's end: a copy of the first segment, and one of zeros."""
        last, size = self.segment(1), self.made.segment_bytes
        shutil.copy(self.segment(0), last.with_name(f"{int(last.name) + size:020d}"))
        last.with_name(f"{int(last.name) + 2 * size:020d}").write_bytes(bytes(size))

    def last_of_segment(self, part: float) -> Record:
        """Return the last record of the segment of `record(part)`."""
        base = self.record(part).start // self.made.segment_bytes
        return [r for r in self.made.records if r.start // self.made.segment_bytes == base][-1]

    def first_of_segment(self, part: float) -> Record:
        """Return the first record of the segment of `record(part)`."""
        base = self.record(part).start // self.made.segment_bytes
        return next(r for r in self.made.records if r.start // self.made.segment_bytes == base)

    def splice(self, record: Record, removed: int, added: bytes) -> None:
        """Replace the first `removed` bytes of a record by others. What is behind in its segment moves."""
        base = record.start // self.made.segment_bytes * self.made.segment_bytes
        file, at = self.path / "commitlog" / f"{base:020d}", record.start - base
        data = file.read_bytes()
        file.write_bytes(data[:at] + added + data[at + removed :])

    def take_from_other(self, *names: str) -> None:
        """Replace files or folders by those of another store."""
        other = self.other()
        for name in names:
            _remove(self.path / name)
            (shutil.copytree if (other / name).is_dir() else shutil.copy)(other / name, self.path / name)

    def lengthen(self, file: Path, size: int) -> None:
        """Append random bytes to a file."""
        with file.open("ab") as opened:
            opened.write(self.draw.randbytes(size))


def _shorten(file: Path, size: int) -> None:
    os.truncate(file, max(1, file.stat().st_size - size))  # an empty file is a kind of its own


def _zero_file(file: Path) -> None:
    overwrite(file, 0, bytes(file.stat().st_size))


def _remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _rotate(*files: Path) -> None:
    """Give each file the name of the next one, and the last the name of the first."""
    away = [file.rename(file.with_name(f"{file.name}.away")) for file in files]
    for file, name in zip(away, (*files[1:], files[0]), strict=True):
        file.rename(name)


def _append(file: Path, data: bytes) -> None:
    with file.open("ab") as opened:
        opened.write(data)


def _concatenate(*files: Path) -> None:
    """Append files to the first one, and remove them. IndexError without one: the store is too small."""
    first = files[0]
    for other in files[1:]:
        _append(first, other.read_bytes())
        other.unlink()


def _rename(file: Path, number: int) -> None:
    file.rename(file.with_name(f"{number:020d}"))


@dataclass(frozen=True)
class Kind:
    """A kind of damage."""

    damage: Callable[[Target], object]
    loses: bool = False
    """Whether messages are lost in it, where checksums cover all bytes."""
    may_refuse: bool = False
    """Whether opening for writing may be refused, with an error that names `mqstore recover`."""
    may_find_more: bool = False
    """Whether `recover` may exit with 1 although no message is lost."""


LOSS = True


def _fields(at: int, shape: str, *values: int) -> Kind:
    """Write each of some values at a place in a record, another record for each value."""

    def damage(target: Target) -> None:
        for record, value in zip(target.draw.sample(target.made.records, len(values)), values, strict=True):
            write(target.path, record.start + at, struct.pack(shape, value))

    return Kind(damage, LOSS)


KINDS: dict[str, Kind] = {
    # one record
    "body of the first record": Kind(lambda t: t.flip(t.record(0).body_at), LOSS),
    "body in the middle": Kind(lambda t: t.flip(t.record(0.4).body_at), LOSS),
    "body in the last quarter": Kind(lambda t: t.flip(t.record(0.8).body_at), LOSS),
    "body of the last record": Kind(lambda t: t.flip(t.record(1).body_at), LOSS),
    "bodies of two records": Kind(lambda t: [t.flip(t.record(part).body_at) for part in (0.3, 0.7)], LOSS),
    "bodies of the last two records": Kind(lambda t: [t.flip(t.made.records[n].body_at) for n in (-2, -1)], LOSS),
    "total size": Kind(lambda t: t.flip(t.record(0.5).start + 3), LOSS),
    "total size, huge": Kind(lambda t: write(t.path, t.record(0.5).start, b"\x7f"), LOSS),
    "magic": Kind(lambda t: t.flip(t.record(0.5).start + 4), LOSS),
    "checksum": Kind(lambda t: t.flip(t.record(0.5).start + 9), LOSS),
    "queue id": Kind(lambda t: t.flip(t.record(0.5).start + 15), LOSS),
    "queue id in the last quarter": Kind(lambda t: t.flip(t.record(0.8).start + 15), LOSS),
    "queue offset": Kind(lambda t: t.flip(t.record(0.4).start + 27), LOSS),
    "queue offset, high byte": Kind(lambda t: t.flip(t.record(0.4).start + 21), LOSS),
    "physical offset": Kind(lambda t: t.flip(t.record(0.5).start + 35), LOSS),
    "body length": Kind(lambda t: t.flip(t.record(0.5).body_at - 1), LOSS),
    "topic length": Kind(lambda t: t.flip(t.record(0.5).topic_at - 1), LOSS),
    "topic": Kind(lambda t: t.flip(t.record(0.5).topic_at + 2), LOSS),
    "properties": Kind(lambda t: t.flip(t.record(0.5).properties_at), LOSS),
    "a record of zeros": Kind(lambda t: t.zero(t.record(0.5).start, t.record(0.5).end - t.record(0.5).start), LOSS),
    "a stale record in the place of another": Kind(
        lambda t: write(t.path, t.record(0.5).start, _bytes_of(t, t.record(0.2))), LOSS
    ),
    "flags": _fields(36, ">i", 0x10, 0x20, 0x80, 1),
    "wild sizes": _fields(0, ">i", 0, -1, 90, 91, 92, 2**31 - 1, 1 << 16),
    "wild queue offsets": _fields(20, ">q", -1, 2**62, 0, 7),
    "wild places": _fields(28, ">q", -1, 0, 2**62),
    # end-of-segment markers
    "all end markers wrong": Kind(lambda t: t.spoil_end_markers()),
    "an end marker over a record": Kind(lambda t: t.end_marker(t.record(0.4)), LOSS),
    "an end marker over the first record of a segment": Kind(lambda t: t.end_marker(t.first_of_segment(0.4)), LOSS),
    "an end marker over the last record of a segment": Kind(lambda t: t.end_marker(t.last_of_segment(0.4)), LOSS),
    "an end marker over the first record": Kind(lambda t: t.end_marker(t.record(0)), LOSS),
    "an end marker near the end": Kind(lambda t: t.end_marker(t.made.records[-4]), LOSS),
    "an end marker over the last record": Kind(lambda t: t.end_marker(t.record(1)), LOSS),
    "end markers over a record of each segment": Kind(
        lambda t: [t.end_marker(record) for record in t.made.records[7::29]], LOSS
    ),
    "an end marker over a record, no queues": Kind(
        lambda t: (t.end_marker(t.record(0.4)), _remove(t.path / "consumequeue")), LOSS
    ),
    "an end marker over the last record of a segment, no checkpoint": Kind(
        lambda t: (t.end_marker(t.last_of_segment(0.4)), _remove(t.checkpoint)), LOSS
    ),
    # blocks
    "a block of zeros": Kind(lambda t: t.zero(t.record(0.5).start // BLOCK * BLOCK, BLOCK), LOSS),
    "a block of zeros near the end": Kind(lambda t: t.zero(t.record(0.9).start // BLOCK * BLOCK, BLOCK), LOSS),
    "64 KiB of random bytes": Kind(lambda t: t.randomize(t.record(0.4).start + 5, 1 << 16), LOSS),
    "64 KiB of random bytes near the end": Kind(lambda t: t.randomize(t.record(0.7).start + 5, 1 << 16), LOSS),
    "random bytes behind the end": Kind(lambda t: t.randomize(t.end, 500)),
    "a stale record behind the end": Kind(lambda t: write(t.path, t.end, _bytes_of(t, t.record(0.2)))),
    # segments
    "a segment's beginning": Kind(lambda t: overwrite(t.segment(0.5), 0, t.draw.randbytes(600)), LOSS),
    "the first segment's beginning": Kind(lambda t: overwrite(t.segment(0), 0, bytes(600)), LOSS),
    "the last segment's beginning": Kind(lambda t: overwrite(t.segment(1), 0, bytes(600)), LOSS),
    "a segment's end": Kind(lambda t: t.randomize(int(t.segment(0.5).name) - 3000, 3000), LOSS),
    "a segment of zeros": Kind(lambda t: _zero_file(t.segment(0.5)), LOSS),
    "a segment of random bytes": Kind(lambda t: t.randomize_file(t.segment(0.5)), LOSS),
    "a middle segment missing": Kind(lambda t: _remove(t.segment(0.5)), LOSS),
    "the first segment missing": Kind(lambda t: _remove(t.segment(0)), LOSS),
    "the last segment missing": Kind(lambda t: _remove(t.segment(1)), LOSS),
    "the last two segments missing": Kind(lambda t: _remove(*segments(t.path)[-2:]), LOSS),
    "the last two segments missing, no checkpoint": Kind(lambda t: _remove(*segments(t.path)[-2:], t.checkpoint), LOSS),
    "all but the first segment missing": Kind(lambda t: _remove(*segments(t.path)[1:]), LOSS),
    "all but the last segment missing": Kind(lambda t: _remove(*segments(t.path)[:-1]), LOSS),
    "all segments missing": Kind(lambda t: _remove(*segments(t.path)), LOSS),
    "a segment too long": Kind(lambda t: t.lengthen(t.segment(0.5), 1000)),
    "the last segment too long": Kind(lambda t: t.lengthen(t.segment(1), 1000)),
    "all segments too long": Kind(lambda t: [t.lengthen(file, 1000) for file in segments(t.path)]),
    "a segment too short": Kind(lambda t: _shorten(t.segment(0.5), 20_000), LOSS),
    "the last segment too short": Kind(lambda t: os.truncate(t.segment(1), 5000), LOSS),
    "all segments too short": Kind(lambda t: [_shorten(file, 3000) for file in segments(t.path)], LOSS),
    "a segment empty": Kind(lambda t: os.truncate(t.segment(0.5), 0), LOSS),
    "the last segment empty": Kind(lambda t: os.truncate(t.segment(1), 0), LOSS),
    "a byte inserted": Kind(lambda t: t.splice(t.record(0.4), 0, b"\x01"), LOSS),
    "a byte inserted near the end": Kind(lambda t: t.splice(t.record(0.97), 0, b"\x01"), LOSS),
    "a byte deleted": Kind(lambda t: t.splice(t.record(0.4), 1, b""), LOSS),
    "a byte deleted near the end": Kind(lambda t: t.splice(t.record(0.97), 1, b""), LOSS),
    # names of segments
    "all segments with the name of the next one": Kind(
        lambda t: [_rename(file, int(file.name) + t.made.segment_bytes) for file in reversed(segments(t.path))],
        may_refuse=True,
    ),
    "segments numbered 0, 1, 2": Kind(
        lambda t: [_rename(file, number) for number, file in enumerate(segments(t.path))], may_refuse=True
    ),
    "two segments with each other's names": Kind(lambda t: _rotate(t.segment(0.3), t.segment(0.6)), may_refuse=True),
    "first and last segment with each other's names": Kind(
        lambda t: _rotate(t.segment(0), t.segment(1)), may_refuse=True
    ),
    "two segments with each other's names, one of zeros": Kind(
        lambda t: (_zero_file(t.segment(0.3)), _rotate(t.segment(0.3), t.segment(1))), LOSS, may_refuse=True
    ),
    "three segments with each other's names": Kind(lambda t: _rotate(*segments(t.path)[1:4]), may_refuse=True),
    "a segment with a name far behind": Kind(lambda t: _rename(t.segment(0.5), FAR), may_refuse=True),
    "a segment with a name between two": Kind(
        lambda t: _rename(t.segment(0.5), int(t.segment(0.5).name) + 20), may_refuse=True
    ),
    "wrong names and one missing": Kind(
        lambda t: (_remove(segments(t.path)[3]), _rotate(*segments(t.path)[1:3])), LOSS, may_refuse=True
    ),
    "a segment twice": Kind(
        lambda t: shutil.copy(t.segment(0.4), t.segment(1).with_name(f"{FAR:020d}")), may_refuse=True
    ),
    "stale segments behind the end": Kind(lambda t: t.add_stale_segments(), may_refuse=True),
    "a segment copied over the next one": Kind(lambda t: shutil.copy(*segments(t.path)[2:4]), LOSS),
    "a segment copied over the last one": Kind(lambda t: shutil.copy(t.segment(0.3), t.segment(1)), LOSS),
    "a segment in the place of another": Kind(lambda t: shutil.copy(t.segment(0.3), t.segment(0.6)), LOSS),
    # segments in the wrong file
    "two segments in one file": Kind(lambda t: _concatenate(*segments(t.path)[2:4]), may_refuse=True),
    "three segments in one file": Kind(lambda t: _concatenate(*segments(t.path)[1:4]), may_refuse=True),
    "the last two segments in one file": Kind(lambda t: _concatenate(*segments(t.path)[-2:]), may_refuse=True),
    "two distant segments in one file": Kind(
        lambda t: _concatenate(segments(t.path)[3], segments(t.path)[1]), may_refuse=True
    ),
    "two segments in one file, the second cut short": Kind(
        lambda t: (_concatenate(*segments(t.path)[2:4]), _shorten(segments(t.path)[2], 20_000)), LOSS, may_refuse=True
    ),
    "a second copy of a segment in one file": Kind(
        lambda t: _append(t.segment(0.3), t.segment(0.5).read_bytes()), may_find_more=True
    ),
    # queues
    "files of one queue gone": Kind(lambda t: _remove(t.queue_file(0.5).parent)),
    "files of one topic gone": Kind(lambda t: _remove(t.queue_file(0.5).parent.parent)),
    "files of all queues gone": Kind(lambda t: _remove(t.path / "consumequeue")),
    "a queue's first file gone": Kind(lambda t: _remove(min(t.queue_file(0.5).parent.iterdir()))),
    "a queue's middle file gone": Kind(lambda t: _remove(sorted(t.queue_file(0.5).parent.iterdir())[1])),
    "a queue's last file gone": Kind(lambda t: _remove(max(t.queue_file(0.5).parent.iterdir()))),
    "a queue's file short": Kind(lambda t: _shorten(t.queue_file(0.5), 110)),
    "a queue's last file short": Kind(lambda t: os.truncate(t.queue_file(1), 30)),
    "a queue's file of zeros": Kind(lambda t: _zero_file(t.queue_file(0.5))),
    "a queue's file of random bytes": Kind(lambda t: t.randomize_file(t.queue_file(0.5))),
    "place in a unit": Kind(lambda t: flip(t.queue_file(0.5), 20 * 5 + 6)),
    "size in a unit": Kind(lambda t: flip(t.queue_file(0.5), 20 * 5 + 11)),
    "tags code in a unit": Kind(lambda t: flip(t.queue_file(0.5), 20 * 5 + 19)),
    "a unit of zeros": Kind(lambda t: overwrite(t.queue_file(0.5), 20 * 5, bytes(20))),
    "two files of queues with each other's names": Kind(lambda t: _rotate(t.queue_file(0), t.queue_file(1))),
    # index, checkpoint, abort, config
    "index gone": Kind(lambda t: _remove(t.path / "index")),
    "an index file gone": Kind(lambda t: _remove(t.index[0])),
    "an index file of random bytes": Kind(lambda t: t.randomize_file(t.index[0])),
    "the last index file of random bytes": Kind(lambda t: t.randomize_file(t.index[-1])),
    "an index file short": Kind(lambda t: _shorten(t.index[0], 100)),
    "checkpoint gone": Kind(lambda t: _remove(t.checkpoint)),
    "checkpoint of zeros": Kind(lambda t: _zero_file(t.checkpoint)),
    "checkpoint of random bytes": Kind(lambda t: t.randomize_file(t.checkpoint)),
    "checkpoint short": Kind(lambda t: os.truncate(t.checkpoint, 50)),
    "another abort mark": Kind(lambda t: t.abort.write_text("1")),
    "no abort mark, or an empty one": Kind(
        lambda t: t.abort.unlink() if t.abort.exists() else t.abort.write_bytes(b"")
    ),
    "topics.json damaged": Kind(lambda t: (t.path / "config" / "topics.json").write_text("{"), may_find_more=True),
    "topics.json of zeros": Kind(lambda t: _zero_file(t.path / "config" / "topics.json"), may_find_more=True),
    "all gone but the log": Kind(
        lambda t: _remove(*(t.path / name for name in ("consumequeue", "index", "checkpoint", "config")))
    ),
    "queues of another store": Kind(lambda t: t.take_from_other("consumequeue"), may_find_more=True),
    "index of another store": Kind(lambda t: t.take_from_other("index")),
    "checkpoint of another store": Kind(lambda t: t.take_from_other("checkpoint"), may_find_more=True),
    "queues, index and checkpoint of another store": Kind(
        lambda t: t.take_from_other("consumequeue", "index", "checkpoint"), may_find_more=True
    ),
    # several
    "body in the middle, no checkpoint": Kind(lambda t: (t.flip(t.record(0.4).body_at), _remove(t.checkpoint)), LOSS),
    "body in the middle, no queues": Kind(
        lambda t: (t.flip(t.record(0.4).body_at), _remove(t.path / "consumequeue")), LOSS
    ),
    "a block of zeros, a segment missing, a queue gone": Kind(
        lambda t: (
            t.zero(t.record(0.2).start, BLOCK),
            _remove(t.segment(0.6)),
            _remove(t.queue_file(0.5).parent),
        ),
        LOSS,
    ),
}


def _bytes_of(target: Target, record: Record) -> bytes:
    base = record.start // target.made.segment_bytes * target.made.segment_bytes
    file = target.made.path / "commitlog" / f"{base:020d}"
    return file.read_bytes()[record.start - base : record.end - base]
