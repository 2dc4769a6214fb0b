"""A call made ahead: what it gives, raises, and when; and that reading goes on where there can be no thread."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from mqstore.log.reading.prefetch import Prefetch
from mqstore.log.store import MessageStore
from tests.children import fork


@pytest.mark.parametrize("asked", [False, True])
def test_ctrl_c_does_not_end_the_wait_for_its_end(asked: bool) -> None:
    """The call went on with a descriptor, a file's by then that was opened meanwhile. Python takes a thread for ended
    once Ctrl-C has interrupted a wait for it."""
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def call() -> None:
        begun.set()
        may_end.wait(10)
        ended.append(True)

    def interrupt() -> None:
        for _ in range(3):
            may_end.wait(0.05)
            signal.pthread_kill(main, signal.SIGINT)
        may_end.wait(0.05)
        may_end.set()

    def handle(*_: object) -> None:
        if reading:
            raise KeyboardInterrupt

    def read() -> None:
        with Prefetch[None]("reader") as ahead:
            ahead.begin(call)
            begun.wait(10)
            interrupting.start()
            if asked:
                ahead.result()

    main, reading = threading.get_ident(), True
    interrupting = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            read()
        reading = False
        assert ended == [True]
    finally:
        interrupting.join()
        signal.signal(signal.SIGINT, before)


def test_threadless_result_is_made_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    made = []
    with Prefetch[None]("reader") as ahead:
        ahead.begin(lambda: made.append(1))
        assert made == []
        ahead.result()
        assert made == [1]


def test_a_forked_child_makes_its_calls_itself() -> None:
    """The thread is not there, and who waited for it waited for ever."""
    begun, may_end = threading.Event(), threading.Event()

    def call() -> int:
        begun.set()
        may_end.wait(10)
        return 1

    with Prefetch[int]("reader") as ahead:
        ahead.begin(call)
        begun.wait(10)

        def child() -> None:
            nonlocal may_end
            may_end = threading.Event()
            may_end.set()
            given = [ahead.result()]
            ahead.begin(lambda: 2)
            given.append(ahead.result())
            ahead.__exit__(None, None, None)
            assert given == [1, 2]

        pid = fork(child)
        may_end.set()
        assert os.waitpid(pid, 0) == (pid, 0)
        assert ahead.result() == 1


def test_its_end_may_come_in_its_own_thread() -> None:
    """Where the garbage collector happens to find who was reading, and does so no more."""
    abandoned, ended = threading.Event(), threading.Event()

    def call() -> None:
        abandoned.wait(10)
        gc.collect()
        ended.set()

    def read() -> Iterator[None]:
        with Prefetch[None]("reader") as ahead:
            ahead.begin(call)
            yield

    errors: list[object] = []
    gc.disable()
    try:
        with patch.object(sys, "unraisablehook", errors.append):
            reader = SimpleNamespace(steps=read())
            next(reader.steps)
            reader.itself = reader
            del reader
            abandoned.set()
            assert ended.wait(10)
    finally:
        gc.enable()
    assert errors == []


def test_a_store_is_verified_while_the_interpreter_ends(tmp_path: Path) -> None:
    with MessageStore(tmp_path / "s") as store:
        store.put_many("t", [b"body"] * 20_000)
    script = """
        import atexit, sys
        from mqstore.log.reading.readonly import ReadOnlyMessageStore

        def verify():
            with ReadOnlyMessageStore(sys.argv[1]) as store:
                print(list(store.verify()), store.offsets("t"))

        atexit.register(verify)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "s"], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[] (0, 20000)\n", "")
