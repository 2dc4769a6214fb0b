"""Items of a queue: the state of each message for a group, and changes to many at once."""
