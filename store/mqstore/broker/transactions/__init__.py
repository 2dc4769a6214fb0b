"""Transactions: prepared messages and their outcomes."""
