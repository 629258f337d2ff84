"""The runbook: what must hold on a cluster, tried there."""


rule validate_cluster:
    """Run small sweeps on the Slurm cluster, one of them broken on purpose, and say what holds and what to change."""
    retries: 0
    params:
        # Known only when the jobs are made.
        wait=lambda wildcards: workflow.execution_settings.latency_wait,
    shell:
        "exec "
        + literal(sys.executable, f"{SCRIPTS}/validate.py", *VALIDATION)
        + " --latency-wait={params.wait}"
