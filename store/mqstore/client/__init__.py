"""Producers and consumers: the part of delivery that applications use, and that runs their code.

This room knows the broker only by `mqstore.contract`, and nothing of files and records.
"""
