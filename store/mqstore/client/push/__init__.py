"""Push consumers: assignment, read-ahead, handlers and settlement."""
