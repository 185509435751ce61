"""Measurements of the rooms. Each prints the machine; figures are compared as ratios taken in one run."""
