"""Files as a durable store needs them: segments, descriptors, syncing, locks, atomic JSON. Knows nothing of messages.

The room below `log`. Every call that reads or changes a file goes through `filesystem.FileSystem`, so that a test can
record what was written and synced, or refuse it; everything else here is a rule about the order of such calls
(format#directory, format#checkpoint, format#flush, format#json-load).
"""
