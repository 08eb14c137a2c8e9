"""`tandem up` with stub processes, as a process of its own: python stub_cluster.py PORT PORT PORT FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cluster.actors import ProcessPaths
from cluster.config import ClusterConfig
from cluster.folders import run_folders
from cluster.progress import Progress
from cluster.serving import serve
from cluster.supervisor import supervise

STUBS = ProcessPaths(worker="stub_processes:StubWorkerProcess", router="stub_processes:StubRouterProcess")


def main() -> int:
    config = ClusterConfig(
        Path(sys.argv[4]),
        http_port=int(sys.argv[1]),
        grpc_port=int(sys.argv[2]),
        registry_port=int(sys.argv[3]),
        controller_port=0,
        redis_url=os.environ["TANDEM_REDIS_URL"] or None,
        drain_timeout_s=1.0,
    )
    with run_folders() as folders:

        def work() -> int:
            serve(config, folders, Progress(), True, STUBS)
            return 0

        return supervise(work)


if __name__ == "__main__":
    sys.exit(main())
