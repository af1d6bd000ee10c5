"""
Microseconds per minibatch of the native update, and of its forward pass for 8 observations; 64-64 networks.

    OMP_NUM_THREADS=1 python tests/benchmarks/native_update.py
"""

import time

import numpy as np

from sb3_flow.native import (
    BERNOULLI,
    CATEGORICAL,
    GAUSSIAN,
    TANH,
    Adam,
    Network,
    describe_network,
    describe_objective,
    policy_forward,
    policy_values,
    ppo_epoch,
)

REPEATS = 15


def network(inputs: int, outputs: int, distribution: int, hidden: int = 64) -> Network:
    """:return: two perceptrons of two layers"""
    tables, at = [], outputs if distribution == GAUSSIAN else 0
    for last in (outputs, 1):
        rows = []
        for n_in, n_out in ((inputs, hidden), (hidden, hidden), (hidden, last)):
            rows.append((at, at + n_in * n_out, n_in, n_out))
            at += n_in * n_out + n_out
        tables.append(rows)
    components = [outputs] if distribution == CATEGORICAL else [1] * outputs
    return describe_network(*tables, components, distribution, TANH, at, 0 if distribution == GAUSSIAN else -1)


def best(function, calls: int) -> tuple[float, float]:
    """:return: lowest and median microseconds of one of ``calls``"""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times), float(np.median(times))


def main() -> None:
    """Print a table."""
    rng = np.random.default_rng(0)
    names = {CATEGORICAL: "Categorical", BERNOULLI: "Bernoulli", GAUSSIAN: "Gaussian"}
    for inputs, outputs, distribution in ((4, 2, CATEGORICAL), (17, 6, GAUSSIAN), (8, 8, BERNOULLI)):
        net = network(inputs, outputs, distribution)
        params = (0.1 * rng.standard_normal(net.size)).astype(np.float32)
        grad, first, second = np.zeros((3, net.size), np.float32)
        rows = 16384
        observations = rng.standard_normal((rows, inputs), np.float32)
        actions, values, log_probs = policy_forward(net, params, observations, rng)
        advantages, returns = rng.standard_normal((2, rows), np.float32)
        for batch in (64, 256, 2048):
            starts = np.minimum(np.arange(0, rows + batch, batch), rows)
            order = rng.permutation(rows)

            def epoch(net=net, state=(params, grad, first, second), order=order, starts=starts, data=None):
                ppo_epoch(net, describe_objective(), Adam(1e-6, 0.5, 0.9, 0.999, 1e-5), *state, 0, order, starts, **data)

            data = {"observations": observations, "actions": actions, "old_log_probs": log_probs}
            data |= {"advantages": advantages, "returns": returns, "old_values": values}
            epoch(data=data)
            low, median = best(lambda epoch=epoch, data=data: epoch(data=data), len(starts) - 1)
            title = f"{names[distribution]:12s} {inputs:3d} -> {outputs}  minibatch {batch:5d}"
            print(f"{title}: {low:8.1f} us, median {median:8.1f}")
        few = observations[:8]
        for name, call in (
            ("forward of 8", lambda net=net, params=params, few=few: policy_forward(net, params, few, rng)),
            ("values of 8", lambda net=net, params=params, few=few: policy_values(net, params, few)),
        ):
            call()
            low, median = best(lambda call=call: [call() for _ in range(500)], 500)
            print(f"{names[distribution]:12s} {inputs:3d} -> {outputs}  {name:15s}: {low:8.1f} us, median {median:8.1f}")


if __name__ == "__main__":
    main()
