"""Pop: messages handed out by receipt, hidden from others for a time, redelivered unless they are acknowledged."""
