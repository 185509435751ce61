"""`photon logmap build`: log file maps made by Spark (paper 3.4.2)."""
