"""Room `raft`: one port, `ReplicatedLog`, and its engine on pysyncobj, made safe from outside the library.

It owns: a durable, replicated, ordered log of opaque commands, and the state machine that follows it.
It never knows what a command means (it knows no ids), and never lets anything unauthenticated near the log.

Who uses it writes a `port.StateMachine` and takes a `port.ReplicatedLog` from `host.RaftHost.add_group`.
Photon section 3.1 (the IdRegistry sits on a store that is "consistently replicated", by Paxos or its like).

Where to look: `port` (the contract), `host` (thread and sockets; groups and peers that come and go), `home`
(what a host remembers: who it is, whom it met, which groups it holds), `replica` (one group on one node:
proposals, apply, what it leads), `follower` (what it takes in from a leader), `elections` (who may lead),
`members` and `membership` (who belongs, and when a group begins), `sender`, `compaction`, `installing` (a
snapshot goes out, and becomes the state), `core` (the only file that knows pysyncobj's privates), `guards`
(the pure rules which close the library's holes), `store` (what lies on disk: `journal`, term and vote,
`snapshot`), `codec` (the messages), `handshake`, `links`, `transport`, `addresses` (what goes over the wire).
"""
