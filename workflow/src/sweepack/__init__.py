"""Pack machine-learning sweeps onto GPUs with Snakemake."""
