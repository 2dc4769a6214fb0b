"""Client of an Apache RocketMQ cluster: the engine contract by RocketMQ's own requests (remoting-server, 13)."""
