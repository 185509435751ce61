"""Log lines as DataFrames, by Photon's own formats."""
