"""What of this machine a container engine could change: its firewall, forwarding, interfaces, routes."""

import shutil
import subprocess
from pathlib import Path

_SWITCHES = (
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/net/ipv6/conf/all/forwarding",
    "/proc/sys/net/ipv6/conf/default/forwarding",
    "/proc/sys/net/bridge/bridge-nf-call-iptables",
    "/proc/sys/net/bridge/bridge-nf-call-ip6tables",
)
_TABLES = ("iptables-save", "ip6tables-save", "iptables-legacy-save", "ip6tables-legacy-save")


def snapshot() -> dict[str, str]:
    """To be compared before and after."""
    found = {name: Path(name).read_text().strip() for name in _SWITCHES if Path(name).exists()}
    for command in _TABLES:
        if shutil.which(command):
            found[command] = _rules(_output(command))
    found["interfaces"] = "\n".join(sorted(path.name for path in Path("/sys/class/net").iterdir()))
    found["routes"] = Path("/proc/net/route").read_text()
    return found


def _rules(saved: str) -> str:
    """Without comments, which have the time, and the counters of packets."""
    lines = (line.partition("[")[0].strip() for line in saved.splitlines() if not line.startswith("#"))
    return "\n".join(lines)


def _output(command: str) -> str:
    return subprocess.run([command], capture_output=True, text=True, check=True, timeout=30).stdout
