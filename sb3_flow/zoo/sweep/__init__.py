"""Sweeps: the training of rl-zoo3 for every algorithm, task, seed and point of a grid, on one machine or a cluster."""
