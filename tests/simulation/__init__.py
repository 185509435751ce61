"""A seeded simulation of the replicated log, and of a registry whole: the production classes in one
thread; time, network and disks are played. README.md says what is played, and which seed notices which hole.

A seed decides everything. `python -m tests.simulation --seed N --replicas 5 -v` plays one again and tells
what happens in it.

clock     virtual seconds, each node with a rate of its own
disks     what a crash, a power loss, an error or a lie of the disk leaves behind
network   connections in order, as in life; or messages one by one, late, twice, in any order
machines  the state machines under test, and what may be asked of them
clients   who asks, hears, and asks again with the same token
faults    what goes wrong, and when
operator  who adds, promotes and removes replicas meanwhile
cluster   the nodes of one group and the loop; `play` runs a seed
hosts     a process of a registry with all of its groups; `tasks`: calls that block, by the world's clock
whole     three of them, their clients and the loop; `play` runs a seed
crash_points  one replica's disk, ended at every point in turn
history   the events of a run (or of real processes), and nothing else, is what
checkers  judges; `processes` makes such histories with real servers behind a `proxy`
holes     switches that take guards away again, to see that the checkers notice
caught    which seed notices which
"""
