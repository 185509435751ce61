"""DuckDB: one hash join over all files, once. No peer of a streaming system, but the floor below them all:
it knows no growth, no late events, no restart, and writes no event before it has read every other."""

import sys
from pathlib import Path


def main(logs: Path, out: Path) -> None:
    """Joins what is there now."""
    import duckdb

    joined = out / "joined"
    joined.mkdir(parents=True)
    connection = duckdb.connect()
    connection.execute(f"SET temp_directory = '{out / 'spill'}'")
    columns = "columns = {id: 'VARCHAR', ts_us: 'BIGINT', payload: 'JSON'"
    connection.execute(
        f"""
        COPY (
            SELECT c.id AS click_id, c.primary_id, c.ts_us, c.payload,
                   q.id AS query_id, q.ts_us AS query_ts_us, q.payload AS query_payload
            FROM read_ndjson('{logs}/clicks/*.jsonl', {columns}, primary_id: 'VARCHAR'}}) c
            JOIN read_ndjson('{logs}/queries/*.jsonl', {columns}}}) q ON c.primary_id = q.id
        ) TO '{joined / "joined.jsonl"}' (FORMAT json)
        """
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
