"""What crosses the network: .proto files, the code generated from them, channels, servers and health.

A message carries a batch as packed columns; an outcome column answers each event on its own. Knows no
rules: a room's service and client give the columns their meaning.
"""
