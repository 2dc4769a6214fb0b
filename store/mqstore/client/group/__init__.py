"""Shared by the members of a consumer group: settings, offsets, membership, shares of the queues."""
