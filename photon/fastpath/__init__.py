"""The fast path (the paper's section 7): servers send their events straight to event stores and joiners.

Best effort, beside the logs and never instead of them: what it does not get joined, the log path joins, and
what it does, the log path finds registered. Never blocks its caller, decides no fate, and keeps no event that
it could not send at once. The contract is in docs/fast-path.md.
"""

from photon.fastpath.client import FastPath, ForeignCounts, Limits, PrimaryCounts

__all__ = ["FastPath", "ForeignCounts", "Limits", "PrimaryCounts"]
