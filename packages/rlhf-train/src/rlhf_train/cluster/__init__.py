"""Where processes run: placement on GPUs, Ray's session and nodes, actors."""
