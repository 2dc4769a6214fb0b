"""Client of an Apache RocketMQ cluster: the engine contract by RocketMQ's own requests (remoting-server, section 13).

broker     `ClusterBroker`, the contract                  routes    topics, queues and their numbers
sends      puts and half messages; reads, pops, letters   links     connections, background thread
tables     topics, groups, members, locks                 degrade   differences from a store
"""
