"""Room `idregistry`: who was first to register an event id (Photon paper, section 2).

It owns the set of registered ids with their tokens, sharded, each shard replicated by photon.raft. It never
looks at events, joins nothing and writes no output.

Where to look: `client` (the only door for other rooms) with its `rounds` of tries and `routes` (2.2.2);
`server` (one replica process) with `service` (gRPC); `shard` (the registry thread of Fig. 3, batching,
2.2.1); `coordinator` (a replica's groups and peers, as the directory says, and the directory's leader). In
`rules`: `state` (the state machine of a shard) over `table`, `segments`, `filters` and `packing` (where ids
are; `segment_file` keeps the old ones on the disk) with `snapshots`,
`sharding`, `directory` (group 0: configuration, replicas, leases, fences), `steward` (who belongs to a
group and leads it; the boundary, 2.3), `commands` (what stands in the logs).
"""
