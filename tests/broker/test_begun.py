"""What the file says of handlers that had begun, whatever it holds (broker/begun.py)."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

import mqstore

HEAD = {"group": "g", "workers": 2, "cells": 6}


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


NOTHING = (-1, -1, -1)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((*NOTHING, *NOTHING), (*NOTHING, *NOTHING), {}),
        (("m0", 0, -1, *NOTHING), (*NOTHING, *NOTHING), {0: 1}),
        (("m2", 0, -1, *NOTHING), (*NOTHING, *NOTHING), {0: 1}),  # any message of the queue tells which queue it is
        (("m0", 0, -1, "m0", 1, -1), (*NOTHING, *NOTHING), {0: 1, 1: 1}),
        (("m0", 1, 2, *NOTHING), (*NOTHING, *NOTHING), {1: 1, 2: 1}),
        (("m0", 2, 1, *NOTHING), (*NOTHING, *NOTHING), {2: 1}),  # the last is of an earlier call
        (("m0", -1, -1, "m0", 1, -1), ("m0", 2, -1, *NOTHING), {2: 1}),  # the job has ended, the rest is of before
        ((*NOTHING, "m0", 1, -1), (*NOTHING, *NOTHING), {}),
        (("m0", 0, -1, *NOTHING), ("m0", 0, -1, *NOTHING), {0: 1}),
    ],
)
def test_each_message_that_a_worker_had_has_used_an_attempt(
    tmp_path: Path, first: tuple[Any, ...], second: tuple[Any, ...], expected: dict[int, int]
) -> None:
    places = store_with(tmp_path, b"")
    cells = [places[int(cell[1])] if isinstance(cell, str) else cell for cell in (*first, *second)]
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
        content(HEAD, *[0] * 11),  # too short
        content({"group": "g", "workers": -1, "cells": 3}, 0, 0, 0),
        content({"group": "g", "workers": "1", "cells": 3}, 0, 0, 0),
        content({"group": "g", "workers": 1, "cells": 2}, 0, 0),
        content({"group": ["g"], "workers": 1, "cells": 3}, 0, 0, 0),
        content({"group": "g", "workers": 1, "cells": 3}, 1, 0, 0),  # no record begins there
        content({"group": "g", "workers": 1, "cells": 6}, -7, 0, 0, 1 << 60, 0, 0),
        content({"group": "another", "workers": 1, "cells": 3}, 0, 0, 0),
    ],
)
def test_a_file_that_says_nothing_of_use_is_removed(tmp_path: Path, data: bytes) -> None:
    store_with(tmp_path, data)

    assert attempts(tmp_path) == {}

    assert list((tmp_path / "config" / "begun").iterdir()) == []


def test_what_the_group_has_consumed_counts_no_attempt(tmp_path: Path) -> None:
    places = store_with(tmp_path, b"")
    with mqstore.open(tmp_path) as store:
        store.broker.commit("g", "t", 0, 2)
    (tmp_path / "config" / "begun" / "7").write_bytes(content(HEAD, places[0], 1, 2, *[-1] * 9))

    assert attempts(tmp_path) == {2: 1}


def test_a_consumer_that_stops_leaves_no_file(tmp_path: Path) -> None:
    with mqstore.open(tmp_path) as store:
        store.create_topic("t")
        with store.push_consumer("g", workers=1) as consumer:
            consumer.subscribe("t", lambda message: None)
            assert len(list((tmp_path / "config" / "begun").iterdir())) == 1
        assert list((tmp_path / "config" / "begun").iterdir()) == []


def test_a_folder_in_the_place_of_a_file_is_left_alone(tmp_path: Path) -> None:
    store_with(tmp_path, b"")
    (tmp_path / "config" / "begun" / "8").mkdir()
    with mqstore.open(tmp_path) as store:
        for _ in range(2):
            with store.push_consumer("g", workers=1) as consumer:
                consumer.subscribe("t", lambda message: None)
    assert [path.name for path in (tmp_path / "config" / "begun").iterdir()] == ["8"]
