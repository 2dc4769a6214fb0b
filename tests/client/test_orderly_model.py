"""State machine: random puts, members that come, go and die, failures, resets, kills, and from inside of handlers the
same by other members.

The model knows messages: how often each is to fail, whether it is done, and whether it must be begun now. It asserts
clients#invariants: nothing is lost (1), no position passes what is not done (2), calls of one queue never overlap and
none begins before its predecessors are done (3), one live owner a queue (4), attempts are counted exactly (5).
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mqstore import Message, Reject, Retry, RetryPolicy
from tests.client.orderlysupport import Bench

QUEUES = 3
MAX_ATTEMPTS = 3
SOME = settings(stateful_step_count=30, suppress_health_check=list(HealthCheck), derandomize=True)


@dataclass
class Fate:
    """What the model knows of one message."""

    fails: int
    """How often its handler fails; -1: it rejects it."""
    inside: str
    """What else happens while its handler runs."""
    failed: int = 0
    done: bool = False
    loose: bool = False
    """A kill or a reset came between: how many attempts were remembered is not known."""
    letters: int = 0


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="mqstore-orderly-"))
        self.bench = Bench(self.folder / "store", queues=QUEUES)
        self.fates: dict[int, list[Fate]] = {queue: [] for queue in range(QUEUES)}
        self.positions = dict.fromkeys(range(QUEUES), 0)
        self.wrong: list[str] = []
        self.names = 0
        self.kills = 0
        self.stack: list[str] = []
        self.join()

    # -- what may happen ------------------------------------------------------------------------------------------

    @rule(
        queue=st.integers(0, QUEUES - 1),
        fails=st.sampled_from([0, 0, 0, 1, 2, MAX_ATTEMPTS, -1]),
        inside=st.sampled_from(["", "", "", "others run", "join", "leave", "time"]),
        count=st.integers(1, 3),
    )
    def put(self, queue: int, fails: int, inside: str, count: int) -> None:
        for _ in range(count):
            offset = len(self.fates[queue])
            self.fates[queue].append(Fate(fails, inside))
            self.bench.put(f"{queue} {offset}", queue_id=queue)

    @precondition(lambda self: len(self.bench.members) < 4)
    @rule()
    def join(self) -> None:
        self.names += 1
        name = f"m{self.names * 7 % 10}-{self.names}"  # so that the newest is not always the last
        handler = partial(self.handle, name)
        retry = RetryPolicy(MAX_ATTEMPTS, [1])
        self.bench.join(name, handler, retry=retry, workers=2)

    @precondition(lambda self: self.bench.members)
    @rule(pick=st.integers(0, 9))
    def leave(self, pick: int) -> None:
        idle = [each for each in self.bench.members if each.client_id not in self.stack]
        if idle and not self.bench.leave(idle[pick % len(idle)]):
            self.wrong.append("a stop did not end")

    @precondition(lambda self: self.bench.members)
    @rule(pick=st.integers(0, 9))
    def die(self, pick: int) -> None:
        """From now on this one does nothing, and nobody is told."""
        del self.bench.members[pick % len(self.bench.members)]

    @rule()
    def settle(self) -> None:
        self.bench.settle()

    @rule(seconds=st.sampled_from([0.1, 1, 5, 65]))
    def advance(self, seconds: float) -> None:
        self.bench.advance(seconds)

    @rule(queue=st.integers(0, QUEUES - 1), back=st.integers(0, 4))
    def reset(self, queue: int, back: int) -> None:
        self.bench.settle()
        offset = max(0, min(self.positions[queue], len(self.fates[queue])) - back)
        self.bench.broker.reset("g", "t", queue, offset)
        self.bench.broker.save()  # else a kill could take it back
        for fate in self.fates[queue][offset:]:
            fate.done, fate.loose = False, True
        self.positions[queue] = offset
        self.bench.settle()

    @rule(graceful=st.booleans())
    def reopen(self, graceful: bool) -> None:
        if graceful:
            for member in list(self.bench.members):
                assert self.bench.leave(member)
            self.bench.close()
        else:
            self.bench.kill()
            self.kills += 1
            for fates in self.fates.values():
                for fate in fates:
                    fate.loose = True
        self.bench.open()
        for queue in range(QUEUES):
            committed = self.bench.committed(queue) or 0
            if graceful and committed < self.positions[queue]:
                self.wrong.append(f"position {self.positions[queue]} was forgotten: {committed}")
            self.positions[queue] = committed
        self.join()

    # -- a handler ------------------------------------------------------------------------------------------------

    def handle(self, name: str, message: Message) -> None:
        queue, offset = message.queue_id, message.offset
        fate = self.fates[queue][offset]
        if message.text() != f"{queue} {offset}":
            self.wrong.append(f"{message.text()} at {queue}/{offset}")
        early = self.not_done(queue, offset)
        if early:
            self.wrong.append(f"{queue}/{offset} began while {early} are not done")
        if fate.done and not fate.loose:
            self.wrong.append(f"{queue}/{offset} came again")
        if message.attempt != fate.failed + 1 and not (fate.loose and 1 <= message.attempt <= MAX_ATTEMPTS):
            self.wrong.append(f"{queue}/{offset}: attempt {message.attempt} after {fate.failed} failures")
        fate.failed = message.attempt - 1
        self.happen(name, fate.inside)
        if fate.fails < 0:
            fate.done, fate.letters = True, fate.letters + 1
            raise Reject
        if fate.failed < fate.fails:
            fate.failed += 1
            if fate.failed == MAX_ATTEMPTS:
                fate.done, fate.letters = True, fate.letters + 1
            raise Retry
        fate.done = True

    def happen(self, name: str, what: str) -> None:
        """Inside of a handler of `name`: its timers fire, and members that are in no handler do what they like."""
        if len(self.stack) >= 3:
            return
        self.stack.append(name)
        self.bench.broker.run_once()
        if what == "join" and len(self.bench.members) < 4:
            self.join()
        if what == "leave":
            self.leave(len(self.stack))
        for _ in range(5 if what == "time" else 1 if what else 0):
            if what == "time":
                self.bench.clock.advance(15_000)
            for member in list(self.bench.members):
                if member.client_id in self.stack:
                    member.run_once()
                else:
                    member.run_once()
        self.stack.pop()

    # -- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def nothing_was_wrong(self) -> None:
        assert self.wrong == []
        assert self.bench.overlaps == []

    @invariant()
    def no_position_passes_what_is_not_done_or_goes_back(self) -> None:
        for queue in self.fates:
            committed = self.bench.committed(queue) or 0
            assert committed >= self.positions[queue]
            self.positions[queue] = committed
            assert self.not_done(queue, committed) == []

    def not_done(self, queue: int, end: int) -> list[int]:
        return [offset for offset, fate in enumerate(self.fates[queue][:end]) if not fate.done]

    def check_end(self, fate: Fate, letters: int) -> None:
        assert fate.done
        if not fate.loose:
            assert letters == fate.letters <= 1
        assert letters >= min(fate.letters, 1)

    def teardown(self) -> None:
        try:
            if not self.bench.members:
                self.join()
            for _ in range(300):
                self.bench.advance(20)
                if sum(self.bench.broker.lag("g").values()) == 0:
                    break
            self.nothing_was_wrong()
            letters = Counter(self.bench.dead())
            for queue, fates in self.fates.items():
                assert (self.bench.committed(queue) or 0) == len(fates)
                for offset, fate in enumerate(fates):
                    self.check_end(fate, letters[f"{queue} {offset}"])
            for member in list(self.bench.members):
                assert self.bench.leave(member)
            self.bench.close()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


TestOrderly = Machine.TestCase
TestOrderly.settings = SOME
