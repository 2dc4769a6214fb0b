"""Delayed messages: levels, any time, and the routing of both."""
