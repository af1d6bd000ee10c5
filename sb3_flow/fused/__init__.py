"""MLPs of the flow in compiled kernels on the CPU, their binding to torch, and their twins in torch's own operators."""

import sb3_flow.compiled.source_stamps  # noqa: F401  before the constants below are read
