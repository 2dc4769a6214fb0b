"""Delivery on top of the log: consumer groups, retries, delays and transactions.

`broker.py` is the only entry. Each background service is a class with a `run_once(now_ms)`.
"""
