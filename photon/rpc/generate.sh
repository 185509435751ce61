#!/bin/sh
# Makes the gRPC code from the .proto files; with --check only tells whether it is fresh.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=.
if [ "${1:-}" = --check ]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
"$python" -m grpc_tools.protoc -I. --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" photon/rpc/*.proto
[ "$out" = . ] && exit 0
for made in "$out"/photon/rpc/*; do
    if ! cmp -s "$made" "photon/rpc/$(basename "$made")"; then
        echo "photon/rpc/$(basename "$made") is stale: run make proto" >&2
        exit 1
    fi
done
