"""The only wiring: commands, roles as processes, the local cluster, the console, the demo and the benchmarks.

Nothing imports this room. Commands are loaded when they are called, so that `photon --help` is quick.
"""
