"""Certificates for tests, made by the `openssl` command when they are asked for. Two CAs, and ill ones."""

import shutil
import subprocess
from pathlib import Path

import pytest

from photon.rpc.network import Tls

_EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Authority:
    """A CA in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the openssl command makes the certificates, and is not here")
        directory.mkdir(parents=True)
        self._directory = directory
        self.ca = directory / "ca.pem"
        self.ca_key = directory / "ca.key"
        self.run("req", "-x509", *_EC, "-keyout", self.ca_key, "-out", self.ca, "-subj", "/CN=a CA")

    def issue(
        self,
        name: str,
        days: int = 30,
        usage: str = "serverAuth,clientAuth",
        carries: str = "DNS:photon,DNS:localhost,IP:127.0.0.1",
        tls_name: str = "",
    ) -> Tls:
        """Of one node, which carries these names; with days below 0 it has expired.

        `tls_name`: what its clients look for.
        """
        cert, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        request = self._directory / f"{name}.csr"
        self.run("req", *_EC, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        extensions = self._directory / f"{name}.ext"
        names = f"subjectAltName={carries}\n" if carries else ""
        extensions.write_text(f"extendedKeyUsage={usage}\n{names}")
        signing = ["-CA", self.ca, "-CAkey", self.ca_key, "-CAcreateserial", "-days", days]
        self.run("x509", "-req", "-in", request, *signing, "-extfile", extensions, "-out", cert)
        return Tls(cert, key, self.ca, tls_name)

    def run(self, *arguments: object) -> None:
        """The openssl command."""
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
