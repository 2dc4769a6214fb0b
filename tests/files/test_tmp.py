"""The tmp folder: what a crash left there is removed, and nothing else is touched."""

from __future__ import annotations

import os
from pathlib import Path

from mqstore.files.filesystem import REAL
from mqstore.files.tmp import remove_temporaries, temporary_path

OURS = ("00000000000000000000.0", "00000000000067108864.12", "cq-140", "cq.3", "index", "index.4", "timerwheel")
OTHERS = ("notes.txt", "cq", "cq-", "index.bak", "0.1", "00000000000000000000.1.orig", "letter 1.1", "timerwheel.x")


def test_only_names_that_mqstore_makes_are_removed(tmp_path: Path) -> None:
    for name in (*OURS, *OTHERS):
        (tmp_path / name).write_bytes(b"x")
    remove_temporaries(REAL, tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(set(OTHERS) - {"cq"})


def test_folders_and_links_stay_whatever_their_names(tmp_path: Path) -> None:
    (tmp_path / "tmp" / "index").mkdir(parents=True)
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "tmp" / "cq.1").symlink_to(tmp_path / "precious")
    (tmp_path / "tmp" / "cq.2").symlink_to("nowhere")
    os.mkfifo(tmp_path / "tmp" / "timerwheel")
    remove_temporaries(REAL, tmp_path / "tmp")
    assert sorted(os.listdir(tmp_path / "tmp")) == ["cq.1", "cq.2", "index", "timerwheel"]
    assert (tmp_path / "precious").exists()


def test_a_new_file_gets_a_name_that_nothing_has_and_that_is_removed(tmp_path: Path) -> None:
    first = temporary_path(tmp_path, "cq")
    number = int(first.rpartition(".")[2])
    for ahead in range(1, 4):
        (tmp_path / f"index.{number + ahead}").mkdir()
    path = temporary_path(tmp_path, "index")
    assert int(path.rpartition(".")[2]) == number + 4
    Path(path).touch()
    remove_temporaries(REAL, tmp_path)
    assert not os.path.exists(path)
