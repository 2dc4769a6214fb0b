"""Benchmarks: named questions, fixed seeds, peers in the same run, answers as ratios with their spread.

`python -m bench.compare` answers all of them as one report, `pytest bench` measures single sides with
pytest-benchmark. `test_*.py` hold one question each (flush and read: two), `peers.py` what others do, `engine.py` what
mqstore does, `targets.py` what is aimed at.
"""
