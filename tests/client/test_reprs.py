"""Texts of the objects that applications hold: short, without an error, and without a call to a server."""

from __future__ import annotations

import re
from typing import Any

import pytest

import mqstore
from mqstore.remote.connection import Connection
from mqstore.testing import temporary_store

_TEXTS = {
    "store": r"<(Remote)?Store '[^']+' rw>",
    "queue": r"<Queue 'mail to.do' on '[^']+'(: 3 items)?>",
    "task": r"<Task of 'mail to.do'/0, offset 0, attempt 1, leased>",
    "producer": r"<Producer 'p' on '[^']+'>",
    "push": r"<PushConsumer \S+ of group 'push', new>",
    "pull": r"<PullConsumer \S+ of 'pull' for t>",
    "simple": r"<SimpleConsumer \S+ of 'simple' for t>",
    "delivery": r"<Delivery of t/0, offset 0, attempt 1, leased>",
    "receipt": r"SendReceipt\('t', queue_id=0, offset=\d+, physical_offset=\d+, size=\d+, message_id='\w{32}'\)",
    "message": r"Message\('t', queue_id=0, offset=0, body=b'first'\)",
}


def _things(store: mqstore.Store) -> dict[str, Any]:
    store.create_topic("t", queues=1)
    receipt = store.put("t", b"first")
    queue = store.queue("mail to.do")
    queue.put_many([b"1", b"2", b"3"])
    push, pull = store.push_consumer("push"), store.pull_consumer("pull")
    pull.subscribe("t")
    simple = store.simple_consumer("simple", {"t": "*"})
    return {
        "store": store,
        "queue": queue,
        "task": queue.get(),
        "producer": store.producer("p"),
        "push": push,
        "pull": pull,
        "simple": simple,
        "delivery": simple.receive(1, wait=20)[0],
        "receipt": receipt,
        "message": store.read("t", 0, 0)[0],
    }


def _check(objects: dict[str, Any], texts: dict[str, str]) -> None:
    shown = {name: repr(each) for name, each in objects.items()}
    for name, text in shown.items():
        assert re.fullmatch(texts[name], text), text
        assert len(text) < 200


def test_texts_say_name_counts_and_state() -> None:
    with temporary_store() as store:
        objects = _things(store)
        assert objects.keys() == _TEXTS.keys()
        _check(objects, _TEXTS)
        assert ": 3 items" in repr(objects["queue"])
        objects["task"].ack()
        objects["delivery"].reject()
        assert repr(objects["task"]).endswith(", ack>")
        assert repr(objects["delivery"]).endswith(", reject>")
        objects["queue"].shutdown()
        assert repr(objects["queue"]).endswith(": 2 items, shut down>")
    assert all(map(repr, objects.values()))
    assert repr(objects["queue"]).endswith(", closed>")
    assert repr(objects["store"]).endswith(" closed>")


def test_texts_of_a_connection_need_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a call to the server")

    with temporary_store() as store, store.serve("127.0.0.1:0") as server, mqstore.connect(server.address) as client:
        objects = _things(client)
        with monkeypatch.context() as patch:
            for call in ("call", "park", "tell"):
                patch.setattr(Connection, call, refuse)
            _check(objects, _TEXTS)
        assert "items" not in repr(objects["queue"])
        client.close()
        assert all(map(repr, objects.values()))
        assert repr(objects["queue"]).endswith(", closed>")


def test_text_of_a_queue_survives_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with temporary_store() as store:
        queue = store.queue("jobs")
        assert repr(queue) == f"<Queue 'jobs' on {str(store.path)!r}: 0 items>"
        monkeypatch.setattr(type(queue), "qsize", lambda queue: 1 // 0)
        assert repr(queue) == f"<Queue 'jobs' on {str(store.path)!r}>"
