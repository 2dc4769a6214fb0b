"""Files that follow from the commitlog: consume queues and index files."""
