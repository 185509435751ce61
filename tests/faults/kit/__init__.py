"""What the tests under faults share: proxies between datacenters, live logs with their truth, a running
system, and checkers of the design's invariants over all that it has written."""
