"""The log of pops: records, journal, housekeeping, replay, and takeover of a Java broker's deliveries."""
