"""Pop: deliver messages by receipt, invisible to others for a time, until they are acknowledged."""
