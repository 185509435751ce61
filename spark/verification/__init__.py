"""`photon verify`: every foreign event accounted for (paper 3.3.3)."""
