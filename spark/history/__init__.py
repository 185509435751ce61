"""MillWheel's computations over months of logs at once, on Spark."""
