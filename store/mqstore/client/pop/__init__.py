"""Consumers by receipt: their source of messages, leases and renewal, the simple consumer."""
