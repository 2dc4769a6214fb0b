"""A cluster, for those who have fetched its jars. `make cluster` does, and sets MQSTORE_ROCKETMQ_CLUSTER to their
folder. Without it these tests are skipped."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqstore
from mqstore import Store
from tests.cluster.support import Cluster, running


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    jars = os.environ.get("MQSTORE_ROCKETMQ_CLUSTER")
    if jars is None:
        pytest.skip("MQSTORE_ROCKETMQ_CLUSTER names no folder with RocketMQ's jars: `make cluster` fetches them")
    with running(Path(jars).resolve(), tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
def store(cluster: Cluster) -> Iterator[Store]:
    with mqstore.connect(cluster.name_server) as connected:
        yield connected


@pytest.fixture
def name() -> str:
    """Name of a topic or a group that nobody has used."""
    return f"t{uuid.uuid4().hex[:10]}"
