import itertools

import pytest

from tests.connect.broker import start_broker
from tests.connect.postgresql import Postgresql, need_server
from tests.connect.s3 import S3
from tests.millwheel import conftest as millwheel

system = millwheel.system

_numbers = itertools.count()


@pytest.fixture(scope="session")
def broker(tmp_path_factory):
    one = start_broker(tmp_path_factory.mktemp("kafka") / "broker")
    yield one
    one.close()


@pytest.fixture
def topic(broker):
    """A function that makes a topic of so many partitions; its name."""
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": broker.address})

    def make(partitions=1):
        name = f"topic.{next(_numbers)}"
        admin.create_topics([NewTopic(name, partitions, 1)])[name].result(30)
        return name

    return make


@pytest.fixture(scope="session")
def postgresql():
    one = Postgresql(need_server())
    yield one
    one.close()


@pytest.fixture(scope="session")
def s3():
    one = S3("bucket")
    yield one
    one.close()


@pytest.fixture
def iceberg(tmp_path):
    """The options of a catalog of its own, in SQLite."""
    return f"?type=sql&uri=sqlite:///{tmp_path}/catalog.db&warehouse=file://{tmp_path}/warehouse"
