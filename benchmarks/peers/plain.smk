# Plain Snakemake, a process a cell, as one writes it by hand.
configfile: "axes.json"


rule all:
    input:
        expand("out/{lr}-{seed}.json", lr=config["lr"], seed=config["seed"]),


rule cell:
    output:
        "out/{lr}-{seed}.json",
    params:
        steps=config["steps"],
    shell:
        "python tasks.py {wildcards.lr} {wildcards.seed} {params.steps} {output}"
