"""`photon recover`: what was registered and lost, and the lines to join again (paper 3.3.3)."""
