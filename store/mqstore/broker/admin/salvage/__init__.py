"""Messages that recovery has cut, and whole records in any bytes."""
