"""Bytes <-> values of every binary format of a store: pure functions and numpy dtypes.

Nothing here opens a file, reads a clock, takes a lock or starts a thread. One noun, one module: `record` is the
commitlog record, `consumequeue` the 20-byte unit, `checkpoint` the checkpoint page. `properties`, `hosts` and
`messageid` are parts of a record, `compression` the stored forms of a body. `javahash` is the hash of tags codes and
index slots. The page `docs/internals/format.md` has the rules.
"""
