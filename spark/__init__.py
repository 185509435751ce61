"""What is done with whole logs, on PySpark (paper 3.3.3, 3.4.2).

`options` and `session` start Spark, `reading` makes DataFrames of log lines, `registered` one of the
IdRegistry; `verification`, `recovery`, `logmap` and `backfill` are a command each. Only this package needs
Java and the `spark` extra, when a command is called; verification does without, unless the logs are large.
"""
