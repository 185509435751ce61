"""Room `raft`: one port, `ReplicatedLog`, and its engine on pysyncobj, made safe from outside the library.

It owns: a durable, replicated, ordered log of opaque commands, and the state machine that follows it.
It never knows what a command means (it knows no ids), and never lets anything unauthenticated near the log.

Who uses it writes a `port.StateMachine` and takes a `port.ReplicatedLog` from `host.RaftHost.add_group`.
Photon section 3.1 (the IdRegistry sits on a store that is "consistently replicated", by Paxos or its like).

Where to look: `port` (the contract), `host` (thread and sockets; groups and peers that come and go),
`replica` (one group on one node: proposals, apply, what it leads), `follower` (what it takes in from a
leader), `sender` (what it sends as one), `membership` (who belongs, when a group begins, who may lead),
`snapshot` (goes out, comes in, and becomes the state), `core` (the only file that knows pysyncobj's
privates), `rules.guards` (which close the library's holes), `rules.members`, `rules.codec` (the messages),
`journal` and `store` (what lies on disk, of a replica and of its host), `handshake`, `links`, `transport`,
`addresses` (what goes over the wire).
"""
