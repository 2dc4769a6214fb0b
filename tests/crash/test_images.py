"""Power cuts and kills: every directory that a crash may leave is opened, recovered and held against what was
acknowledged.

A seeded script puts, flushes, rolls, drops, closes, is killed, and goes on; `recording` notes every page and name. Each
seed then picks a moment of one script and a subset of what was not synced by then, and asks of the image:

    reliability#p1  what was acknowledged as flushed is there
    reliability#p2  what is there is a prefix of the log: no hole, no later record without an earlier one. After a kill
                    each put that returned is there
    reliability#p6  a reader never meets a part of a record, before recovery nor after
    reliability#p7  recovery may be cut short itself, and ends the same; a second one changes nothing

In profile `rocketmq` no checksum covers topic and properties (format#checksum): a record of which a power cut took
only these is taken for whole, there as in the Java broker. Its images therefore lose bytes in the order of writing.

`make crash N=100000` runs more of them; MQSTORE_CRASH_SEED=n runs one.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mqstore import Profile
from mqstore.errors import MQStoreError
from mqstore.layout import checkpoint
from tests.crash.campaign import Campaign
from tests.crash.recording import Event, RecordingFileSystem, build_image, crash_point
from tests.crash.support import QUEUES, cut_short, open_store
from tests.log.support import kill


@dataclass(frozen=True)
class Put:
    """What the model knows of a message."""

    topic: str
    queue_id: int
    offset: int
    physical_offset: int
    end: int
    body: bytes
    key: str


@dataclass
class Script:
    """A run that was recorded. Marks in `events`: ("put", n) the n-th put returned, ("flushed", n) the first n puts are
    promised to be on disk, ("dropping", p) retention may now have taken what lies below p, ("short", b) another program
    has left the last segment short, or (b is False) it is whole again."""

    profile: Profile
    events: list[Event]
    puts: list[Put] = field(default_factory=list)


def run_script(seed: int, root: Path, fs: RecordingFileSystem) -> Script:
    # In half of the scripts all but the smallest batches are written by a call, in the others none is.
    with mock.patch("mqstore.log.commitlog._CALL_BYTES", 500 if seed % 2 else 1 << 40):
        return _run_script(seed, root, fs)


def _run_script(seed: int, root: Path, fs: RecordingFileSystem) -> Script:
    rng = random.Random(seed)
    script = Script(rng.choice(("mqstore", "mqstore", "rocketmq")), fs.events)
    puts = script.puts
    store = open_store(root, "rw", script.profile, fs)
    now_ms = 0

    def queue() -> tuple[str, int]:
        """The last queue gets none of the later puts, so that retention may take all of its records."""
        return rng.choice(QUEUES if len(puts) < 8 else QUEUES[:-1])

    def one(durable: bool) -> None:
        topic, queue_id = queue()
        body = rng.randbytes(rng.choice((0, 10, 100, 100, 700, 3000)))
        key = f"k{len(puts)}"
        receipt = store.put(topic, body, queue_id, keys=key, tag="t", durability="flush" if durable else None)
        position = receipt.physical_offset
        puts.append(Put(topic, queue_id, receipt.offset, position, position + receipt.size, body, key))

    for _ in range(rng.randrange(20, 60)):
        step = rng.random()
        if step < 0.45:
            one(durable=False)
        elif step < 0.6:
            one(durable=True)
            fs.mark(("flushed", len(puts)))
        elif step < 0.66:
            topic, queue_id = queue()
            most = rng.choice((300, 6000))  # or several segments at once
            bodies = [rng.randbytes(rng.randrange(most)) for _ in range(rng.randrange(1, 8))]
            for body, receipt in zip(bodies, store.put_many(topic, bodies, queue_id), strict=True):
                position = receipt.physical_offset
                puts.append(Put(topic, queue_id, receipt.offset, position, position + receipt.size, body, ""))
        elif step < 0.74:
            store.dispatch()
        elif step < 0.84:
            now_ms += rng.choice((400, 1100, 11_000))
            store.run_once(now_ms)
        elif step < 0.88:
            store.flush()
            fs.mark(("flushed", len(puts)))
        elif step < 0.92:
            store.flush()
            store.dispatch()
            fs.mark(("flushed", len(puts)))
            bound = rng.choice([store.max_offset, *(put.physical_offset for put in puts)])
            fs.mark(("dropping", bound))
            store.drop_before(bound)
        elif step < 0.96:
            store.close()
            fs.mark(("flushed", len(puts)))
            store = open_store(root, "rw", script.profile, fs)
        else:
            fs.observe()
            end = store.max_offset
            kill(store)
            if rng.random() < 0.5 and (files := sorted((root / "commitlog").glob("0*"))):
                fs.mark(("short", True))
                fs.shorten(files[-1], end - int(files[-1].name))  # as a Java broker leaves it that died
            store = open_store(root, "rw", script.profile, fs)
            fs.mark(("short", False))
            assert store.max_offset >= max((put.end for put in puts), default=0), "kill -9 lost a put"
            fs.mark(("flushed", len(puts)))  # what recovery has found counts as durable from then on
        fs.mark(("put", len(puts)))
    if rng.random() < 0.5:
        store.close()
        fs.mark(("flushed", len(puts)))
    else:
        kill(store)
    return script


CAMPAIGN = Campaign("test_images.py", run_script, images=48, chunk=12, images_a_script=12)


def contents(store: Any, puts: list[Put], *, gaps: bool = False) -> list[Put]:
    """The messages that the queues of `store` show, each held against the model, in log order. Before recovery there
    may be `gaps`: a reader passes over records that a power cut took when later ones can be read (format#readers)."""
    by_place = {(put.topic, put.queue_id, put.offset): put for put in puts}
    found = []
    for topic, queue_id in QUEUES:
        try:
            low, high = store.offsets(topic, queue_id)
        except LookupError:
            continue
        position = low
        while position < high:
            messages = store.read(topic, queue_id, position, 100)
            if not messages:
                break
            for message in messages:
                assert message.offset == position or gaps, f"{topic}/{queue_id}: {position} is missing"
                position = message.offset
                put = by_place[topic, queue_id, position]
                assert message.body == put.body
                assert message.physical_offset == put.physical_offset
                found.append(put)
                position += 1
    return sorted(found, key=lambda put: put.physical_offset)


def check_recovered(store: Any, puts: list[Put], flushed: int, dropping: int, allowed: Container[str]) -> list[Put]:
    """reliability#p1, reliability#p2, reliability#p6 of a store that was just opened; what it holds. Kinds of damage
    that are `allowed` come from other programs."""
    assert [finding for finding in store.recovery.findings if finding.kind not in allowed] == [], "it is no damage"
    first, end = store.min_offset, store.max_offset
    wanted = [put for put in puts if first <= put.physical_offset and put.end <= end]
    promised = [put for put in puts[:flushed] if put.physical_offset >= dropping]
    found = contents(store, puts)
    assert found == wanted, "the queues do not show the log, or the log has a hole"
    lost = [put for put in promised if put.physical_offset >= first and put.end > end]
    assert not lost, f"{len(lost)} acknowledged messages are gone, the first at {lost[0].physical_offset} of {end}"
    assert first <= max(dropping, 0), f"the log begins at {first}, but only what is below {dropping} was let go"
    for put in wanted:
        if put.key:
            hits = [message.physical_offset for message in store.find(put.topic, key=put.key)]
            assert hits == [put.physical_offset], f"key {put.key}"
    for topic, queue_id in QUEUES:
        mine = [put for put in puts if (put.topic, put.queue_id) == (topic, queue_id) and put.end <= end]
        if mine:
            assert store.offsets(topic, queue_id)[1] == len(mine)
    return found


def check_image(script: Script, rng: random.Random, image: Path) -> None:
    moment = crash_point(script.events, rng)
    killed = rng.random() < 0.3
    in_order = script.profile == "rocketmq"
    luck = 1.0 if killed else None
    marks = build_image(script.events[:moment], rng, image, in_order=in_order and not killed, luck=luck)
    kept = ("flushed", "put") if killed else ("flushed",)
    flushed = max((n for kind, n in marks if kind in kept), default=0)
    dropping = max((n for kind, n in marks if kind == "dropping"), default=0)

    was_short = [marked for kind, marked in marks if kind == "short"][-1:] == [True]
    allowed = ("segment_size",) if was_short else ()
    if not was_short:
        sizes = {path.stat().st_size for path in image.glob("commitlog/0*")}
        assert sizes <= {8192}, "RocketMQ opens no segment that is short"
    queue_sizes = {path.stat().st_size for path in image.glob("consumequeue/*/*/0*")}
    assert queue_sizes <= {0, 320}, "RocketMQ opens no queue file that is short"

    # A reader comes before any writer has mended it.
    try:
        with open_store(image, "r", script.profile) as reader:
            contents(reader, script.puts, gaps=True)
    except MQStoreError:
        pass  # not there yet, or not created to the end

    source = cut_short(image, rng, script.profile, in_order=in_order)

    with open_store(image, "rw", script.profile) as store:
        held = check_recovered(store, script.puts, flushed, dropping, allowed)
        assert list(store.verify()) == []
        end = store.max_offset
    if source is not image:
        with open_store(source, "rw", script.profile) as store:
            again = check_recovered(store, script.puts, flushed, dropping, allowed)
            assert (again, store.max_offset) == (held, end), "an interrupted recovery ends differently"

    with open_store(source, "rw", script.profile) as store:
        assert store.recovery.scanned_from is None
        assert not store.recovery.changed, "a second recovery found something to do"
        assert contents(store, script.puts) == held
        topic, queue_id = rng.choice(QUEUES)
        here = [put for put in held if (put.topic, put.queue_id) == (topic, queue_id)]
        receipt = store.put(topic, b"afterwards", queue_id)
        if here:
            assert receipt.offset == here[-1].offset + 1
        [message] = store.read(topic, queue_id, receipt.offset)
        assert message.body == b"afterwards"
    with open_store(source, "r", script.profile) as store:
        assert list(store.verify()) == []


@pytest.mark.parametrize("first", CAMPAIGN.chunks())
def test_power_cut_recovers_a_prefix_with_all_promised(tmp_path: Path, first: int) -> None:
    CAMPAIGN.run(first, check_image, tmp_path)


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
@pytest.mark.parametrize("killed_at", range(4))
def test_store_whose_creator_was_killed_keeps_what_it_flushes(tmp_path: Path, profile: Profile, killed_at: int) -> None:
    """The creator is killed before one of its syncs of a folder: the next process finds all names, not all durable."""
    (tmp_path / "store").mkdir()
    fs = RecordingFileSystem(tmp_path / "store")
    syncs = iter([fs.sync_directory] * killed_at)
    with mock.patch.object(fs, "sync_directory", lambda path: next(syncs)(path)), pytest.raises(StopIteration):
        open_store(tmp_path / "store", "rw", profile, fs)
    with open_store(tmp_path / "store", "rw", profile, fs) as store:
        store.put("t", b"1", 0, durability="flush")
        build_image(fs.events, random.Random(1), tmp_path / "image", luck=0)
    with open_store(tmp_path / "image", "rw", profile) as store:
        assert [message.body for message in store.iter("t")] == [b"1"]


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
@pytest.mark.parametrize("change", ["retention", "torn tail", "short segment"])
def test_power_cut_while_segments_change_is_no_damage(tmp_path: Path, profile: Profile, change: str) -> None:
    """At each moment, with any of the names and lengths that were not synced. The campaign above seldom meets these."""
    root = tmp_path / "store"
    root.mkdir()
    fs = RecordingFileSystem(root)
    store = open_store(root, "rw", profile, fs)
    for n in range(0 if change == "short segment" else 10):  # two to a segment
        store.put("t", b"body" * 700, 0, durability="append" if n else "flush")
    first = len(fs.events)
    if change == "retention":
        store.flush()
        store.dispatch()
        first = len(fs.events)
        store.drop_before(store.max_offset)
    else:  # opened again after a power cut, or when another program has left its only file short
        kill(store)
        fs.dispose()
        if change == "torn tail":
            sorted((root / "commitlog").glob("0*"))[1].write_bytes(bytes(8192))
        else:
            (root / "commitlog" / f"{0:020}").write_bytes(bytes(7000))
        fs = RecordingFileSystem(root)
        first = len(fs.events)
        store = open_store(root, "rw", profile, fs)
    fs.mark("done")
    kill(store)
    fs.dispose()
    moments = [n + 1 for n in range(first, len(fs.events)) if fs.events[n].kind != "write"]
    for moment in moments:
        for luck in (0, 0.5, 0.7):
            image = tmp_path / f"image-{moment}-{luck}"
            if build_image(fs.events[:moment], random.Random(f"{moment} {luck}"), image, luck=luck):
                assert {path.stat().st_size for path in image.glob("commitlog/0*")} == {8192}, "RocketMQ refuses others"
            with open_store(image, "rw", profile) as store:
                assert change == "short segment" or not store.recovery.findings
                assert change != "retention" or store.offsets("t")[1] == 10, "what follows a gap is lost"
            shutil.rmtree(image)


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_units_of_a_checkpoint_survive_with_names_and_lengths(tmp_path: Path, profile: Profile) -> None:
    """New files of a queue, and its folders, have no sync of their own: they follow before the checkpoint that counts
    their units, or a reader of the store would miss messages that no opening rebuilds."""
    root = tmp_path / "store"
    root.mkdir()
    fs = RecordingFileSystem(root)
    store = open_store(root, "rw", profile, fs)
    store.run_once(0)
    for step, count in enumerate((1, 17, 40)):  # a first file; a second one; a deleted topic's folder is made again
        if step == 2:
            store.delete_topics(["orders"])
        for n in range(count):
            store.put("orders", b"", 0, keys=f"{step}-{n}", durability="flush")
        store.put("clicks", b"", step)
        store.flush()
        store.dispatch()
        store.run_once((step + 1) * 20_000)
        image = tmp_path / f"image-{step}"
        build_image(fs.events, random.Random(step), image, luck=0)
        saved = checkpoint.decode((image / "checkpoint").read_bytes())
        assert saved.dispatched == store.max_offset
        for file in [*root.glob("consumequeue/*/*/*"), *root.glob("index/*")]:
            assert (image / file.relative_to(root)).read_bytes() == file.read_bytes(), file
    kill(store)
    fs.dispose()
