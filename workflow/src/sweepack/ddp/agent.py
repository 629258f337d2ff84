"""torchrun's agent of one node: it starts the ranks there, and starts them anew as long as `restarts` allows."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading

from sweepack.ddp.layout import Layout
from sweepack.ddp.meeting import Line
from sweepack.ddp.rank import listen
from sweepack.ddp.starters import RANK, SETUP

# A node counts as lost when it has been silent for the product of both.
_HEARTBEAT_SECONDS, _HEARTBEATS = 2, 5
# How long those that are there wait for more nodes, when they are enough already: at the start for one that imports
# torch more slowly, after a loss for one that comes back.
_LAST_CALL_SECONDS = 10


def main() -> int:
    """Run the agent to its end and tell the launcher how its ranks have ended; the exit status."""
    setup = json.loads(os.environ[SETUP])
    layout = Layout(**setup["layout"])
    node = int(os.environ.get("SLURM_NODEID") or 0)
    try:
        line = Line(setup["addresses"], setup["port"], layout.start_seconds)
        line.say(token=setup["token"], agent=node, host=os.uname().nodename, pid=os.getpid())
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    # It ends with the launcher, and its ranks with it.
    threading.Thread(target=listen, args=(line,), daemon=True).start()
    # torchrun keeps one store for all rounds, where ranks that were started anew find the addresses of dead ones and
    # wait for them (torch 2.13): let each round have a store of its own, which its rank 0 holds.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(prefix="sweepack-torchrun-") as logs:  # torchrun would leave its own behind
        end, code = _run([f"--log-dir={logs}", *_arguments(layout, setup, line, node)])
    try:
        line.say(end=end)
    except OSError:
        return 1
    return code


def _arguments(layout: Layout, setup: dict[str, object], line: Line, node: int) -> list[str]:
    """What torchrun is told; the agent of the launcher's node holds the rendezvous."""
    nodes = f"{layout.least_nodes}:{layout.nodes}" if layout.elastic else f"{layout.nodes}"
    rendezvous = {
        "join_timeout": layout.start_seconds,
        "timeout": layout.start_seconds,
        "last_call_timeout": _LAST_CALL_SECONDS,
        "keep_alive_interval": _HEARTBEAT_SECONDS,
        "keep_alive_max_attempt": _HEARTBEATS,
        "is_host": str(node == 0).lower(),
    }
    return [
        *(f"--nnodes={nodes}", f"--nproc-per-node={layout.gpus_per_node}", f"--max-restarts={layout.restarts}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={line.address}:{setup['rendezvous']}"),
        *(f"--rdzv-id={setup['token']}", "--rdzv-conf=" + ",".join(f"{k}={v}" for k, v in rendezvous.items())),
        # By the address that the launcher is reached from: names may not resolve.
        *(f"--local-addr={line.own_address}", "--monitor-interval=0.5"),
        # Not by torchrun's own `-m`, which would look for our modules in the project's folder first.
        *("--no-python", sys.executable, "-u", "-P", "-m", RANK),
    ]


def _run(arguments: list[str]) -> tuple[dict[str, object], int]:
    """What to tell of the end (the exit status of each rank here that failed, a signal being negative), and ours."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.run(torchrun.parse_args(arguments))
        return {}, 0
    except ChildFailedError as error:
        return {"statuses": {str(rank): failure.exitcode for rank, failure in error.failures.items()}}, 1
    except SignalException as error:
        return {"signal": int(error.sigval)}, 128 + error.sigval
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}, 1


if __name__ == "__main__":
    sys.exit(main())
