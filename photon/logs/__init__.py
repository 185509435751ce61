"""Log files: found, followed through rotation, unpacked, cut into lines, parsed, written (paper 3.2).

Never talks to the network, and knows no fate.
"""
