"""Reads the foreign logs and hands every event to the joiners until it has a fate (paper 3.2).

One process, or several workers; each has the files whose names say so, and a ledger of its own.

Keeps file offsets, events that wait for a retry, and the counts of all fates; never joins or registers.
"""
