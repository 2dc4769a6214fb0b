"""`python -m bench.compare`: exit code 1 if something became worse by more than a share."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import compare
from bench.results import Row, Run
from tests.bench.support import row, run


def _compared(tmp_path: Path, old: Run, new: Run, *options: str) -> int:
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, each in zip(paths, (old, new), strict=True):
        path.write_text(each.to_json())
    return compare.main([*map(str, paths), *options])


@pytest.mark.parametrize(
    ("unit", "old", "new", "options", "code"),
    [
        ("x rate", 2.0, 2.0, (), 0),
        ("x rate", 2.0, 1.7, (), 0),
        ("x rate", 2.0, 1.5, (), 1),
        ("x rate", 2.0, 9.0, (), 0),
        ("x time", 2.0, 2.4, (), 0),
        ("x time", 2.0, 2.6, (), 1),
        ("x time", 2.0, 0.1, (), 0),
        ("ms", 1.0, 1.5, (), 1),
        ("k/s", 100.0, 70.0, (), 1),
        ("x rate", 2.0, 1.5, ("--worse", "0.3"), 0),
        ("x rate", 2.0, 1.9, ("--worse", "0"), 1),
    ],
)
def test_worse_by_more_than_the_share_fails(
    tmp_path: Path, unit: str, old: float, new: float, options: tuple[str, ...], code: int
) -> None:
    assert _compared(tmp_path, run(row(old, unit=unit)), run(row(new, unit=unit)), *options) == code


def test_one_worse_answer_among_better_ones_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = run(*(row(2.0, question=name) for name in ("put", "read", "open")))
    new = run(row(4.0, question="put"), row(1.0, question="read"), row(4.0, question="open"))

    assert _compared(tmp_path, old, new) == 1
    shown = capsys.readouterr().out
    assert "1 of 3 answers became worse by more than 20%" in shown
    assert [line.split()[1] for line in shown.splitlines() if "worse │" in line] == ["read"]


@pytest.mark.parametrize("other", [row(9.0, body_bytes=1024), row(9.0, beside="LMDB"), row(None, beside="redis")])
def test_answers_that_one_run_lacks_count_for_nothing(tmp_path: Path, other: Row) -> None:
    assert _compared(tmp_path, run(row(2.0), other), run(row(2.0))) == 0
    assert _compared(tmp_path, run(row(2.0)), run(row(2.0), other)) == 0


@pytest.mark.parametrize(
    ("old", "new", "options", "said"),
    [
        (run(row(), share=0.01), run(row()), (), "0.01 and 1 of the messages"),
        (run(row(question="read")), run(row()), (), "no answer in common"),
        (run(row()), run(row()), ("--worse", "1.5"), "less than 1"),
    ],
)
def test_runs_that_cannot_be_compared_are_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: Run, new: Run, options: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        _compared(tmp_path, old, new, *options)

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_another_machine_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _compared(tmp_path, run(row(), machine={"processors": 64}), run(row())) == 0
    assert "machines differ" in capsys.readouterr().out
