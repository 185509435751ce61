#!/bin/sh
# PostgreSQL for MillWheel's state, to try it with: a primary, or with PRIMARY a standby of it, which confirms each commit.
# It trusts whoever is on its network. CONFIRMS: synchronous_standby_names.
set -eu
data=/var/lib/postgresql/data/millwheel
if [ ! -d "$data" ]; then
    rm -rf "$data.new"
    if [ -n "${PRIMARY:-}" ]; then
        until pg_basebackup --host="$PRIMARY" --username=photon --pgdata="$data.new" --write-recovery-conf --checkpoint=fast; do
            rm -rf "$data.new"
            sleep 1
        done
    else
        initdb --username=photon --auth=trust --encoding=UTF8 --pgdata="$data.new" > /dev/null
        printf 'host all all samenet trust\nhost replication all samenet trust\n' >> "$data.new/pg_hba.conf"
    fi
    mv "$data.new" "$data"
fi
exec postgres -D "$data" -c listen_addresses='*' -c unix_socket_directories='' -c synchronous_standby_names="${CONFIRMS:-}"
