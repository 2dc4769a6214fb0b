"""Writing: appends, dispatch to queues and index, syncs."""
