"""What the file says of handlers that had begun, whatever it holds (broker/redelivery/attempt_journal.py)."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

import mqstore

HEAD = {"group": "g", "workers": 2, "cells": 3}


def content(head: object, *cells: int) -> bytes:
    return json.dumps(head).encode().ljust(512, b"\0") + struct.pack(f"<{len(cells)}q", *cells)


def store_with(path: Path, data: bytes) -> tuple[int, ...]:
    """A store with three messages, and a file left behind; where the messages lie in the log."""
    with mqstore.open(path) as store:
        store.create_topic("t", queues=1)
        places = tuple(store.put("t", b"%d" % i).physical_offset for i in range(3))
        store.broker.groups.create("g")
    folder = path / "config" / "begun"
    folder.mkdir(exist_ok=True)
    (folder / "7").write_bytes(data)
    return places


def attempts(path: Path) -> dict[int, int]:
    with mqstore.open(path) as store:
        return store.broker.attempts("g", "t", 0)


NONE = None
"""A cell that names no message; the others have the queue offset of theirs, or are negative."""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((NONE, NONE, NONE), (NONE, NONE, NONE), {}),
        ((0, NONE, NONE), (NONE, NONE, NONE), {0: 1}),
        ((2, NONE, NONE), (NONE, NONE, NONE), {2: 1}),
        ((0, 1, NONE), (2, NONE, NONE), {0: 1, 1: 1, 2: 1}),
        ((2, 0, 1), (NONE, NONE, NONE), {0: 1, 1: 1, 2: 1}),
        ((0, -3, NONE), (NONE, NONE, NONE), {0: 1, 1: 1}),  # and those behind it up to offset 1
        ((1, -4, 0), (2, -2, NONE), {0: 1, 1: 1, 2: 1}),  # none of a queue lies in front of its first
        ((-4, NONE, NONE), (NONE, NONE, NONE), {}),
        ((2, NONE, 1), (NONE, NONE, NONE), {2: 1}),  # the rest is of an earlier call
        ((NONE, 0, 1), (2, NONE, NONE), {2: 1}),  # the job has ended, or a call was just being noted
        ((0, NONE, NONE), (0, NONE, NONE), {0: 1}),
    ],
)
def test_each_message_that_a_worker_had_has_used_an_attempt(
    tmp_path: Path, first: tuple[int | None, ...], second: tuple[int | None, ...], expected: dict[int, int]
) -> None:
    places = store_with(tmp_path, b"")
    cells = [-1 if cell is NONE else places[cell] if cell >= 0 else cell for cell in (*first, *second)]
    (tmp_path / "config" / "begun" / "7").write_bytes(content(HEAD, *cells))

    assert attempts(tmp_path) == expected

    assert not (tmp_path / "config" / "begun" / "7").exists()
    assert attempts(tmp_path) == expected  # counted once


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 512,
        b"no json".ljust(600, b"\0"),
        content([1, 2], 0),
        content({"group": "g"}, 0),
        content(HEAD, *[0] * 5),  # too short
        content({"group": "g", "workers": -1, "cells": 3}, 0, 0, 0),
        content({"group": "g", "workers": "1", "cells": 3}, 0, 0, 0),
        content({"group": "g", "workers": 1, "cells": 0}),
        content({"group": ["g"], "workers": 1, "cells": 1}, 0),
        content({"group": "g", "workers": 1, "cells": 1}, 1),  # no record begins there
        content({"group": "g", "workers": 1, "cells": 3}, -7, 1 << 60, 1),
        content({"group": "another", "workers": 1, "cells": 1}, 0),
    ],
)
def test_a_file_that_says_nothing_of_use_is_removed(tmp_path: Path, data: bytes) -> None:
    store_with(tmp_path, data)

    assert attempts(tmp_path) == {}

    assert list((tmp_path / "config" / "begun").iterdir()) == []


def test_consumed_message_counts_no_attempt(tmp_path: Path) -> None:
    places = store_with(tmp_path, b"")
    with mqstore.open(tmp_path) as store:
        store.broker.commit("g", "t", 0, 2)
    (tmp_path / "config" / "begun" / "7").write_bytes(content(HEAD, places[1], places[2], *[-1] * 4))

    assert attempts(tmp_path) == {2: 1}


def test_a_folder_in_the_place_of_a_file_is_left_alone(tmp_path: Path) -> None:
    store_with(tmp_path, b"")
    (tmp_path / "config" / "begun" / "8").mkdir()
    with mqstore.open(tmp_path) as store:
        for _ in range(2):
            with store.push_consumer("g", workers=1) as consumer:
                consumer.subscribe("t", lambda message: None)
    assert [path.name for path in (tmp_path / "config" / "begun").iterdir()] == ["8"]


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_a_handler_that_hangs_when_its_consumer_stops_has_used_an_attempt(tmp_path: Path, mode: Any) -> None:
    inside, gate = threading.Event(), threading.Event()

    def hang(message: mqstore.Message) -> None:
        inside.set()
        gate.wait(60)

    with mqstore.open(tmp_path) as store:
        store.create_topic("t", queues=1)
        store.put("t", b"")
        consumer = store.push_consumer("g", workers=1, mode=mode)
        consumer.subscribe("t", hang)
        consumer.start()
        assert inside.wait(60)
        assert consumer.stop(0) is False
    try:
        with mqstore.open(tmp_path) as store:
            seen: list[int] = []
            ended = threading.Event()

            def note(message: mqstore.Message) -> None:
                seen.append(message.attempt)
                ended.set()

            with store.push_consumer("g", workers=1, mode=mode) as again:
                again.subscribe("t", note)
                assert ended.wait(60)
            assert seen == [2]
    finally:
        gate.set()
