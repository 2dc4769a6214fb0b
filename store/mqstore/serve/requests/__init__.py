"""Requests of RocketMQ's clients, by subject."""
