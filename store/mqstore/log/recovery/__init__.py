"""Recovery and verify: what is in a log, damaged or not, and how queues and index follow from it."""
