"""Which of our classes takes which seat in whose test suite."""

from typing import Any, NamedTuple


class Seat(NamedTuple):
    """
    :param package: whose suite is run, also the name of its source distribution
    :param seat: the class of that package whose place is taken
    :param ours: name of the class in ``sb3_flow`` that takes it; looked up when the suite runs
    :param defaults: arguments for the tests that do not pass them
    :param ignored: test files that are left out
    :param files: the test files that are run; none for all
    :param beside: further classes of that package whose places are taken by classes of ours of the same names
    """

    package: str
    seat: str
    ours: str
    defaults: dict[str, Any] = {}  # noqa: RUF012
    ignored: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


def sb3(seat: str, ours: str, **defaults: Any) -> Seat:
    """A seat in SB3's suite. Its test_utils.py needs Atari to be imported, and concerns none of these seats."""
    return Seat("stable_baselines3", seat, ours, defaults, ("test_utils.py",))


def contrib(seat: str, ours: str, **defaults: Any) -> Seat:
    """A seat in sb3-contrib's suite."""
    return Seat("sb3_contrib", seat, ours, defaults)


# In the seat PPO the compiled loops take every policy that they cover. V-trace sits with SB3's random numbers, because
# test_identity.py wants a policy from one seed and 1,200 steps that SB3's PPO, too, finds with few seeds.
# RQL's critics and FMQ's candidates: few for the time they take; not 8 candidates, where the outcome of test_gae.py depends on
# the CPU's rounding. FQL's alpha, the weight of staying near the data: there are none in SB3's tests, but random actions, and
# with the published 10 the actor of test_identity.py stays too near to them (46 of 100 after 300 updates, 90 are wanted).
# RLPD's critics: two, as SAC has, for the time that ten take.
# DSRL's few critics and steps: for the time they take. Its bound of the noise: a flow that clones random actions is to reach
# the bounds of actions. Its entropy coefficient: from 1 it does not fall far in 300 updates (51 of 100).
# HerReplayBuffer is tested with RLPD, since only algorithms of ours can have it.
# QAM has edits, so that they are tested, too, and small networks for the time that its updates take. With an entropy
# coefficient from 1 the edits of test_identity.py are still random after 300 updates (58 of 100, 90 are wanted).
AS_SAC = {"net_arch": [256, 256]}
"""The networks of SAC, whose seat is taken: smaller than the defaults of these algorithms."""

SEATS = {
    "RQL": sb3("SAC", "RQL", n_critics=2, policy_kwargs=AS_SAC),
    "FMQ": sb3("SAC", "FMQ", n_candidates=2, policy_kwargs=AS_SAC),
    "FQL": sb3("SAC", "FQL", alpha=0.3, policy_kwargs=AS_SAC),
    "RLPD": sb3("SAC", "RLPD", n_critics=2, policy_kwargs=AS_SAC),
    "DSRL": sb3("SAC", "DSRL", n_critics=2, noise_scale=2.0, flow_steps=2, ent_coef="auto_0.05", policy_kwargs=AS_SAC),
    "QAM": sb3(
        "SAC", "QAM", n_critics=2, flow_steps=2, edit_scale=1.0, ent_coef="auto_0.1", policy_kwargs={"net_arch": [64, 64]}
    ),
    "HerReplayBuffer": sb3("SAC", "RLPD", n_critics=2, policy_kwargs=AS_SAC)._replace(
        files=("test_her.py",), beside=("HerReplayBuffer",)
    ),
    "PPO": sb3("PPO", "PPO"),
    "PPO-torch": sb3("PPO", "PPO", backend="torch"),
    "PPO-vtrace": sb3("PPO", "PPO", advantage="vtrace", backend="torch"),
    "RecurrentPPO": contrib("RecurrentPPO", "RecurrentPPO"),
    "MaskablePPO": contrib("MaskablePPO", "MaskablePPO"),
}
