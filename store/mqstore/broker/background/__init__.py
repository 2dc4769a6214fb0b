"""Background services of a broker: their interface and thread, their context, and retention."""
