"""What has to be measured before its cells can run: batch sizes and shares that the configuration leaves open."""

MEASURED = f"{RESULTS}/pins/{{pins}}.done"

if PLAN.slurm:
    PROBE_RESOURCES = asked_of_slurm("pins")
else:
    PROBE_RESOURCES = {"gpu_milli": 0}


def to_measure():
    return expand(MEASURED, pins=PLAN.probes)


def probe_threads(wildcards):
    if PLAN.slurm:
        return PLAN.slurm.allocations[wildcards.pins].cpus
    return max(group.profile.threads for group in PLAN.probes[wildcards.pins])


rule measure:
    """Measure how much memory cells take, on the device that they will run on, and keep it for the next plan."""
    input:
        prepared(),
    output:
        MEASURED,
    threads: probe_threads
    resources:
        **PROBE_RESOURCES,
    shell:
        script("probe.py") + " --request {wildcards.pins} --stamp {output:q}"


rule probe:
    """Measure what the plan does not know yet. The next run goes by it."""
    input:
        to_measure(),
