"""The rules and files of `photon recover`: joins again what was registered and never written (paper 3.3.3).

Never releases an id whose incarnation is not fenced.
"""
