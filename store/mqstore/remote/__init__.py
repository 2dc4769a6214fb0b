"""Client of a server (`mqstore.serve`): the engine contract over a socket, and the store object of `mqstore.connect`.

Nothing here is imported by `import mqstore`.
"""
