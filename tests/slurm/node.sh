#!/bin/sh
# The first process of a node, in namespaces of its own; when it ends, the kernel ends the whole node.
# It stays the parent of slurmd, to reap what orphaned jobs leave: Slurm waits for zombies as if they ran.
state=$1 name=$2
mount --bind "$state/etc/hosts" /etc/hosts &&
    mount -t tmpfs shm /dev/shm &&
    hostname "$name" &&
    slurmd -D -N "$name"
exit
