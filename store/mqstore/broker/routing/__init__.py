"""Way of a message into the log: the router, the choice of the queue, unique keys."""
