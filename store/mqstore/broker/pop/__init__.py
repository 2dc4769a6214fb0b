"""Pop: deliver messages by receipt, invisible to other receivers for a time, until they are acknowledged."""
