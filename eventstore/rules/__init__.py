"""Entries of the log file map, and the ring over which the cache is spread (paper 3.4). Pure."""
