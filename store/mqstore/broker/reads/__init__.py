"""Reads by offset, waits for new messages, and filters."""
