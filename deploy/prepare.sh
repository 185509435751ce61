#!/bin/sh
# Once, as root: a CA in /ca; for each name its own certificate, the CA's, and for each datacenter the secret of the
# registry's replicas, in /certs/<name>; volumes of logs for the user that writes them. The CA's key stays in /ca,
# which nothing else mounts.
set -eu
umask 077
chown photon: /logs/*
cd /ca
[ -s secret ] || head -c 32 /dev/urandom | sha256sum | cut -d' ' -f1 >secret
for name; do
    [ -s "/certs/$name/node.pem" ] && continue
    photon certs --out /ca --name "$name" >/dev/null
    owner=photon
    if [ "$name" = monitoring ]; then
        owner=65534 # nobody, as whom Prometheus runs
    else
        cp secret "/certs/$name/"
    fi
    cp ca.pem "/certs/$name/"
    cp "$name.key" "/certs/$name/node.key"
    cp "$name.pem" "/certs/$name/node.pem.new"
    chown -R "$owner" "/certs/$name"
    mv "/certs/$name/node.pem.new" "/certs/$name/node.pem" # last: it says that all is there, and whose it is
    echo "certificate of $name made"
done
