"""Pathway: its incremental engine over the files, without persistence (with it, it is slower), as many
threads as there are cores. It keeps all of both sides in memory for as long as it runs."""

import os
import sys
from pathlib import Path


def main(logs: Path, out: Path) -> None:
    """Joins what is there now, and ends."""
    os.environ.setdefault("PATHWAY_THREADS", str(os.cpu_count() or 1))
    import pathway as pw

    joined = out / "joined"
    joined.mkdir(parents=True)

    class Query(pw.Schema):  # type: ignore[misc]
        query_id: str
        query_ts_us: int
        query_payload: pw.Json

    class Click(pw.Schema):  # type: ignore[misc]
        click_id: str
        primary_id: str
        ts_us: int
        payload: pw.Json

    queries = pw.io.jsonlines.read(
        str(logs / "queries"),
        schema=Query,
        mode="static",
        json_field_paths={"query_id": "/id", "query_ts_us": "/ts_us", "query_payload": "/payload"},
    )
    clicks = pw.io.jsonlines.read(
        str(logs / "clicks"), schema=Click, mode="static", json_field_paths={"click_id": "/id"}
    )
    pairs = clicks.join(queries, clicks.primary_id == queries.query_id).select(*clicks, *queries)
    pw.io.jsonlines.write(pairs, str(joined / "joined.jsonl"))
    pw.run(monitoring_level=pw.MonitoringLevel.NONE)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
