"""Client of a server (`mqstore.serve`): the engine contract over a socket, and the store object of `mqstore.connect`.

    connection   the connection of a process: calls in flight, answers, reconnecting; a `line` is one of its sockets
    broker       `BrokerContract` by the table of calls (`remoting/calls.py`); `messages` has the calls of each message
    store        `connect`, and the store object; `shared` has servers that start by themselves

Nothing here is imported by `import mqstore`.
"""
