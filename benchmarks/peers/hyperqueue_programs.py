"""HyperQueue: a server and a worker with two cores in this process, a program a cell."""

import sys

from grid import HERE, cells, result
from hyperqueue import Job, LocalCluster
from hyperqueue.cluster import WorkerConfig

with LocalCluster(str(HERE / "hq"), WorkerConfig(cores=2)) as cluster:
    job = Job(default_workdir=HERE)
    for cell in cells():
        file = result(cell["lr"], cell["seed"])
        job.program([sys.executable, "tasks.py", *map(str, cell.values()), str(file)])
    client = cluster.client()
    client.wait_for_jobs([client.submit(job)])
