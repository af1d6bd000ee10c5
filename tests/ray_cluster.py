"""A Ray cluster of two nodes on this machine, for the tests of a module."""

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """:return: the cluster, whose nodes have two CPUs each; this process is connected to it"""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        # workers find the test modules, whose functions are sent by name
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.getcwd()])}},
        )
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
