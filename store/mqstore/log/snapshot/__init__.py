"""Snapshots: a copy of a store as of one time, while others use it."""
