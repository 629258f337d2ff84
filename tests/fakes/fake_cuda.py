"""What a task's use of CUDA means to the fake MPS daemon: connecting, working, faulting."""

import os
import select
import socket
from pathlib import Path

_contexts = []  # as CUDA's, to the end of the process


class Gpu:
    """A process's GPU: through the daemon of its pipe directory, or, without a word, by itself if there is none."""

    def __init__(self):
        pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
        self.daemon = None
        _contexts.append(self)
        if Path(pipe, "control").exists():
            self.daemon = socket.socket(socket.AF_UNIX)
            try:
                self.daemon.connect(f"{pipe}/control")
                self.daemon.sendall(f"client {os.getpid()}\n".encode())
                answer = self.daemon.recv(64)
            except OSError:
                raise RuntimeError("MPS client failed to connect to the MPS control daemon or the MPS server") from None
            if answer != b"ok\n":
                raise RuntimeError("CUDA error: MPS server is not ready to accept new MPS client requests")

    def synchronize(self):
        """Raises if a client of the daemon has faulted."""
        if self.daemon and select.select([self.daemon], [], [], 0)[0]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fault(self):
        """Do what must not be done."""
        if self.daemon is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.daemon.sendall(b"fault\n")
        select.select([self.daemon], [], [], 60)
        self.synchronize()
