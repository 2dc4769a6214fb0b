"""Kill -9 in the middle of real `mqstore cut restore` processes: every message comes back, and none comes twice."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

from mqstore.broker.admin.cut import restore
from mqstore.log.store import MessageStore
from tests.broker.cutsupport import SENT, all_of, config, cut_from, make
from tests.children import speaking_child
from tests.log.support import open_store

BAD = 3


def _child(path: Path, writer: int) -> None:
    def told(done: int, total: int) -> None:
        os.write(writer, b".")

    with MessageStore(path, config=config()) as store:
        os.write(writer, b".")
        restore(store, progress=told)
        os.write(writer, b".")
    signal.pause()


def test_no_message_is_lost_or_doubled_by_kill_9(tmp_path: Path) -> None:
    rng = random.Random(20_260_101)
    made = tmp_path / "made"
    cut_from(made, make(made)[BAD])
    wanted = SENT[:BAD] + SENT[BAD + 1 :]
    half_done = 0
    for round_ in range(12):
        path = tmp_path / f"store-{round_}"
        shutil.copytree(made, path)
        for _ in range(2):
            with speaking_child(partial(_child, path)) as (_, reader):
                os.read(reader, 1)  # it is open, and begins
                time.sleep(rng.uniform(0, 0.03))
        with open_store(path) as store:
            before = len(all_of(store))
            assert before in (BAD, len(wanted)), round_
            half_done += before > BAD
            restore(store)
            assert all_of(store) == wanted, round_
            assert list(store.verify()) == [], round_
        assert {each.name for each in (path / "cut").iterdir()} == {"restored"}
        shutil.rmtree(path)
    assert half_done < 12, "no process was killed in time"
