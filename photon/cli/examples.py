"""What `photon COMMAND --help` ends with: a call or two that people make."""

from typing import Final

EXAMPLES: Final = {
    "init": ("init --primary 'queries/*.jsonl' --foreign 'clicks/*.jsonl'",),
    "join": (
        "join --primary 'queries/*.jsonl' --foreign 'clicks/*.jsonl' --out out --config photon.toml",
        "join --primary queries --foreign clicks --out out --datacenters 2 --follow",
        "join --check --primary queries --foreign clicks --config photon.toml",
    ),
    "generate": (
        "generate --out logs --queries 20000 --clicks 4000 --duplicates 0.02",
        "generate --out logs --rate 2000 --duration 60",
    ),
    "dev": ("dev --datacenters 2", "dev --millwheel"),
    "demo": ("demo",),
    "bench": ("bench --quick", "bench registry"),
    "status": ("status --work out", "status --config photon.toml --watch"),
    "console": (
        "console --work out",
        "console --config photon.toml --allow-actions",
    ),
    "health": ("health 127.0.0.1:7430",),
    "explain": (
        "explain 10.1.0.1:1001:1700000024308642 --work out",
        "explain click-1 click-2 --config photon.toml --json",
    ),
    "dead-letters": (
        "dead-letters list --out out",
        "dead-letters show --out out --fate unjoinable --limit 3",
        "dead-letters replay --out out --fate unjoinable",
    ),
    "verify": ("verify --primary queries --foreign clicks --out out --complete",),
    "recover": (
        "recover --foreign clicks --work out --details missing",
        "recover --foreign clicks --work out --apply",
    ),
    "backfill": (
        "backfill --primary 'old/queries/*' --foreign 'old/clicks/*' --out out",
        "backfill --follow --primary 'queries/*' --foreign 'clicks/*' --out out --config photon.toml",
    ),
    "logmap": (
        "logmap build --primary 'queries/*' --map built",
        "logmap load --map built --into work/east/eventstore/map",
    ),
    "millwheel": (
        "millwheel windows --input 'joined/*/*' --key payload.ad --time ts_us --window 1h --work wheel",
        "millwheel run visits:TOPOLOGY --work wheel --workers 2 --follow",
        "millwheel run visits:TOPOLOGY --work w --follow --store postgresql://db/w --machine wheel-1:7400",
        "millwheel history visits:TOPOLOGY --out old --goes-on",
        "millwheel spark visits:TOPOLOGY --work wheel --master spark://host:7077",
    ),
    "adapter": ("adapter test --use mine:Adapter --primary queries.jsonl --foreign clicks.jsonl",),
    "connect": (
        "connect test kafka://localhost:9092/clicks --as source",
        "connect test file:///tmp/joined --read 'cat /tmp/joined/*/*.jsonl'",
    ),
    "certs": ("certs --out tls --name db1.example --name 10.0.0.7",),
    "reshard": ("reshard 4 --work out", "reshard 8 --config photon.toml --at 2026-01-31T12:00:00+00:00"),
    "drain": ("drain dispatcher-east-1 --config photon.toml",),
    "registry": (
        "registry serve --config photon.toml --name r0",
        "registry add-set b --config photon.toml",
        "registry scan 0 --work out",
    ),
    "eventstore": ("eventstore serve --config photon.toml --name east",),
    "joiner": ("joiner serve --config photon.toml --name east/1",),
    "importer": ("importer serve --config photon.toml --name east",),
    "dispatcher": (
        "dispatcher serve --config photon.toml --name east",
        "dispatcher init --from now --work out",
    ),
}
