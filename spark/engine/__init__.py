"""Starting Spark for one command, on this machine or on a cluster, and ending it."""
