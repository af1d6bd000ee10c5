"""MLPs of the flow in compiled kernels on the CPU, their binding to torch, and their twins in torch's own operators."""
