"""The only wiring: commands, roles as processes, the local cluster, the console, the demo, generated logs.

Nothing imports this room. Commands are loaded when they are called, so that `photon --help` is quick.
"""
