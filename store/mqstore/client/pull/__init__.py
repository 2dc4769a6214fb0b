"""Pull consumers and their positions."""
