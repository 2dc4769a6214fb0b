"""Producers: preparation, sending and transactions."""
