"""Room `idregistry`: who was first to register an event id (Photon paper, section 2).

It owns the set of registered ids with their tokens, sharded, each shard replicated by photon.raft. It never
looks at events, joins nothing and writes no output.

Where to look: `client` (the only door for other rooms) with its `rounds`, `routes` and pure `retries`;
`configuration` and `sharding` (2.2.2); `service`, `directory_service` and `server` (gRPC, one replica
process) with `hosting` (its groups and peers); `shard` (the registry thread of Fig. 3) with `batching`
(2.2.1), `upkeep` and `clocks` (2.3); `directory` (group 0: configuration, replicas, leases, fences) with
`directory_commands` and its leader's `coordinator`; `placement` (who belongs to a group and leads it);
`state` (the state machine of a shard) with `commands` and what it is made of; `messages` (bounds and words
that both ends know).
"""
