"""A real Slurm cluster of two nodes inside one machine, for tests. Standard library only: it runs before any set-up."""
