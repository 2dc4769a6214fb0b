"""Redelivery: retries, dead letters, and the journal of attempts."""
