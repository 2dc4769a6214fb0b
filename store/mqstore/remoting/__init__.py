"""RocketMQ's remoting protocol as bytes and tables: frames, request codes and their fields, bodies.

Nothing here opens a socket or knows a store. The server is `mqstore.serve`. The specification is
`remoting-server.md`; what real clients were seen to do decides where it is silent.
"""
