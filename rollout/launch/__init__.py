"""Ways to start the ranks of a job: one process, torchrun, Ray."""
