"""The ground every room stands on: ids, columns, fates, errors, time, settings, the journal (paper 3.1).

Never talks to the network and knows no other room.
"""
