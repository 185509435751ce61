"""`photon health` asks the port that it is given, or says that there is no such port."""

import pytest
from click.testing import CliRunner

from photon.cli.health import command
from photon.core.errors import SettingsError


@pytest.mark.parametrize(
    "address", ["127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1", "127.0.0.1:x", "::1", "::1:7400"]
)
def test_an_address_without_a_port_that_there_can_be_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match=r"ADDRESS: .* is no address: give HOST:PORT"):
        CliRunner().invoke(command, [address, "--timeout", "1"], catch_exceptions=False)
