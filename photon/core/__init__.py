"""The pure ground every room stands on: events and ids, clock, errors, settings, log files.

Never talks to the network and knows no other room. Photon paper, section 3.1.
"""
