"""Server of one open store for RocketMQ's clients: `mqstore serve`.

    listening    sockets that clients connect to, and the accept loop
    supervisor   a parent process that keeps the sockets while the server is started again
    connection   one socket: frames in, answers out
    server       listens, hands requests to the handlers below, and limits what clients can make it hold
    registry     clients, their groups and subscriptions
    routes       names: topics, brokers          send     messages in, replies, recalls
    pull         messages out, and waiting       groups   heartbeats, offsets, locks, assignments
    pop          messages out, by receipt
    admin        changes and clients, for mqadmin        queries  messages, offsets and statistics, for mqadmin

One thread runs all of it, in an event loop. Nothing in it waits for the disk.
"""

from mqstore.serve.auth import Users
from mqstore.serve.listening import (
    Address,
    bind_all,
    inherited,
    new_loop,
    parsed_address,
    refuse_other_machines,
    tls_context,
    unix_path,
)
from mqstore.serve.server import Limits, Server
from mqstore.serve.supervisor import supervise

__all__ = [
    "Address",
    "Limits",
    "Server",
    "Users",
    "bind_all",
    "inherited",
    "new_loop",
    "parsed_address",
    "refuse_other_machines",
    "supervise",
    "tls_context",
    "unix_path",
]
