"""Recovery and verify: the content of a log, damaged or not, and how queues and index follow from it."""
