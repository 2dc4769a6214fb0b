"""Message store: commitlog, consume queues, index, dispatch, recovery, retention and durability.

This room knows files and layout, but no consumer groups. The room above decides who gets which message, and when.
"""
