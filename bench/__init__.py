"""Benchmarks: questions as pytest-benchmark functions, peers in the same run, ratios beside their goals.

    make bench              pytest bench --benchmark-autosave

    test_*.py               the questions, each with its peers and goals
    sides.py, rates.py      what mqstore does in several of them; messages at a given rate
    peers.py, servers.py    what others do: Python libraries; Redis and the Java store
    harness.py, goals.py    how the sides of a question take turns; answers beside their goals
    conftest.py             options, the table at the end of a run, and what is saved with it

docs/benchmarks.md explains how to run, compare and read them.
"""
