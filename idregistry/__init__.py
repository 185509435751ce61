"""Room `idregistry`: who was first to register an event id (Photon paper, section 2).

It owns the set of registered ids with their tokens, sharded, each shard replicated by photon.raft. It never
looks at events, joins nothing and writes no output.

Where to look: `client` (the only door for other rooms) with its pure `retries`; `sharding` (2.2.2); `service`
and `server` (gRPC, one replica process); `shard` (the registry thread of Fig. 3) with `batching` (2.2.1),
`boundary` (2.3) and `answers`; `state` (the state machine) with `commands`, `buckets` and `snapshot` (its
bytes in the log and on disk); `messages` (bounds and words that both ends know).
"""
