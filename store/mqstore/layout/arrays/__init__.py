"""Many records at once, in array passes."""
