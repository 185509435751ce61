"""Where events come from beside log files, and where joined events go beside the joined log.

`ports` says what a source and a sink are; `importer` copies sources into log files, from which all else
works as with any logs.
"""
