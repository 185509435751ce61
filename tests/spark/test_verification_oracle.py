"""Verification of damaged runs beside the same account in SQL, by DuckDB over the same files."""

import random
from collections import Counter

import duckdb

from tests.seeds import seeds
from tests.spark.kit import WrittenLogs, foreign, joined, letter, primary

FATES = ("filtered", "adapter_error", "expired", "late", "unjoinable")
"""The one that no later log can change comes first."""

# Every rule once more, by somebody who has not seen how it is done: what a row of SQL says of an id.
ACCOUNT = """
with clicks as (select id, any_value(primary_id) as primary_id from read_json('{clicks}', columns =
                {{id: 'VARCHAR', primary_id: 'VARCHAR'}}) group by id),
     queries as (select id, list(line) as lines from (select id, to_json(q) as line from
                 read_json('{queries}',
                 columns = {{id: 'VARCHAR', ts_us: 'BIGINT', note: 'VARCHAR'}}) as q) group by id),
     outs as (select id, count(*) as copies, any_value(q.id) as primary_id, any_value(to_json(q)) as line
              from (select id, "primary" as q from read_json('{joined}', columns = {{id: 'VARCHAR',
              "primary": 'STRUCT(id VARCHAR, ts_us BIGINT, note VARCHAR)'}})) group by id),
     letters as (select event.id as id, list(distinct fate) as fates from read_json('{letters}', columns =
                 {{fate: 'VARCHAR', event: 'STRUCT(id VARCHAR)'}}) group by 1)
select coalesce(clicks.id, outs.id, letters.id) as id, case
    when clicks.id is null and outs.id is not null then 'alien'
    when clicks.id is null then 'other_inputs'
    when copies > 1 then 'joined_twice'
    when outs.primary_id <> clicks.primary_id then 'wrong_primary'
    when copies = 1 and not coalesce(list_contains(queries.lines, outs.line), false) then 'altered_primary'
    when copies = 1 then 'joined'
    when fates = ['unjoinable'] and queries.id is not null then 'lost_unjoinable'
    when fates is not null then list_first(list_filter({order}, lambda fate: list_contains(fates, fate)))
    when queries.id is not null then 'pending_joinable'
    else 'pending' end as verdict
from clicks full join outs using (id) full join letters using (id)
     left join queries on queries.id = clicks.primary_id
"""


def damaged(directory, rng):
    """A run's inputs and outputs, in which some of everything is wrong."""
    logs = WrittenLogs(directory)
    queries = [primary(f"q{n}", note=rng.choice("abc")) for n in range(300)]
    known = {q["id"]: q for q in queries}
    clicks = [foreign(f"c{n}", f"q{rng.randrange(400)}") for n in range(2_000)]
    out = {"east": [], "west": []}
    letters = {"east": [], "west": []}
    for click in clicks:
        q = known.get(click["primary_id"])
        where = rng.choice(("east", "west"))
        chance = rng.random()
        if q is not None and chance < 0.8:
            out[where].append(joined(click, q))
        if chance < 0.02:
            out[rng.choice(("east", "west"))].append(joined(click, q or rng.choice(queries)))
        elif 0.8 < chance < 0.82:
            out[where].append(joined(click, rng.choice(queries)))
        elif 0.82 < chance < 0.84:
            out[where].append(joined(click, primary(click["primary_id"], note="changed")))
        if (q is None and chance < 0.7) or chance > 0.9:
            letters[where].append(letter(rng.choice(FATES), click))
            if rng.random() < 0.2:
                letters[rng.choice(("east", "west"))].append(letter("unjoinable", click))
    out["east"] += [joined(foreign(f"alien{n}", "q1"), known["q1"]) for n in range(3)]
    letters["west"] += [letter("late", foreign(f"stranger{n}", "q1")) for n in range(3)]
    again = rng.sample(clicks, 100)
    for name, lines in (("a", clicks[:900] + again), ("b", clicks[900:])):
        rng.shuffle(lines)
        logs.foreign(*lines, name=f"{name}.jsonl")
    logs.primary(*queries[:100], name="first.jsonl")
    logs.primary(*queries[100:], name="second.jsonl")
    for datacenter in out:
        rng.shuffle(out[datacenter])
        logs.joined(datacenter, *out[datacenter])
        logs.letters(datacenter, *letters[datacenter])
    return logs


@seeds(2, 4, 50)
def test_a_damaged_run_gets_the_account_that_sql_gives_it(place, tmp_path, seed):
    logs = damaged(tmp_path, random.Random(seed))
    report, verdicts = logs.ask(place)
    expected = dict(
        duckdb.connect()
        .execute(
            ACCOUNT.format(
                clicks=tmp_path / "clicks" / "*.jsonl",
                queries=tmp_path / "queries" / "*.jsonl",
                joined=logs.out / "joined" / "*" / "*.jsonl",
                letters=logs.out / "dead-letters" / "*" / "*.jsonl",
                order=list(FATES),
            )
        )
        .fetchall()
    )
    assert verdicts == expected
    counts = Counter(expected.values())
    assert len(counts) >= 12, "a seed that damages too little tells nothing"
    assert {name: report.counts.get(name, 0) for name in counts} == counts
    assert report.counts["repeated"] == 100
