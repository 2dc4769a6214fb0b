"""Producers and consumers: what applications touch of delivery, and what runs their code.

Knows the broker by its door alone (`mqstore.broker.broker.Broker`), and nothing of files and records.
"""
