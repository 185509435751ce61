"""The engine leans on private names of one version of pysyncobj: this fails when they move."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pysyncobj import SyncObj, SyncObjConf, syncobj
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from photon.raft import core


def test_the_installed_version_is_the_pinned_one() -> None:
    assert VERSION == core.PINNED_VERSION == "0.3.17"


SOURCE = Path(core.__file__).read_text()
REPLACED = {name for name in vars(core.RaftCore) if name.startswith("_SyncObj__")} | {"_checkCommandsToApply"}
USED = set(re.findall(r"_SyncObj__\w+", SOURCE)) - REPLACED


@pytest.mark.parametrize("name", sorted(USED))
def test_the_library_still_has_the_privates_that_the_core_uses(name: str) -> None:
    node = SyncObj(
        None, [], SyncObjConf(autoTick=False, appendEntriesUseBatch=True), transport=Transport(None, None, [])
    )
    assert hasattr(node, name)


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_the_library_still_has_and_calls_the_methods_the_core_replaces(name: str) -> None:
    assert callable(getattr(SyncObj, name))
    assert f"self.{name.removeprefix('_SyncObj')}" in inspect.getsource(syncobj)


def test_the_librarys_broken_inet_ntop_is_taken_back() -> None:
    """It is meant for Windows, and put in place everywhere."""
    program = (
        "import socket, psutil, pysyncobj, photon.raft.core\n"
        "packed = socket.inet_pton(socket.AF_INET6, 'fe80::1')\n"
        "assert socket.inet_ntop(socket.AF_INET6, packed) == 'fe80::1'\n"
        "with socket.create_server(('127.0.0.1', 0)) as server:\n"
        "    port = server.getsockname()[1]\n"
        "    assert port in [c.laddr.port for c in psutil.Process().net_connections()]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_library_reads_one_clock_which_a_simulation_can_replace() -> None:
    assert callable(syncobj.monotonicTime)
    tree = ast.parse(inspect.getsource(syncobj))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "time"]
    assert not [call for call in calls if isinstance(call.value, ast.Name) and call.value.id == "time"]


def test_messages_reach_the_handlers_that_the_guards_stand_before() -> None:
    handler = inspect.getsource(SyncObj._SyncObj__onMessageReceived)
    kinds = set(re.findall(r"message\['type'\] == '(\w+)'", handler))
    assert kinds == {
        "append_entries",
        "apply_command",
        "apply_command_response",
        "next_node_idx",
        "request_vote",
        "response_vote",
        "timeout_now",
    }
