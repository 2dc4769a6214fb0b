"""Client of a server (`mqstore.serve`): the engine contract over a socket, and the store object of `mqstore.connect`.

    connection   one socket for a process: calls in flight, answers, reconnecting
    broker       `BrokerContract` by the table of calls (`remoting/calls.py`)
    store        `connect`, and the store object

Nothing here is imported by `import mqstore`.
"""
