"""What must hold on a cluster before a sweep is trusted to it: tried on the cluster itself, told in a line each."""
