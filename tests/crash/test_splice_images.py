"""Power cuts around splices: of each one all is there or nothing, and a second try completes it (spark#splice).

A seeded script puts, splices, gives splices up half-way, leaves bundles in the inbox, dispatches, is closed and killed;
`recording` notes every page and name. Each seed then picks a moment of one script and a subset of what was not synced
by then, and asks of the image:

    a reader that comes before recovery sees no record of a splice that recovery will take back
    after recovery the log holds a prefix of what was stored; of a splice all or nothing; what was promised is there
    bundles that were in the inbox durably are in the log, once
    splicing everything again adds what is missing, once, and says "already" of the rest
    recovery may be cut short itself, and ends the same

`make crash N=100000` runs more of them; MQSTORE_CRASH_SEED=n runs one.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mqstore import Profile
from mqstore.errors import MQStoreError
from tests.crash.campaign import Campaign
from tests.crash.recording import Event, RecordingFileSystem, build_image
from tests.crash.support import QUEUES, cut_short, open_store
from tests.log.splicesupport import Row, bundle, stage
from tests.log.support import kill

Splice = tuple[str, int]


@dataclass
class Script:
    """A run that was recorded. `stored`: bodies in log order; `splices`: the bodies of each, and its shards.

    Marks: ("flushed", n) the first n of `stored` are promised, ("waiting", splice) its bundle is promised."""

    profile: Profile
    events: list[Event]
    stored: list[bytes] = field(default_factory=list)
    splices: dict[Splice, tuple[list[bytes], list[Path]]] = field(default_factory=dict)
    bundles: set[Splice] = field(default_factory=set)


class GivenUpError(Exception):
    pass


def _leave_bundle(fs: RecordingFileSystem, source: Path, target: Path) -> None:
    """Move a bundle into the inbox as a writer in another process does, every step recorded."""
    inbox = target.parent
    fs.mkdir(inbox, exist_ok=True)
    fs.sync_directory(inbox.parent)
    making = inbox / f"_{target.name}"
    fs.mkdir(making)
    for folder, folders, names in os.walk(source):
        here = making / os.path.relpath(folder, source)
        here = making if folder == str(source) else here
        for name in sorted(folders):
            fs.mkdir(here / name)
        for name in sorted(names):
            fd = fs.open(here / name, os.O_RDWR | os.O_CREAT)
            fs.pwrite(fd, Path(folder, name).read_bytes(), 0)
            fs.fdatasync(fd)
            fs.close(fd)
    for folder, _, _ in os.walk(making):
        fs.sync_directory(folder)
    fs.replace(making, target)
    fs.sync_directory(inbox)


def run_script(seed: int, root: Path, fs: RecordingFileSystem) -> Script:
    rng = random.Random(f"splice {seed}")
    aside = root.parent.with_name(f"aside-{root.parent.name}")  # the shards outlive the script
    script = Script(rng.choice(("mqstore", "mqstore", "rocketmq")), fs.events)
    store = open_store(root, "rw", script.profile, fs)
    count = now_ms = 0

    def rows(most: int) -> list[Row]:
        nonlocal count
        made = []
        for _ in range(rng.randrange(1, most)):
            topic, queue_id = rng.choice(QUEUES)
            made.append(Row(b"%06d" % count + rng.randbytes(rng.choice((0, 50, 300, 3000))), topic, queue_id))
            count += 1
        return made

    for step in range(rng.randrange(8, 22)):
        what = rng.random()
        if what < 0.3:
            for row in rows(4):
                store.put(row.topic, row.body, row.queue_id)
                script.stored.append(row.body)
        elif what < 0.65:
            key = (rng.choice("ab"), step)
            parts = [rows(12) for _ in range(rng.randrange(1, 3))]
            shards = [stage(aside / f"{step}-{i}", part, script.profile) for i, part in enumerate(parts)]
            bodies = [row.body for part in parts for row in part]
            total = 2 * sum((shard / "records.bin").stat().st_size for shard in shards)
            if rng.random() < 0.25:

                def give_up(done: int, _: int, total: int = total) -> None:
                    if done >= total * 3 // 4:
                        raise GivenUpError

                with pytest.raises(GivenUpError):
                    store.splice(shards, app=key[0], version=key[1], progress=give_up)
            else:
                if rng.random() < 0.3:  # by way of the inbox
                    source = bundle(aside, "i", step, parts, profile=script.profile)
                    key = ("i", step)
                    script.bundles.add(key)
                    script.splices[key] = bodies, [source / name for name in sorted(os.listdir(source)) if "-" in name]
                    _leave_bundle(fs, source, root / "inbox" / source.name)
                    fs.mark(("waiting", key))
                    store.take_inbox()
                else:
                    script.splices[key] = bodies, shards
                    store.splice(shards, app=key[0], version=key[1])
                script.stored += bodies
                fs.mark(("flushed", len(script.stored)))
        elif what < 0.75:
            store.dispatch()
        elif what < 0.82:
            now_ms += rng.choice((1100, 11_000))
            store.run_once(now_ms)
        elif what < 0.9:
            store.close()
            fs.mark(("flushed", len(script.stored)))
            store = open_store(root, "rw", script.profile, fs)
        else:
            fs.observe()
            kill(store)
            store = open_store(root, "rw", script.profile, fs)
            fs.mark(("flushed", len(script.stored)))
    kill(store)
    return script


CAMPAIGN = Campaign("test_splice_images.py", run_script, images=40, chunk=10, images_a_script=10)


def held(store: Any) -> list[bytes]:
    """The bodies in log order, the numbers of each queue looked at on the way."""
    found = []
    for topic, queue_id in QUEUES:
        try:
            _, high = store.offsets(topic, queue_id)
        except LookupError:
            continue
        messages = store.read(topic, queue_id, 0, 10_000) if high else []
        assert [message.offset for message in messages] == list(range(high)), f"{topic}/{queue_id} has holes"
        found += [(message.physical_offset, bytes(message.body)) for message in messages]
    return [body for _, body in sorted(found)]


def visible(store: Any) -> set[bytes]:
    """What a reader finds before any recovery."""
    found: set[bytes] = set()
    for topic, queue_id in QUEUES:
        try:
            low, high = store.offsets(topic, queue_id)
        except LookupError:
            continue
        while low < high and (messages := store.read(topic, queue_id, low, 100)):
            found |= {bytes(message.body) for message in messages}
            low = messages[-1].offset + 1
    return found


def check_recovered(store: Any, script: Script, flushed: int, waiting: set[Splice]) -> list[bytes]:
    kinds = {finding.kind for finding in store.recovery.findings}
    assert kinds <= {"unfinished_splice"}, store.recovery.findings
    found = held(store)
    assert len(set(found)) == len(found), "something is there twice"
    same = next((i for i, (a, b) in enumerate(zip(found, script.stored, strict=False)) if a != b), None)
    prefix = found[: same if same is not None else min(len(found), len(script.stored))]
    assert len(prefix) >= flushed, f"{flushed} were promised, {len(prefix)} are there"
    behind = found[len(prefix) :]  # what opening took from the inbox, behind a tail that was lost
    for key in sorted(script.bundles, key=lambda key: key[1]):
        bodies = script.splices[key][0]
        if behind[: len(bodies)] == bodies:
            behind = behind[len(bodies) :]
    assert not behind, "the log is no prefix of what was stored"
    for key, (bodies, _) in script.splices.items():
        there = sum(body in found for body in bodies)
        assert there in (0, len(bodies)), f"{there} of {len(bodies)} records of {key}"
        assert there or key not in waiting, f"the bundle {key} is gone"
    return found


def check_image(script: Script, rng: random.Random, image: Path) -> None:
    moment = rng.randrange(1, len(script.events) + 1)
    steps = [i for i, event in enumerate(script.events) if event.kind == "names" and "txn.json" in str(event.operands)]
    if steps and rng.random() < 0.5:  # around the steps of a protocol
        moment = min(len(script.events), rng.choice(steps) + rng.randrange(-3, 9))
    killed = rng.random() < 0.3
    in_order = script.profile == "rocketmq"
    luck = 1.0 if killed else None
    marks = build_image(script.events[:moment], rng, image, in_order=in_order and not killed, luck=luck)
    flushed = max((n for kind, n in marks if kind == "flushed"), default=0)
    waiting = {key for kind, key in marks if kind == "waiting"}
    seen: set[bytes] = set()
    try:
        with open_store(image, "r", script.profile) as reader:
            seen = visible(reader)
    except MQStoreError:
        pass  # not there yet, or not created to the end

    source = cut_short(image, rng, script.profile, in_order=in_order)

    with open_store(image, "rw", script.profile) as store:
        found = check_recovered(store, script, flushed, waiting)
        assert seen <= set(found), "a reader saw what was taken back"
    with open_store(source, "rw", script.profile) as store:
        if source is not image:
            assert check_recovered(store, script, flushed, waiting) == found, "an interrupted recovery ends differently"
        for (app, version), (bodies, shards) in script.splices.items():
            result = store.splice(shards, app=app, version=version)
            assert result.already == (bodies[0] in found), (app, version)
        again = held(store)
        missing = [body for bodies, _ in script.splices.values() for body in bodies if body not in found]
        assert again == found + missing
        store.put(*QUEUES[0][:1], b"afterwards", QUEUES[0][1])
    with open_store(source, "rw", script.profile) as store:
        assert not store.recovery.changed
        assert len(held(store)) == len(again) + 1
    with open_store(source, "r", script.profile) as store:
        assert list(store.verify()) == []


@pytest.mark.parametrize("first", CAMPAIGN.chunks())
def test_power_cut_keeps_all_or_nothing_of_a_splice(tmp_path: Path, first: int) -> None:
    CAMPAIGN.run(first, check_image, tmp_path)
