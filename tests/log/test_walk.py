"""`walk_queue`: every message that can be read, and one finding for each place that cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqstore import Message, OutgoingMessage, SendReceipt, StoreConfig
from mqstore.engine import Finding
from mqstore.log.reading.directory import walk_queue
from mqstore.log.reading.reader import GetResult
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from tests.log.support import flip_log, overwrite

_SEGMENT = 1 << 16
_UNITS = 64

Made = tuple[Path, list[SendReceipt]]


@pytest.fixture
def store(tmp_path: Path) -> Made:
    """1500 messages in one queue, more than a step of the walk, with their receipts."""
    config = StoreConfig(segment_bytes=_SEGMENT, consumequeue_units=_UNITS)
    with MessageStore(tmp_path / "s", config=config) as opened:
        receipts = opened.put_many("orders", [OutgoingMessage(b"%04d" % i) for i in range(1500)])
    return tmp_path / "s", receipts


def write_units(path: Path, offset: int, data: bytes) -> None:
    name = f"{offset // _UNITS * _UNITS * 20:020d}"
    overwrite(path / "consumequeue" / "orders" / "0" / name, offset % _UNITS * 20, data)


def walked(path: Path, *bounds: int | None) -> tuple[list[int], list[Finding]]:
    offsets, findings = [], []
    with ReadOnlyMessageStore(path) as store:
        for item in walk_queue(store, "orders", 0, *bounds):
            if isinstance(item, Message):
                assert item.body == b"%04d" % item.offset
                offsets.append(item.offset)
            else:
                findings.append(item)
    return offsets, findings


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        *[((), range(1500)), ((1490, None), range(1490, 1500)), ((None, 3), range(3))],
        *[((5, 5), []), ((2000, None), []), ((10, 9), [])],
    ],
)
def test_queue_comes_in_order_within_bounds(
    store: Made, bounds: tuple[int | None, int | None], expected: range
) -> None:
    assert walked(store[0], *bounds) == (list(expected), [])


@pytest.mark.parametrize(
    "victims",
    [
        [0],
        [1499],
        [700],
        range(500, 530),
        range(510, 514),
        range(100, 1300),
        range(512),
        range(1500),
        [3, 511, 512, 1024],
    ],
    ids=str,
)
def test_bad_record_is_reported_once(store: Made, victims: range | list[int]) -> None:
    """Wherever it lies: at either end, across the steps of the walk, and whole steps of it."""
    path, receipts = store
    for i in victims:
        flip_log(path, receipts[i].physical_offset + 88)

    offsets, findings = walked(path)

    assert offsets == [i for i in range(1500) if i not in victims]
    assert [(f.kind, f.file, f.position, f.length) for f in findings] == [
        (
            "bad_record",
            f"commitlog/{receipts[i].physical_offset // _SEGMENT * _SEGMENT:020d}",
            receipts[i].physical_offset % _SEGMENT,
            receipts[i].size,
        )
        for i in victims
    ]


def test_missing_segment_is_reported_once(store: Made, caplog: pytest.LogCaptureFixture) -> None:
    """Each of its messages was a record that does not verify, in a file that is not there."""
    path, receipts = store
    (path / "commitlog" / f"{_SEGMENT:020d}").unlink()

    offsets, findings = walked(path)

    kept = [i for i in range(1500) if receipts[i].physical_offset // _SEGMENT != 1]
    assert 0 < len(kept) < 1500
    assert offsets == kept
    assert [(f.kind, f.file) for f in findings] == [("missing_segment", f"commitlog/{_SEGMENT:020d}")]
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("units", "missing", "findings"),
    [
        (
            {60: bytes(4 * 20), 64: bytes(2 * 20)},
            range(60, 66),
            [
                ("missing_units", f"consumequeue/orders/0/{0:020d}", 1200, 80),
                ("missing_units", f"consumequeue/orders/0/{1280:020d}", 0, 40),
            ],
        ),
        ({10: bytes(8) + (0x7FFF_FFFF).to_bytes(4, "big") + bytes(8)}, [10], []),
        (
            {10: (1 << 60).to_bytes(8, "big") + (100).to_bytes(4, "big")},
            [10],
            [("bad_record", f"commitlog/{1 << 60:020d}", 0, 100)],
        ),
    ],
    ids=["zeros", "void", "dangling"],
)
def test_wrong_units_are_reported_by_file(
    store: Made, units: dict[int, bytes], missing: range | list[int], findings: list[tuple[Any, ...]]
) -> None:
    for offset, data in units.items():
        write_units(store[0], offset, data)

    offsets, found = walked(store[0])

    assert offsets == [i for i in range(1500) if i not in missing]
    assert [(f.kind, f.file, f.position, f.length) for f in found] == findings


def test_expired_records_are_not_findings(store: Made) -> None:
    path, receipts = store
    with MessageStore(path) as opened:
        opened.drop_before(receipts[1000].physical_offset)
    first = next(
        i for i in range(1500) if receipts[i].physical_offset >= receipts[1000].physical_offset // _SEGMENT * _SEGMENT
    )

    assert walked(path) == (list(range(first, 1500)), [])
    assert walked(path, 0) == (list(range(first, 1500)), [])


def test_retention_during_a_step_is_no_gap(store: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of units that went between the read and the look at its gaps were reported as missing units."""
    path, receipts = store
    with MessageStore(path) as writer, ReadOnlyMessageStore(path) as reader:
        get = reader.get

        def overtaken(*arguments: Any, **options: Any) -> GetResult:
            found = get(*arguments, **options)
            if not writer.min_offset:
                assert writer.drop_before(receipts[800].physical_offset)
                return found._replace(messages=found.messages[:7])
            return found

        monkeypatch.setattr(reader, "get", overtaken)
        items = list(walk_queue(reader, "orders", 0))
        front, end = writer.offsets("orders", 0)

    assert [item.offset for item in items if isinstance(item, Message)] == [*range(7), *range(front, end)]
    assert [item for item in items if isinstance(item, Finding)] == []
