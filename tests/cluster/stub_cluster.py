"""`tandem up` with stub hosts, as a process of its own: python stub_cluster.py HTTP_PORT GRPC_PORT RUN_FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.launcher import Hosts
from cluster.progress import Progress
from cluster.serving import run_until_signal
from cluster.supervisor import supervise

HOSTS = Hosts(worker="stub_hosts:StubWorkerHost", router="stub_hosts:StubRouterHost")

if __name__ == "__main__":
    http_port, grpc_port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    (folder / "logs").mkdir()
    config = ClusterConfig(folder, http_port=http_port, grpc_port=grpc_port, drain_timeout_s=1.0)

    def work() -> int:
        run_until_signal(config, folder, Progress(), True, HOSTS)
        return 0

    sys.exit(supervise(work))
