"""Scans of a log, in one process or in many tasks."""
