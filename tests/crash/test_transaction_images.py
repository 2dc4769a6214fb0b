"""Power cuts while transactions begin and end (delivery#transactions): whatever a crash leaves is opened and asked.

A seeded script begins, commits, rolls back, lets time pass, saves progress, drops segments, closes, is killed, goes on.
Each seed picks a moment of it and a subset of what was not synced by then (`recording`). Of the image it is asked:

    committed       there at most once; when it was flushed, or after the check that the crash made necessary, once
    rolled back     never there
    neither         not there; if its half was flushed, its producer is asked

The producer answers a check by what had been decided at that moment: that is what a producer's own database says.

MQSTORE_CRASH_IMAGES=n runs more of them; MQSTORE_CRASH_SEED=n runs one.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.halves import CHECK_EVERY_MS, TransactionHandle
from mqstore.broker.names import HALF_TOPIC, OP_TOPIC
from mqstore.broker.parts import Parts
from mqstore.broker.retention import all_pins, oldest_of
from mqstore.broker.transactions import Transactions
from mqstore.log.message import Message
from mqstore.options import Durability
from tests.broker.support import advance, clock_of, new_parts, settle
from tests.crash.campaign import Campaign
from tests.crash.recording import Event, RecordingFileSystem, build_image
from tests.log.support import kill


@dataclass
class Script:
    """A run that was recorded. Marks in `events`: ("begun" | "ending" | "ended", id), ("flushed",): what was begun and
    ended by then is on disk, ("dropping", p): what lies below p may be gone from now on."""

    events: list[Event]
    outcomes: dict[str, str] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    """Of committed messages: physical offset."""


def run_script(seed: int, root: Path, fs: RecordingFileSystem) -> Script:
    rng = random.Random(f"transactions {seed}")
    script = Script(fs.events)
    started: list[TransactionHandle] = []
    parts = new_parts(root, fs=fs, segment_bytes=8192)
    transactions = Transactions(parts, lambda: None)

    def end(handle: TransactionHandle, outcome: Any, durability: Any) -> None:
        script.outcomes[handle.transaction_id] = outcome
        fs.mark(("ending", handle.transaction_id))
        receipt = transactions.end(handle, outcome, durability=durability)
        if receipt is not None:
            script.places[handle.transaction_id] = receipt.physical_offset
        fs.mark(("ended", handle.transaction_id))

    for number in range(rng.randrange(20, 50)):
        step = rng.random()
        durability: Durability | None = rng.choice((None, None, "flush"))
        if step < 0.4:
            body = rng.randbytes(rng.choice((10, 100, 1000)))
            handle = transactions.begin(
                "orders", body, producer_group="p", queue_id=0, unique_key=f"U{number}", durability=durability
            )
            started.append(handle)
            fs.mark(("begun", handle.transaction_id))
        elif step < 0.7 and started:
            end(started.pop(rng.randrange(len(started))), rng.choice(("commit", "commit", "rollback")), durability)
        elif step < 0.8:
            advance(parts, [transactions], rng.choice((1_000, 4_000, 40_000)))
            durability = None
        elif step < 0.88:
            parts.offsets.save()
            durability = None
        elif step < 0.92:
            parts.store.flush()
            durability = "flush"
        elif step < 0.95:
            high = (parts.store.offsets_or_none("orders", 0) or (0, 0))[1]
            parts.offsets.commit("consumers", "orders", 0, high)
            parts.offsets.save()
            pin = oldest_of(all_pins(parts, [transactions]))
            bound = parts.store.max_offset if pin is None else pin.physical_offset
            fs.mark(("dropping", bound))
            parts.store.drop_before(bound)
            durability = None
        else:
            clock = clock_of(parts)
            fs.observe()
            if rng.random() < 0.5:
                transactions.close()
                parts.offsets.close()
                parts.store.close()
            else:
                kill(parts.store)
            parts = new_parts(root, fs=fs, clock=clock)
            transactions = Transactions(parts, lambda: None)
            durability = "flush"  # what recovery has found is on disk from then on
        if durability == "flush":
            fs.mark(("flushed",))
    kill(parts.store)
    return script


CAMPAIGN = Campaign("test_transaction_images.py", run_script, images=40, chunk=20, images_a_script=10)


def visible(parts: Parts) -> Counter[str]:
    """Ids of the messages that a consumer sees, with how often."""
    bounds = parts.store.offsets_or_none("orders", 0)
    if bounds is None:
        return Counter()
    return Counter(message.unique_key for message in parts.store.iter("orders", 0, start=bounds[0]))


def check_image(script: Script, rng: random.Random, image: Path) -> None:
    moment = rng.randrange(1, len(script.events) + 1)
    marks = build_image(script.events[:moment], rng, image)
    ending = {mark[1] for mark in marks if mark[0] == "ending"}
    ended = {mark[1] for mark in marks if mark[0] == "ended"}
    last_flush = max((i for i, mark in enumerate(marks) if mark[0] == "flushed"), default=0)
    on_disk = {kind: {mark[1] for mark in marks[:last_flush] if mark[0] == kind} for kind in ("begun", "ended")}
    dropping = max((mark[1] for mark in marks if mark[0] == "dropping"), default=0)

    def decided(identity: str) -> str:
        return script.outcomes[identity] if identity in ended else "unknown"

    if not (image / "commitlog").exists():
        assert not on_disk["begun"]
        return
    parts = new_parts(image)
    transactions = Transactions(parts, lambda: None)
    there = visible(parts)
    for identity, count in there.items():
        assert count == 1, f"{identity} is there {count} times"
        assert identity in ending, f"{identity} is there, and nobody had committed it"
        assert script.outcomes[identity] == "commit", f"{identity} was rolled back and is there"
    opened = {handle.transaction_id for handle in transactions.open_transactions()}
    for identity in on_disk["begun"] - ending:
        assert identity in opened, f"{identity} was flushed and is forgotten"
    for identity in on_disk["ended"] - there.keys():
        gone = identity in script.places and script.places[identity] < dropping
        assert decided(identity) == "rollback" or gone, f"{identity} was committed, flushed, and is not there"

    asked: set[str] = set()

    def check(message: Message) -> bool | None:
        asked.add(message.unique_key)
        return {"commit": True, "rollback": False, "unknown": None}[decided(message.unique_key)]

    transactions.on_check("p", check)
    advance(parts, [transactions], 2 * CHECK_EVERY_MS)
    after = visible(parts)
    for identity in opened:
        if identity not in there:
            assert identity in asked, f"{identity} is open, and nobody was asked"
            assert after[identity] == (decided(identity) == "commit"), f"{identity}: {decided(identity)}"
    assert max(after.values(), default=1) == 1, f"{after.most_common(1)} is there more than once"
    still = {handle.transaction_id for handle in transactions.open_transactions()}
    assert still == {identity for identity in opened - there.keys() if decided(identity) == "unknown"}

    # A second crash, with progress on disk and without: nothing that is open is passed over, nothing comes back.
    if rng.random() < 0.5:
        parts.offsets.save()
    clock = clock_of(parts)
    kill(parts.store)
    parts = new_parts(image, clock=clock)
    transactions = Transactions(parts, lambda: None)
    assert still <= {handle.transaction_id for handle in transactions.open_transactions()}
    transactions.on_check("p", check)
    settle(parts, [transactions])
    advance(parts, [transactions], 2 * CHECK_EVERY_MS)
    assert visible(parts) == after
    assert {handle.transaction_id for handle in transactions.open_transactions()} == still
    for topic in (HALF_TOPIC, OP_TOPIC):
        assert parts.offsets.committed("CID_RMQ_SYS_TRANS", topic, 0) is not None or not parts.store.offsets_or_none(
            topic, 0
        )
    parts.store.close()


@pytest.mark.parametrize("first", CAMPAIGN.chunks())
def test_after_a_power_cut_no_commit_is_lost_and_nothing_else_is_seen(tmp_path: Path, first: int) -> None:
    CAMPAIGN.run(first, check_image, tmp_path)
