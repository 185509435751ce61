"""S3 on loopback (moto's server), in a process of its own."""

import subprocess
import sys
import urllib.request

from tests.ports import paired_ports
from tests.waiting import wait_until

KEYS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}


class S3:
    def __init__(self, bucket):
        (port,) = paired_ports(1)
        self.endpoint, self.bucket = f"http://127.0.0.1:{port}", bucket
        serve = ("-c", f"from moto.server import main; main(['-p', '{port}'])")
        self._process = subprocess.Popen(
            [sys.executable, *serve], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._made, 60, "moto's server to start")

    def _made(self):
        asked = urllib.request.Request(f"{self.endpoint}/{self.bucket}", method="PUT")
        try:
            with urllib.request.urlopen(asked, timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def uri(self, prefix, options=""):
        given = "&".join(f"{name}={value}" for name, value in KEYS.items())
        return f"s3://{self.bucket}/{prefix}?endpoint={self.endpoint}&allow_http=true&{given}{options}"

    def objects(self, prefix):
        """The content of each object."""
        import obstore

        listed = [one["path"] for part in obstore.list(self._store, prefix) for one in part]
        return {path: bytes(obstore.get(self._store, path).bytes()) for path in listed}

    def put(self, path, content):
        import obstore

        obstore.put(self._store, path, content)

    @property
    def _store(self):
        from obstore.store import S3Store

        return S3Store(self.bucket, endpoint=self.endpoint, client_options={"allow_http": True}, **KEYS)

    def close(self):
        self._process.kill()
        self._process.wait()
