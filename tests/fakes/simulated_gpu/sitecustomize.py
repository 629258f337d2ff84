"""On PYTHONPATH: in every interpreter below, torch finds the simulated GPU as soon as it is imported."""

import importlib.util
import os
import sys


class _Finder:
    searching = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self.searching = False
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def and_simulate(module):
            execute(module)
            import simulated_gpu

            simulated_gpu.install(module)

        spec.loader.exec_module = and_simulate
        return spec


if "SIMULATED_GPU" in os.environ:
    sys.meta_path.insert(0, _Finder())
