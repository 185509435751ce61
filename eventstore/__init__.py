"""Finds primary events by their ids: a cache of the recent ones, and the logs themselves for the others.

Owns the reader of the primary logs, the cache and the log file map. Never changes a log, and never says
that an event is absent before every byte that was in the logs has been read. Photon paper, section 3.4.
"""
