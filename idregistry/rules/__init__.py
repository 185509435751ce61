"""What a shard and the directory decide (paper 2): commands, state, ids in memory, sharding, sets. Pure.

Applying a command reads no clock: the leader stamps time into it.
"""
