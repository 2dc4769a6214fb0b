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

from mqstore import Durability, Message
from mqstore.broker.background.retention import all_pins
from mqstore.broker.background.service import oldest_of
from mqstore.broker.tables.names import HALF_TOPIC, OP_TOPIC, QueueKey
from mqstore.broker.transactions.prepared import CHECK_EVERY_MS, TransactionHandle
from mqstore.broker.transactions.service import Transactions
from tests.broker.support import ServiceBench
from tests.crash.campaign import Campaign
from tests.crash.recording import Event, RecordingFileSystem, build_image


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
    bench = ServiceBench(root, Transactions, fs, segment_bytes=8192)

    def end(handle: TransactionHandle, outcome: Any, durability: Any) -> None:
        script.outcomes[handle.transaction_id] = outcome
        fs.mark(("ending", handle.transaction_id))
        receipt = bench.service.end(handle, outcome, durability=durability)
        if receipt is not None:
            script.places[handle.transaction_id] = receipt.physical_offset
        fs.mark(("ended", handle.transaction_id))

    for number in range(rng.randrange(20, 50)):
        step = rng.random()
        durability: Durability | None = rng.choice((None, None, "flush"))
        if step < 0.4:
            body = rng.randbytes(rng.choice((10, 100, 1000)))
            handle = bench.service.begin(
                "orders", body, producer_group="p", queue_id=0, unique_key=f"U{number}", durability=durability
            )
            started.append(handle)
            fs.mark(("begun", handle.transaction_id))
        elif step < 0.7 and started:
            end(started.pop(rng.randrange(len(started))), rng.choice(("commit", "commit", "rollback")), durability)
        elif step < 0.8:
            bench.pass_ms(rng.choice((1_000, 4_000, 40_000)))
            durability = None
        elif step < 0.88:
            bench.parts.offsets.save()
            durability = None
        elif step < 0.92:
            bench.parts.store.flush()
            durability = "flush"
        elif step < 0.95:
            high = (bench.parts.store.offsets_or_none("orders", 0) or (0, 0))[1]
            bench.parts.offsets.commit(QueueKey("consumers", "orders", 0), high)
            bench.parts.offsets.save()
            pin = oldest_of(all_pins(bench.parts, [bench.service]))
            bound = bench.parts.store.max_offset if pin is None else pin.physical_offset
            fs.mark(("dropping", bound))
            bench.parts.store.drop_before(bound)
            durability = None
        else:
            fs.observe()
            bench.reopen(fs, killed=rng.random() >= 0.5)
            durability = "flush"  # what recovery has found is on disk from then on
        if durability == "flush":
            fs.mark(("flushed",))
    bench.kill()
    return script


CAMPAIGN = Campaign("test_transaction_images.py", run_script, images=20, chunk=10, images_a_script=10)


def visible(bench: ServiceBench[Transactions]) -> Counter[str]:
    """Ids of the messages that a consumer sees, with how often."""
    return Counter(message.unique_key for message in bench.messages())


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
    bench = ServiceBench(image, Transactions)
    there = visible(bench)
    for identity, count in there.items():
        assert count == 1, f"{identity} is there {count} times"
        assert identity in ending, f"{identity} is there, and nobody had committed it"
        assert script.outcomes[identity] == "commit", f"{identity} was rolled back and is there"
    opened = {handle.transaction_id for handle in bench.service.open_transactions()}
    for identity in on_disk["begun"] - ending:
        assert identity in opened, f"{identity} was flushed and is forgotten"
    for identity in on_disk["ended"]:
        assert decided(identity) == "commit" or identity not in opened, f"{identity} was rolled back and is open"
    for identity in on_disk["ended"] - there.keys():
        gone = identity in script.places and script.places[identity] < dropping
        assert decided(identity) == "rollback" or gone, f"{identity} was committed, flushed, and is not there"

    asked: set[str] = set()

    def check(message: Message) -> bool | None:
        asked.add(message.unique_key)
        return {"commit": True, "rollback": False, "unknown": None}[decided(message.unique_key)]

    bench.service.on_check("p", check)
    bench.pass_ms(2 * CHECK_EVERY_MS)
    after = visible(bench)
    for identity in opened:
        if identity not in there:
            assert identity in asked, f"{identity} is open, and nobody was asked"
            assert after[identity] == (decided(identity) == "commit"), f"{identity}: {decided(identity)}"
    assert max(after.values(), default=1) == 1, f"{after.most_common(1)} is there more than once"
    still = {handle.transaction_id for handle in bench.service.open_transactions()}
    assert still == {identity for identity in opened - there.keys() if decided(identity) == "unknown"}

    # A second crash, with progress on disk and without: nothing that is open is passed over, nothing comes back.
    if rng.random() < 0.5:
        bench.parts.offsets.save()
    bench.crash()
    assert still <= {handle.transaction_id for handle in bench.service.open_transactions()}
    bench.service.on_check("p", check)
    bench.pass_ms(2 * CHECK_EVERY_MS)
    assert visible(bench) == after
    assert {handle.transaction_id for handle in bench.service.open_transactions()} == still
    there_are = [topic for topic in (HALF_TOPIC, OP_TOPIC) if bench.parts.store.offsets_or_none(topic, 0)]
    assert None not in [bench.parts.offsets.committed(QueueKey("CID_RMQ_SYS_TRANS", topic, 0)) for topic in there_are]
    bench.close()


@pytest.mark.parametrize("first", CAMPAIGN.chunks())
def test_after_a_power_cut_no_commit_is_lost_and_nothing_else_is_seen(tmp_path: Path, first: int) -> None:
    CAMPAIGN.run(first, check_image, tmp_path)
