"""Photon: a geo-replicated joiner of continuous streams (Ananthanarayanan et al., SIGMOD 2013)."""

__version__ = "0.1.0"
