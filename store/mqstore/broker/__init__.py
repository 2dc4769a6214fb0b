"""Delivery on top of the log: who gets which message and when, and the state that is kept.

This room imports the log, the files and the formats below, and knows nothing of code that produces or consumes.
`broker.py` is the door. Every mechanism beside it is a module with plain state and a `run_once(now_ms)`.
"""
