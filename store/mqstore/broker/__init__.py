"""Delivery on top of the log: who gets which message and when, and the state that is kept.

`broker.py` is the door. Every mechanism beside it is a module with plain state and a `run_once(now_ms)`.
"""
