"""Files of a durable store: segments, descriptors, syncing, locks, atomic JSON.

Nothing here knows messages. Every call that reads or changes a file goes through `filesystem.FileSystem`, so that a
test can record or refuse it. The other modules define the order of such calls (format#directory, format#checkpoint,
format#flush, format#json-load).
"""
