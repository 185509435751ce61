"""A second set of registry processes is let in, by the commands of the docs, while events are joined."""

import json

import pytest

from tests.cluster.roles_kit import Roles, Truth
from tests.health import SERVING
from tests.ports import paired_ports
from tests.system import photon
from tests.waiting import wait_until


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_set_named_in_the_settings_takes_its_part_of_the_events_and_is_given_up_again(tmp_path):
    roles = Roles(tmp_path, datacenters=("east",), registry={"clock_skew_s": 0.5})
    roles.start()
    try:
        roles.await_health(SERVING)
        truth = Truth(roles)
        truth.write(200)
        truth.await_all()
        ports = iter(paired_ports(2))
        grpc, raft = (f"127.0.0.1:{next(ports)}" for _ in range(2))
        with roles.config.open("a") as config:
            config.write(f'[replicas.s0]\ndatacenter = "east"\ngrpc = "{grpc}"\nraft = "{raft}"\nset = "b"\n')
        roles.replicas["s0"] = grpc, raft

        def told(*words):
            done = photon(*words, "--config", roles.config)
            assert done.returncode == 0, done.stderr
            return done.stdout

        def status():
            return json.loads(photon("status", "--json", "--config", roles.config).stdout)

        def sets(replica):
            return {name: one["shards"] for name, one in status()[replica]["sets"].items()}

        roles.start(("registry", "s0"))
        assert "set b is there, with s0" in told("registry", "add-set", "b")
        told("reshard", "2")
        wait_until(lambda: (status()["registry-s0"] or {}).get("sets"))
        assert sets("registry-s0") == sets("registry-r0") == {"main": [0], "b": [1]}
        assert "set b: shards 1" in photon("status", "--config", roles.config).stdout

        def taken():
            truth.write(50)
            return sum(shard["ids"] for shard in status()["registry-s0"]["shards"])

        wait_until(taken)
        truth.await_all()
        assert "next: photon reshard 2" in told("registry", "retire-set", "b")
        told("reshard", "2")
        assert sets("registry-r0") == {"main": [0, 2], "b": [1]}
        assert "set b: shards 1, RETIRING" in photon("status", "--config", roles.config).stdout
        truth.write(200)
        truth.await_all()
        wrong = photon("registry", "add-set", "c", "--config", roles.config)
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
        assert 'has set = "c"' in wrong.stderr
    finally:
        roles.kill()
