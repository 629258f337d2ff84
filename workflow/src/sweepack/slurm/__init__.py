"""Cells on a Slurm cluster: what is asked for, which cells share a job, and how the jobs are followed."""
