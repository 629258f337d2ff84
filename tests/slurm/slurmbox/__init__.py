"""A real Slurm cluster inside one machine, for tests. By hand: ``tests/slurm/cluster``."""
