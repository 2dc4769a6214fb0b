"""Bytes <-> values of every binary format of a store: pure functions and numpy dtypes.

Nothing here opens a file, reads a clock, takes a lock or starts a thread. One noun, one module: `record` is the
commitlog record, `consumequeue` the 20-byte unit, `checkpoint` the checkpoint page. `properties`, `hosts` and
`messageid` are the pieces inside a record. `javahash` is the hash behind tags codes and index slots, `batch` the wire
form of a batch, `compression` the stored forms of a body. The rules behind them are on the page
`docs/internals/format.md`.
"""
