"""Benchmarks: named questions, fixed seeds, peers in the same run, answers as ratios with their spread.

    python -m bench [NAME ...]       ask, print tables, write JSON, a report with plots and a line of history
    python -m bench.compare OLD      compare two runs; exit code 1 if something became worse

    questions.py    the table of all questions with their goals: begin here
    harness.py      what a question is, and how its sides are timed
    endtoend.py     latency from put to handler at a given rate
    engine.py, delivery.py, everyday.py     what mqstore does in each question
    peers.py, servers.py                    what others do: Python libraries; Redis and the Java store
    results.py, report.py                   rows of answers as JSON; tables, Markdown and plots

The other modules are commands of their own: `spark_*.py`, `splice.py` and `verify_jobs.py` (`make spark-bench`, with
`goals.py`), `growth.py`, `in_flight.py`, `lateness.py`, `sync_costs.py`.
"""
