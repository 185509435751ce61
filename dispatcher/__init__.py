"""Reads the foreign logs and hands every event to the joiners until it has a fate (paper 3.2).

Keeps file offsets, events that wait for a retry, and the counts of all fates; never joins or registers.
"""
