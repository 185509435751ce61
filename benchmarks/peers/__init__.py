"""What users would take instead, each a module that joins the same logs, run as a process of its own.

    python -m benchmarks.peers.NAME LOGS OUT

reads LOGS/queries/*.jsonl and LOGS/clicks/*.jsonl and writes JSON lines below OUT/joined, a line a click:

    {"click_id": .., "primary_id": .., "ts_us": .., "payload": {..},
     "query_id": .., "query_ts_us": .., "query_payload": {..}}

in files of any name that ends in .json or .jsonl. Exit status 0 when all is joined. `photon bench join
--peers` runs them and compares what they wrote with the truth.
"""
