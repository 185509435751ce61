"""Several datacenters on this machine to look at: what feeds, shows and breaks them (paper 4).

Never part of a system that serves.
"""
