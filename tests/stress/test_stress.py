"""A minute of everything at once: producers, every kind of consumer, on threads and on an event loop, members that come
and go, handlers that fail, hang and raise. In the end nothing is lost, order was kept, nothing came twice that must
not, and nobody is left running. Groups are reset and seek all the while.

For the last third nobody comes or goes any more, and there is more to do than caches hold: a queue that has gone silent
is not restarted by a rebalance then.

What is allowed to come twice: in the groups whose handlers hang, what hung, and of those that consume by offset what
others of its queue got done with behind it: the position stands at what hung, what lies behind it is `max_span` and a
cache at most. No other: who leaves hands over exactly, and
a failed attempt is no success.

When all is done and the dead letters are purged, retention has its turn, and the store is as small as it is to be.

What was overtaken is caught up with for longer than in earnest here, for a busy machine is slow, too. A second, shorter
run has one group whose queues change hands as quickly as in earnest.

MQSTORE_STRESS_SECONDS says for how long messages are sent (3); MQSTORE_STRESS_SEED chooses another run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore import Message
from tests.holding import new_threads, open_files
from tests.waiting import until

SECONDS = float(os.environ.get("MQSTORE_STRESS_SECONDS", "3"))
SEED = int(os.environ.get("MQSTORE_STRESS_SEED", "7"))
SHIPPED_SECONDS = max(1.7, SECONDS / 6)
"""Of these for the group whose queues change hands as quickly as in earnest; the rest for everything at once."""
MAIN_SECONDS = SECONDS - SHIPPED_SECONDS
STILL_S = 60.0
"""So long without a message that is done is a standstill. However slow the machine, it is not that slow."""
BEHIND = 1_500
"""Messages that the slowest group may be behind before producers wait: they are to be equals on any machine."""
ATTEMPTS = 5
RETRY = mqstore.RetryPolicy(max_attempts=ATTEMPTS, delays=[0.05, 0.1])
GROUPS_OF_MESSAGES = 40
POISON = 0.002
"""Share of messages that no handler ever gets done with."""
SLOW_S = 4.0
"""From here on a handler is slow: `consume_timeout`, and how long a queue that is given up catches up. A busy
machine may hold a process, or a thread of it, for a second or two: that is not to look like a handler that hangs."""
MOMENT_S = 0.3
"""Less than any queue that is given up catches up in earnest, by what a machine needs besides."""
MAX_BYTES, SEGMENT_BYTES = 8 << 20, 1 << 20
TOPICS = ("work", "steps")
WANTED = {
    "push": ["work"],
    "batch": ["work"],
    "orderly": ["steps"],
    "poppush": ["work"],
    "popsteps": ["steps"],
    "simple": ["work"],
    "late": ["work"],
    "pull": ["work", "steps"],
    "aio": ["work"],
    "aiosteps": ["steps"],
    "everybody-a": ["work"],
    "everybody-b": ["work"],
    "rewound": ["work"],
    "poprewound": ["work"],
    "seeking": ["work", "steps"],
}
"""Group -> its topics. Of the broadcasting group "everybody" each member is one."""
BY_RECEIPT = ("poppush", "simple", "late")
"""Where what hangs comes again alone."""
REWOUND = ("rewound", "poprewound", "seeking")
"""Set back to what they had already, by an operator or themselves, while they are at work: what comes twice is no fault
there, what does not come is."""
NEVER_FAIL = ("pull", "everybody-a", "everybody-b", *REWOUND)
"""Where there are no retries, nothing fails."""
HANGS = {"push": 0.0005, "poppush": 0.0004, "late": 0.0002}
"""How likely a handler of a group hangs."""
PREFETCH, SPAN = 64, 100
BURST = 2_000
"""Messages put at once when members no longer come and go."""
RATE_S = 0.004
"""Pause of a producer after each burst: the handlers here are slow on purpose."""


class Ledger:
    """What was sent, and what each consumer group did with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.sent: dict[str, list[str]] = defaultdict(list)
        """Topic -> ids, in the order of their receipts."""
        self.poison: set[str] = set()
        self.done: dict[str, Counter[str]] = defaultdict(Counter)
        """Group -> how often each id was handled to its end, and that counted."""
        self.tries: dict[str, Counter[str]] = defaultdict(Counter)
        self.hung: set[tuple[str, mqstore.QueueRef, int]] = set()
        """(group, queue, offset) of what a handler hung at."""
        self.places: dict[tuple[str, str], set[tuple[mqstore.QueueRef, int]]] = defaultdict(set)
        """(group, id) -> where it was met: a message that is sent back lies somewhere else."""
        self.order: dict[tuple[str, str], list[int]] = defaultdict(list)
        """(group, message group) -> numbers as they were first begun."""
        self.faults: list[str] = []
        self.events: dict[tuple[str, str], list[str]] = defaultdict(list)
        """(group, id) -> what became of it and when, for who has to explain a failure."""
        self._busy: dict[tuple[str, str], str] = {}
        self._begun: set[tuple[str, str]] = set()

    def send(self, topic: str, name: str, poison: bool) -> None:
        with self._lock:
            self.sent[topic].append(name)
            if poison:
                self.poison.add(name)

    def begin(self, group: str, message: Message, message_group: str | None = None) -> None:
        name = message.text()
        with self._lock:
            self.tries[group][name] += 1
            self._note(group, name, f"begins at {message.queue}, offset {message.offset}")
            self.places[group, name].add((message.queue, message.offset))
            if message_group is None:
                return
            key = (group, message_group)
            if key in self._busy:
                self.faults.append(f"{group}: {name} began while {self._busy[key]} was handled")
            self._busy[key] = name
            if (group, name) not in self._begun:
                self._begun.add((group, name))
                self.order[key].append(int(name.rsplit("-", 1)[1]))

    def end(self, group: str, message: Message, message_group: str | None = None, *, ok: bool) -> None:
        name = message.text()
        with self._lock:
            self._note(group, name, "is done" if ok else "fails")
            if message_group is not None:
                self._busy.pop((group, message_group), None)
            if ok:
                self.done[group][name] += 1

    def hang(self, group: str, message: Message) -> None:
        with self._lock:
            self.hung.add((group, message.queue, message.offset))

    def _note(self, group: str, name: str, what: str) -> None:
        thread = threading.current_thread().name
        self.events[group, name].append(f"{time.monotonic():.3f} {thread} {what}")

    def story(self, group: str, names: Iterable[str]) -> str:
        """What became of some of these, a line each."""
        return "\n".join(f"{group} {name}: {'; '.join(self.events[group, name])}" for name in sorted(names)[:20])

    def settled(self) -> int:
        """How often a message was handled in all groups: grows as long as anybody gets on."""
        with self._lock:
            return sum(sum(tries.values()) for tries in self.tries.values())

    def behind(self, groups: Iterable[str]) -> int:
        """Messages that the slowest of these groups has not begun."""
        with self._lock:
            sent = {topic: len(names) for topic, names in self.sent.items()}
            return max(
                sum(sent.get(topic, 0) for topic in WANTED.get(group, ["work"])) - len(self.tries[group])
                for group in groups
            )

    def may_repeat(self, group: str, name: str) -> bool:
        """Whether an id was near enough behind one that hung."""
        behind = 0 if group in BY_RECEIPT else SPAN + PREFETCH
        return any(
            at == group and queue == its_queue and 0 <= its_offset - offset <= behind
            for its_queue, its_offset in self.places[group, name]
            for at, queue, offset in self.hung
        )


class Trouble:
    """A handler's luck: what happens to it this time."""

    def __init__(
        self, ledger: Ledger, group: str, seed: int, *, hangs: float = 0.0, hang_s: float = SLOW_S + 1
    ) -> None:
        """`hangs`: how likely, and for how long."""
        self._hang_s = hang_s
        self._ledger = ledger
        self._group = group
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._hangs = hangs

    def __call__(self, message: Message, *, ordered: bool = False) -> None:
        with self._handled(message, ordered) as pause_s:
            time.sleep(pause_s)

    async def awaited(self, message: Message, *, ordered: bool = False) -> None:
        """The same in a coroutine."""
        with self._handled(message, ordered) as pause_s:
            await asyncio.sleep(pause_s)

    @contextmanager
    def _handled(self, message: Message, ordered: bool) -> Iterator[float]:
        """Raises, or says for how long to be busy."""
        name = message.text()
        lane = message.message_group if ordered else None
        with self._lock:
            luck = self._rng.random()
        self._ledger.begin(self._group, message, lane)
        ok = False
        try:
            if name in self._ledger.poison or luck < 0.02:
                raise ValueError("bad luck")
            if luck < 0.03:
                raise mqstore.Retry(delay=0.02)
            if luck < 0.03 + self._hangs:
                self._ledger.hang(self._group, message)
                yield self._hang_s  # what it returns counts for nothing
            elif ordered and luck < 0.0302:
                yield SLOW_S + 1  # an unordered queue would not wait for its handler; this one waits
            else:
                begun = time.monotonic()
                yield 0.002 if luck < 0.1 else 0.0
                if time.monotonic() - begun > min(self._hang_s / 2, SLOW_S):
                    self._ledger.hang(self._group, message)  # it was the machine, and looks the same
            ok = True
        finally:
            self._ledger.end(self._group, message, lane, ok=ok)


def produce(
    store: mqstore.Store,
    ledger: Ledger,
    number: int,
    stop: threading.Event,
    pause: float,
    groups: Iterable[str] = tuple(WANTED),
) -> None:
    rng = random.Random(SEED * 100 + number)
    lanes = [f"lane{number}.{i}" for i in range(GROUPS_OF_MESSAGES)]
    sent: Counter[str] = Counter()
    with store.producer("stress") as producer:
        while not stop.is_set():
            for _ in range(rng.randint(1, 8)):
                poison = rng.random() < POISON
                if rng.random() < 0.5:
                    lane = rng.choice(lanes)
                    sent[lane] += 1
                    name = f"{lane}-{sent[lane]}"
                    ledger.send("steps", name, poison)  # before: a handler may be quicker than we are
                    producer.send("steps", name.encode(), message_group=lane)
                else:
                    sent["work"] += 1
                    name = f"work{number}-{sent['work']}"
                    ledger.send("work", name, poison)
                    producer.send("work", name.encode(), tag=rng.choice("ab"))
            stop.wait(pause)
            while ledger.behind(groups) > BEHIND and not stop.wait(0.05):
                pass


def members_of(
    make: Callable[[int], Any], calm: threading.Event, stop: threading.Event, seed: int, most: int = 3
) -> Callable[[], None]:
    """A thread's work: members come and go until `calm`; those that are there then stay until `stop`."""

    def run() -> None:
        rng = random.Random(seed)
        number, members = 0, [make(0)]
        while not calm.wait(rng.uniform(0.1, 0.8)):
            if len(members) < most and rng.random() < 0.55:
                number += 1
                members.append(make(number))
            elif len(members) > 1:
                assert members.pop(rng.randrange(len(members))).stop(60)
        stop.wait()
        for member in members:
            assert member.stop(60)

    return run


class Polling:
    """A thread that receives, in the form of a push consumer."""

    def __init__(self, loop: Callable[[threading.Event], None]) -> None:
        self._end = threading.Event()
        self._failed: BaseException | None = None

        def run() -> None:
            try:
                loop(self._end)
            except BaseException as error:
                self._failed = error

        self._thread = threading.Thread(target=run, name="stress-poll")
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        self._end.set()
        self._thread.join(timeout)
        if self._failed is not None:
            raise self._failed
        return not self._thread.is_alive()


def pushing(
    store: mqstore.Store, group: str, handler: Callable[..., Any], **options: Any
) -> Callable[[int], mqstore.PushConsumer]:
    """Return a maker of push consumers of the first topic of a group."""

    def make(number: int) -> mqstore.PushConsumer:
        consumer = store.push_consumer(group, **options)
        consumer.subscribe(WANTED.get(group, ["work"])[0], handler)
        return consumer.start()

    return make


class OnLoop:
    """A store on an event loop of its own thread, whose `sync` all others use; and members there, steered from here."""

    def __init__(self, folder: Path, config: mqstore.StoreConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stress-loop")
        self._thread.start()
        self.store: mqstore.aio.Store = self.run(mqstore.aio.open(folder, config=config).__aenter__())

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 300) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def close(self) -> None:
        self.run(self.store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def member(self, group: str, topic: str, handler: Callable[..., Any], **options: Any) -> Any:
        """A push consumer, in the form of a sync one."""
        home = self

        async def begin() -> mqstore.aio.PushConsumer:
            consumer = await self.store.push_consumer(group, **options)
            consumer.subscribe(topic, handler)
            return await consumer.start()

        class Member:
            consumer = home.run(begin())

            def stop(self, timeout: float) -> bool:
                stopped: bool = home.run(self.consumer.stop(timeout))
                return stopped

        return Member()


def comes_and_goes(
    make: Callable[[], Any], calm: threading.Event, stop: threading.Event, seed: int
) -> Callable[[], None]:
    """A thread's work: one member, that is there and gone by turns until `calm`, and then stays until `stop`."""

    def run() -> None:
        rng = random.Random(seed)
        while not calm.is_set():
            member = make()
            calm.wait(rng.uniform(0.1, 1.5))
            assert member.stop(60)
            calm.wait(rng.uniform(0, 0.3))
        member = make()
        stop.wait()
        assert member.stop(60)

    return run


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    threads, files = set(threading.enumerate()), open_files()
    yield
    assert not new_threads(threads)
    assert not open_files() - files


@pytest.mark.timeout(SECONDS + 600)
def test_everything_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.CRITICAL, "mqstore")  # handlers fail here by the thousand
    monkeypatch.setattr("mqstore.client.push.concurrent._HAND_OVER_S", SLOW_S)
    # A reset leaves what was fetched to the end of its lease. If it is the last one, all else waits for that.
    monkeypatch.setattr("mqstore.client.push.pop.VISIBILITY_MS", 20_000)
    with nothing_left_behind():
        _run(tmp_path)


def _run(folder: Path) -> None:
    ledger = Ledger()
    retention = mqstore.Retention(max_bytes=MAX_BYTES)
    config = mqstore.StoreConfig(segment_bytes=SEGMENT_BYTES, retention=retention, commit_interval=0.5)
    home = OnLoop(folder / "store", config)
    try:
        _run_on(home, ledger)
        _check_size(home.store.sync, ledger)
    finally:
        home.close()


def _run_on(home: OnLoop, ledger: Ledger) -> None:
    store: mqstore.Store = home.store.sync
    store.create_topic("work", queues=6)
    store.create_topic("steps", queues=4)
    stop_producing, calm, stop_consuming = threading.Event(), threading.Event(), threading.Event()

    def handle_batch(messages: Sequence[Message]) -> None:
        failed = []
        for message in messages:
            try:
                luck["batch"](message)
            except (ValueError, mqstore.Retry):
                failed.append(message)
        if failed:
            raise mqstore.BatchFailure(failed)  # the others are done

    def receiving(number: int, group: str, count: int, visibility: float, *expected: type[Exception]) -> Polling:
        def loop(end: threading.Event) -> None:
            with store.simple_consumer(group, {"work": "*"}, visibility=visibility, retry=RETRY) as consumer:
                while not end.is_set():
                    for delivery in consumer.receive(count, wait=0.2):
                        with suppress(ValueError, *expected), delivery as message:
                            luck[group](message)

        return Polling(loop)

    def took(group: str, message: Message) -> None:
        ledger.begin(group, message)
        ledger.end(group, message, ok=True)

    def pull(number: int, group: str = "pull", *, seeks: bool = False) -> Polling:
        rng = random.Random(SEED * 30 + number)

        def loop(end: threading.Event) -> None:
            with store.pull_consumer(group, auto_commit_interval=0.1) as consumer:
                consumer.subscribe("work", "steps")
                while not end.is_set():
                    found = consumer.poll(timeout=0.2, max_messages=50)
                    for message in found:
                        took(group, message)
                    if seeks and found and rng.random() < 0.05 and not calm.is_set():
                        last = found[-1]
                        with suppress(mqstore.MQStoreError):  # a rebalance took the queue, or retention the message
                            consumer.seek(last.queue, max(0, last.offset - rng.randrange(60)))

        return Polling(loop)

    def operate() -> None:
        """Send groups that are at work back to what they had."""
        rng = random.Random(SEED * 40)
        while not calm.wait(rng.uniform(0, 0.5)):
            group, queue_id = rng.choice(REWOUND[:2]), rng.randrange(6)
            at = store.committed(group, mqstore.QueueRef("work", queue_id))
            if at is not None:
                with suppress(mqstore.errors.OffsetOutOfRangeError):
                    store.broker.reset(group, "work", queue_id, max(0, at - rng.randrange(60)))

    luck = {
        group: Trouble(ledger, group, SEED + i, hangs=HANGS.get(group, 0.0))
        for i, group in enumerate(
            ("push", "orderly", "poppush", "simple", "popsteps", "batch", "aio", "aiosteps", "late"), 1
        )
    }
    push = partial(pushing, store)
    aio_steps = partial(luck["aiosteps"].awaited, ordered=True)
    pop: dict[str, Any] = {"mode": "pop", "retry": RETRY}
    makers: list[Callable[[int], Any]] = [
        push("push", luck["push"], workers=3, retry=RETRY, consume_timeout=SLOW_S, prefetch=PREFETCH, max_span=SPAN),
        push("orderly", partial(luck["orderly"], ordered=True), workers=3, ordered=True, retry=RETRY, suspend=0.01),
        push("poppush", luck["poppush"], workers=3, consume_timeout=SLOW_S, **pop),
        push("popsteps", partial(luck["popsteps"], ordered=True), ordered=True, workers=3, **pop),
        lambda number: receiving(number, "simple", 8, 30),
        # Its leases run out while a handler hangs. Of more at a time the last would be late for the first.
        lambda number: receiving(number, "late", 1, SLOW_S, mqstore.errors.ReceiptExpiredError),
        pull,
        push("batch", handle_batch, workers=2, retry=RETRY, batch_size=8),
        lambda number: home.member("aio", "work", luck["aio"].awaited, workers=20, retry=RETRY),
        lambda number: home.member("aiosteps", "steps", aio_steps, ordered=True, workers=20, **pop),
        push("rewound", partial(took, "rewound"), workers=2),
        push("poprewound", partial(took, "poprewound"), workers=2, mode="pop"),
        partial(pull, group="seeking", seeks=True),
    ]

    def everybody(name: str) -> mqstore.PushConsumer:
        handler = partial(took, f"everybody-{name}")
        return push("everybody", handler, model="broadcasting", client_id=name, workers=2)(0)

    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        return run

    lives = [members_of(make, calm, stop_consuming, SEED * 10 + i) for i, make in enumerate(makers)]
    lives += [
        comes_and_goes(partial(everybody, name), calm, stop_consuming, SEED * 20 + i) for i, name in enumerate("ab")
    ]
    consumers = [threading.Thread(target=guarded(life)) for life in (*lives, operate)]
    producers = [
        threading.Thread(target=guarded(lambda n=n: produce(store, ledger, n, stop_producing, RATE_S)))  # type: ignore[misc]
        for n in range(2)
    ]
    for thread in (*consumers, *producers):
        thread.start()
    time.sleep(MAIN_SECONDS * 2 / 3)
    calm.set()
    names = [f"burst-{i}" for i in range(BURST)]
    for name in names:
        ledger.send("work", name, poison=False)
    for queue_id in range(6):
        store.put_many("work", [name.encode() for name in names[queue_id::6]], queue_id=queue_id)
    time.sleep(MAIN_SECONDS / 3)
    stop_producing.set()
    for thread in producers:
        thread.join(30)

    wanted = WANTED
    seen, still_since = -1, time.monotonic()
    while time.monotonic() - still_since < STILL_S and not failures:
        done = not any(_missing(store, ledger, group, topics) for group, topics in wanted.items())
        lags = (store.lag(group) for group in wanted if not group.startswith("everybody"))  # members have their own
        if done and not any(n for lag in lags for queue, n in lag.items() if queue.topic in TOPICS):
            break
        if (now_settled := ledger.settled()) != seen:
            seen, still_since = now_settled, time.monotonic()
        time.sleep(0.5)
    missing = {group: sorted(_missing(store, ledger, group, topics))[:20] for group, topics in wanted.items()}
    stop_consuming.set()
    for thread in consumers:
        thread.join(300)
    assert not failures, failures
    assert missing == {key: [] for key in wanted}, [ledger.story(*each) for each in missing.items()]
    _check(store, ledger, wanted)
    assert store.broker.stats().errors == {}


def _check_size(store: mqstore.Store, ledger: Ledger) -> None:
    """Nobody needs anything any more: what is kept is what the store was told to keep, and what is being written."""
    for group in WANTED:
        store.dead_letters(group).purge()
    end = time.monotonic() + 60
    while (size := store.stats().commitlog_bytes) > MAX_BYTES + 2 * SEGMENT_BYTES:
        assert time.monotonic() < end, f"{size} bytes are kept: {store.broker.stats().oldest_pin}"
        time.sleep(0.5)


@pytest.mark.timeout(SHIPPED_SECONDS + 300)
def test_with_the_shipped_pauses_only_what_was_slow_comes_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A queue without order that changes hands waits for its handlers, and has 0.4 s for what they overtook. What takes
    longer may come again, and so may what others of its queue were done with behind it; nothing else does, and nothing
    is lost."""
    caplog.set_level(logging.CRITICAL, "mqstore")
    ledger = Ledger()
    with nothing_left_behind(), mqstore.open(tmp_path / "store") as store:
        store.create_topic("work", queues=6)
        calm, stop = threading.Event(), threading.Event()
        luck = Trouble(ledger, "handed", SEED + 10, hangs=0.01, hang_s=2 * MOMENT_S)
        member = pushing(store, "handed", luck, workers=3, retry=RETRY, prefetch=PREFETCH, max_span=SPAN)
        members = threading.Thread(target=members_of(member, calm, stop, SEED * 50))
        stop_producing = threading.Event()
        producer = threading.Thread(target=produce, args=(store, ledger, 0, stop_producing, RATE_S, ["handed"]))
        members.start()
        producer.start()
        time.sleep(SHIPPED_SECONDS)
        until(lambda: ledger.hung)
        stop_producing.set()
        producer.join(30)
        seen, still_since = -1, time.monotonic()
        while time.monotonic() - still_since < STILL_S and _missing(store, ledger, "handed", ["work"]):
            if (now_settled := ledger.settled()) != seen:
                seen, still_since = now_settled, time.monotonic()
            time.sleep(0.2)
        missing = _missing(store, ledger, "handed", ["work"])
        calm.set()
        stop.set()
        members.join(100)
        assert not missing, ledger.story("handed", missing)
        assert ledger.hung
        twice = [name for name, n in ledger.done["handed"].items() if n > 1 and not ledger.may_repeat("handed", name)]
        assert not twice, ledger.story("handed", twice)


def _dead(store: mqstore.Store, group: str) -> Counter[str]:
    return Counter(message.text() for message in store.dead_letters(group))


def _missing(store: mqstore.Store, ledger: Ledger, group: str, topics: list[str]) -> set[str]:
    sent = {name for topic in topics for name in ledger.sent[topic]}
    return sent - ledger.done[group].keys() - _dead(store, group).keys()


def _check(store: mqstore.Store, ledger: Ledger, wanted: dict[str, list[str]]) -> None:
    assert ledger.faults == []
    assert sum(map(len, ledger.sent.values())) > 100 * min(SECONDS, 10)
    for group, topics in wanted.items():
        sent = {name for topic in topics for name in ledger.sent[topic]}
        done, dead = ledger.done[group], _dead(store, group)
        assert done.keys() <= sent, group
        twice = [name for name, times in done.items() if times > 1 and not ledger.may_repeat(group, name)]
        assert not twice or group in REWOUND, ledger.story(group, twice)
        assert all(times == 1 for times in dead.values()), group
        both = [name for name in done.keys() & dead.keys() if not ledger.may_repeat(group, name)]
        assert not both, ledger.story(group, both)
        if group in NEVER_FAIL:
            assert not dead
            continue
        poison = ledger.poison & sent
        assert poison <= dead.keys(), group
        # Given up after so many attempts, neither more nor less.
        odd = {name: times for name in poison if (times := ledger.tries[group][name]) != ATTEMPTS}
        assert all(ledger.may_repeat(group, name) for name in odd), ledger.story(group, odd)
        lag = store.lag(group)
        assert lag
        # What hung and was then done is sent back all the same, and may not have come yet.
        late = any(name == group for name, _, _ in ledger.hung)
        assert not any(n for queue, n in lag.items() if not (late and queue.topic.startswith("%RETRY%"))), (group, lag)
    for (group, lane), numbers in ledger.order.items():
        assert numbers == sorted(numbers), (group, lane)
