"""Accounts for every foreign event of a run from the logs alone, on PySpark (paper 3.3.3).

Reads inputs and outputs of `photon join`; never joins, registers or writes to either. Only this package needs
Java and the `spark` extra, and only when a command is called.
"""
