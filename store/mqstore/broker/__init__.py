"""Delivery on top of the log: who gets which message, when, and what is remembered of it.

Imports the log, the files and the formats below; knows nothing of the code that produces or consumes. `broker.py` is
the door; every mechanism beside it is a module with plain state and a `run_once(now_ms)`.
"""
