"""The console: one file a command, named as the command. Parses options, calls, prints.

Never decides anything: rules and processes are in the rooms below.
"""
