"""Records of many messages as one piece of bytes: what answers of a server contain."""

from __future__ import annotations

import mmap
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import Message
from mqstore.log import message as module
from mqstore.log.message import records_of
from tests.log.support import open_store
from tests.without import compiled


def joined(messages: list[Message]) -> bytes:
    return b"".join(message._record_bytes() for message in messages)


@given(st.lists(st.tuples(st.sampled_from("aab"), st.integers(0, 900)), max_size=12), st.integers(0, 3), st.booleans())
def test_records_are_those_of_the_messages_in_turn(
    tmp_path_factory: pytest.TempPathFactory, puts: list[tuple[str, int]], first: int, turned: bool
) -> None:
    """One after the other in the log, with others between, in several segments, backwards."""
    with open_store(tmp_path_factory.mktemp("s")) as store:
        for topic, size in puts:
            store.put(topic, b"x" * size)
        messages = [message for topic in store.topics() for message in store.read(topic)][first:]
        messages = messages[::-1] if turned else messages
        assert bytes(records_of(messages)) == joined(messages)
        with mock.patch.object(module, "kernel", None):
            assert records_of(messages) == joined(messages)


@compiled
def test_records_that_follow_each_other_are_a_view_of_the_segment(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", segment_bytes=1 << 16) as store:
        for topic in ("orders", "orders", "bills", "orders"):
            store.put(topic, b"body", tag=topic)
        together, apart = store.read("orders", 0, 0, 2), store.read("orders", 0, 0)
        view = records_of(together)
        assert isinstance(view, memoryview)
        assert isinstance(view.obj, mmap.mmap)
        assert bytes(view) == joined(together)
        assert type(records_of(apart)) is bytes
        expected = joined(together)
        del together, apart
    assert bytes(view) == expected  # also after the store is closed
