"""The message store: commitlog, consume queues, index, dispatch, recovery, retention. What is durable.

Knows files and layout. Knows nothing of consumer groups: who gets which message, and when, is the business of the room
above.
"""
