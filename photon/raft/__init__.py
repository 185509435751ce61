"""Room `raft`: one port, `ReplicatedLog`, and its engine on pysyncobj, made safe from outside the library.

It owns: a durable, replicated, ordered log of opaque commands, and the state machine that follows it.
It never knows what a command means (it knows no ids), and never lets anything unauthenticated near the log.

Who uses it writes a `port.StateMachine` and takes a `port.ReplicatedLog` from `host.RaftHost.add_group`.
Photon section 3.1 (the IdRegistry sits on a store that is "consistently replicated", by Paxos or its like).

Where to look: `port` (the contract), `host` (thread and sockets), `replica` (one group on one node:
proposals, apply, snapshots), `core` (the only file that knows pysyncobj's privates), `guards` (the pure
rules which close the library's holes), `store` (what lies on disk: `journal`, `ballot`, `snapshot`),
`codec`, `frames`, `handshake`, `transport` (what goes over the wire).
"""
