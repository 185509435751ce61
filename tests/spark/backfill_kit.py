"""A job of a backfill, for tests of what is done with it."""

BEGUN_US = 1_700_000_000_000_000


def planned_job(incarnation, **more):
    from spark.backfill.job import Job

    facts = {"reading": "", "spark": "", "output_format": "jsonl", "patterns": ((), ()), "registry": ""}
    numbers = {"incarnation": incarnation, "begun_us": BEGUN_US, "buckets": 3, "first_number": 5}
    return Job(**facts | numbers | {"primary": (), "foreign": ()} | more)
