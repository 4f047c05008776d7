"""`python -m tests.integration.ray_cluster ADDRESS CPUS...`: a Ray cluster on this machine, one node for each number.

Prints one JSON object, waits for the end of its input, and stops the cluster. All its processes work in a private
folder under /tmp, which is removed.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from typing import Any

import psutil
from ray.cluster_utils import Cluster


def pid_of(node: Any, kind: str) -> int:
    return int(node.all_processes[kind][0].process.pid)


def main(address: str, cpus: list[int]) -> None:
    # A short path, because Ray puts Unix sockets into it.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    common = {"object_store_memory": 80 * 2**20, "node_ip_address": address, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": cpus[0], "temp_dir": folder, **common}, shutdown_at_exit=False
    )
    try:
        nodes = [cluster.add_node(num_cpus=number, **common) for number in cpus[1:]]
        raylets = [pid_of(node, "raylet") for node in [cluster.head_node, *nodes]]
        gcs = pid_of(cluster.head_node, "gcs_server")
        print(json.dumps({"address": cluster.address, "folder": folder, "raylets": raylets, "gcs": gcs}), flush=True)
        sys.stdin.read()
    finally:
        mine = psutil.Process().children(recursive=True)
        for process in mine:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])
