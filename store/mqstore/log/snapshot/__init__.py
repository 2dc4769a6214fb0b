"""Snapshots: a copy of a store as of one moment, while others use it."""
