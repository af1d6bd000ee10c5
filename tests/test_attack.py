"""A small part of ``python -m tests.attack``, and each kind of mistake that the whole of it found."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

import tests.attack.__main__ as attack
from sb3_flow import kernels, native
from sb3_flow.native import BERNOULLI, CATEGORICAL, GAUSSIAN, TANH, Adam, describe_network, describe_objective
from tests.attack.disguise import GUISES
from tests.attack.engine import EQUAL, REFUSED
from tests.attack.entries import ENTRIES
from tests.attack.memory import guarded_array

ROW = np.ones(4, np.float32)
GRID = np.ones((3, 2), np.float32)
CASES = 25

pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass")


@pytest.mark.parametrize("name", ENTRIES)
def test_results_are_the_twins_or_the_argument_is_named(name):
    outcomes = [ENTRIES[name].attack(1, case) for case in range(CASES)]
    assert set(outcomes) == {EQUAL, REFUSED}


def test_a_crash_is_a_failure_with_its_case(capfd, monkeypatch):
    lines = (
        "import ctypes, tests.attack.__main__ as attack",
        "from tests.attack.entries import ENTRIES",
        "ENTRIES['compute_gae'].function = lambda **_: ctypes.string_at(0)",
        "attack.main()",
    )
    run = subprocess.run

    def broken(command, **options):
        return run([sys.executable, "-c", "\n".join(lines), *command[3:]], **options)

    monkeypatch.setattr(subprocess, "run", broken)
    counts = attack.run("compute_gae", seed=3, cases=1)
    assert counts["failures"] == counts["crashes"] == 1
    assert "compute_gae --seed 3 --case 0: the process ended with SIGSEGV at " in capfd.readouterr().out


def test_byte_swapped_numbers_are_not_taken_for_native_ones():
    """numba's dispatcher did so once it had seen an array that is not aligned."""
    for function, extra in ((kernels.compute_gae, {}), (kernels.compute_vtrace, {"log_rhos": 0 * GRID})):
        arguments = {"rewards": GRID, "values": 2 * GRID, "last_values": GRID[0], "final_values": 3 * GRID, **extra}
        arguments["truncated"] = np.array([[False, True]] * 3)
        expected = function(**arguments)
        for name in ("rewards", "values", "last_values", "final_values", *extra):
            for guise in ("aligned and guarded", "unaligned", "byte-swapped"):
                found = function(**arguments | {name: GUISES[guise](arguments[name])})
                np.testing.assert_array_equal(found, expected, err_msg=f"{name} {guise}")


def test_what_is_refused_does_not_depend_on_what_was_computed_before():
    arguments = {"rewards": GRID, "values": GRID, "last_values": GRID[0]}
    kernels.compute_vtrace(GRID, **arguments)
    for log_rhos in (GRID.tolist(), GRID.astype(np.int64), GRID.astype(np.float64)):
        with pytest.raises(ValueError, match="`log_rhos` must be a NumPy array of float32"):
            kernels.compute_vtrace(log_rhos, **arguments)


@pytest.mark.parametrize("masked", [np.ma.masked_array(GRID, GRID > 0), np.ma.masked_array(GRID)], ids=["masked", "no mask"])
def test_masked_entries_are_not_used(masked):
    kernels.compute_gae(GRID, GRID, last_values=GRID[0])
    calls = {
        "values": lambda: kernels.compute_gae(GRID, masked, last_values=GRID[0]),
        "terminated": lambda: kernels.compute_gae(GRID, GRID, last_values=GRID[0], terminated=masked),
        "rewards": lambda: kernels.clip_rewards(masked, 0, 1),
    }
    for name, call in calls.items():
        if np.ma.is_masked(masked):
            with pytest.raises(ValueError, match=f"`{name}` must have no masked entries, but 6 are"):
                call()
        else:
            call()


HUGE = np.array([1e308, -1e308, 1e308, -1e308])


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.compute_group_advantages(HUGE, 2),
        lambda: kernels.compute_group_advantages(HUGE, 4, scale="batch"),
        lambda: kernels.compute_group_advantages((HUGE / 3e269).astype(np.float32), 4, baseline="loo", scale="none"),
        lambda: kernels.compute_reward_statistics(HUGE),
        lambda: kernels.normalize_rewards(ROW, 1e300, 1.0, 5),
        lambda: kernels.shape_rewards(HUGE, -HUGE, HUGE, 1.0),
        lambda: kernels.auto_scale_rewards(np.float32([0, 1]), 0.0, 1e300),
        lambda: kernels.compute_ppo_surrogate(HUGE, 10 * ROW.astype(float)),
        lambda: kernels.apply_gspo_clipping(np.float32([3e38]), np.float32([-3e38])),
        lambda: kernels.clip_rewards(ROW, 1e300, np.inf),
        lambda: kernels.compute_vtrace(
            np.float32([[60]]), np.float32([[1e38]]), np.float32([[0]]), last_values=ROW[:1], rho_pg_bar=1e30
        ),
    ],
)
def test_results_that_overflow_are_refused(call):
    with np.errstate(all="ignore"), pytest.raises(ValueError, match=r"`.*(too large|must be|must bound)"):
        call()


def test_huge_rewards_are_scaled():
    np.testing.assert_allclose(kernels.auto_scale_rewards(HUGE, 0.0, 1.0), [1, 0, 1, 0])


@pytest.mark.parametrize("given", [None, "0.5", [0.5], np.array([0.5, 0.5]), 1j, 10**400, np.array("x"), object()], ids=repr)
def test_what_is_no_number_is_named(given):
    calls = {
        "gamma": lambda: kernels.compute_gae(GRID, GRID, last_values=GRID[0], gamma=given),
        "gae_lambda": lambda: kernels.compute_gae(GRID, GRID, last_values=GRID[0], gae_lambda=given),
        "rho_bar": lambda: kernels.compute_vtrace(GRID, GRID, GRID, last_values=GRID[0], rho_bar=given),
        "alpha": lambda: kernels.exponential_moving_average(ROW, given),
        "clip_range": lambda: describe_objective(clip_range=given),
        "left": lambda: kernels.apply_gspo_clipping(ROW, ROW, given),
        "minimum": lambda: kernels.clip_rewards(ROW, given, 1.0),
        "ddof": lambda: kernels.compute_group_advantages(ROW, 2, ddof=given),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"`{name}` must be a number"):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": [[1.0, 2.0]]}, r"`rewards\[0\]` must be a NumPy array"),
        ({"rewards": 3}, "`rewards` must be a list"),
        ({"rewards": [GRID]}, r"`rewards\[0\]` must have shape \(T,\)"),
        ({"values": [3.0]}, r"`values\[0\]` must be a NumPy array"),
        ({"values": None}, "`values` must be a list"),
        ({"last_values": [[1.0]]}, r"`last_values` must have shape \(1,\)"),
        ({"last_values": ["x"]}, "`last_values` must hold numbers"),
        ({"last_values": [np.nan]}, "`last_values` must be finite"),
        ({"terminated": ["False"]}, "`terminated` must hold numbers"),
        ({"terminated": [[True]]}, r"`terminated` must have shape \(1,\)"),
    ],
)
def test_wrong_trajectories_are_named(options, message):
    arguments = {"rewards": [ROW], "values": [ROW], "last_values": [1.0], **options}
    with pytest.raises(ValueError, match=message):
        kernels.batch_compute_gae(**arguments)


def network(**changes):
    """:return: 2 inputs, a hidden layer of 3, 2 choices; no critic"""
    arguments = {
        "actor": [(0, 6, 2, 3), (9, 15, 3, 2)],
        "critic": [],
        "components": [2],
        "distribution": CATEGORICAL,
        "activation": TANH,
        "size": 17,
    }
    return describe_network(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor": [(0, 6, 2, 3), (9, 16, 3, 2)]}, r"Layer 1 of `actor` must lie within 17 parameters, but \[9, 16, 3, 2\]"),
        ({"actor": [(2**62, 6, 2, 3), (9, 15, 3, 2)]}, "Layer 0 of `actor` must lie within 17"),
        ({"actor": [(0, 2**63 - 1, 2, 3), (9, 15, 3, 2)]}, "Layer 0 of `actor` must lie within 17"),
        ({"actor": [(0, 0, 2**32, 2**32), (9, 15, 2**32, 2)]}, "Layer 0 of `actor` must lie within 17"),
        ({"actor": [(0, 6, 2, 3), (9, 15, 4, 2)]}, "Layer 1 of `actor` must have 3 inputs"),
        ({"actor": [(-1, 6, 2, 3), (9, 15, 3, 2)]}, "Layer 0 of `actor` must have"),
        ({"actor": [(0, 6, 2, -3), (9, 15, -3, 2)]}, "Layer 0 of `actor` must have"),
        ({"actor": [(0.5, 6.0, 2.0, 3.0), (9.0, 15.0, 3.0, 2.0)]}, "`actor` must hold integers"),
        ({"actor": [0, 6, 2, 3, 9, 15, 3, 2]}, r"`actor` must have shape \(any, 4\)"),
        ({"actor": [(10**30, 6, 2, 3), (9, 15, 3, 2)]}, "`actor` must hold numbers"),
        ({"actor": []}, "`actor` must have at least one layer"),
        ({"critic": [(0, 6, 2, 2)]}, "`critic` must have 1 outputs, but 2"),
        ({"components": [3, -1]}, "`components` must be positive"),
        ({"components": [2, 0]}, "`components` must be positive"),
        ({"components": []}, "`components` must be positive, at least one"),
        ({"components": [2], "distribution": BERNOULLI}, "`components` must be ones"),
        ({"components": [1, 1], "distribution": GAUSSIAN, "log_std": 16}, "`log_std` must be an offset of 2 numbers among 17"),
        ({"components": [3]}, "`actor` must have 3 outputs, but 2"),
        ({"distribution": 3}, r"`distribution` must be a whole number in \[0, 2\]"),
        ({"activation": 0.5}, "`activation` must be a whole number"),
        ({"size": -1}, "`size` must be a whole number at least 1"),
        ({"size": 10**30}, "`size` must be a whole number"),
    ],
)
def test_networks_out_of_their_parameters_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        network(**changes)


def test_no_network_gets_past_the_checks():
    """Hand-made ones read and wrote wherever their offsets pointed."""
    right, params = network(), np.zeros(17, np.float32)
    far = np.array([(0, 6, 2, 3), (9, 10**6, 3, 2)])
    for make in (
        lambda: right._replace(actor=far),
        lambda: right._make([far, *right[1:]]),
        lambda: native.Network(far, *right[1:]),
    ):
        with pytest.raises(ValueError, match="Layer 1 of `actor` must lie within 17 parameters"):
            make()
    for array in (right.actor, right.critic, right.components):
        with pytest.raises(ValueError, match=r"cannot set WRITEABLE|cannot be made writeable|not own"):
            array.flags.writeable = True
    for given in (tuple(right), None, right.actor):
        with pytest.raises(ValueError, match="`network` must be made by `describe_network`"):
            native.policy_values(given, params, np.zeros((1, 2)))
    for other in (copy.deepcopy(right), pickle.loads(pickle.dumps(right)), right._replace(size=17)):
        assert type(other) is native.Network and not other.actor.flags.writeable
        np.testing.assert_array_equal(other.actor, right.actor)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parameters_of_any_strides_are_read_as_they_are(dtype):
    """Every second number of a vector was read as if it were contiguous, and beyond the end of a reversed one."""
    rng = np.random.default_rng(0)
    params, observations = rng.standard_normal(17).astype(dtype), rng.standard_normal((5, 2))
    expected = native.policy_outputs(network(), params, observations)
    for guise, change in GUISES.items():
        given = change(params)
        if guise != "unaligned":
            given = guarded_array(given)
        np.testing.assert_array_equal(native.policy_outputs(network(), given, observations), expected, err_msg=guise)
        np.testing.assert_array_equal(native.policy_outputs(network(), params, change(observations)), expected, err_msg=guise)
    one = np.broadcast_to(dtype(0.5), 17)
    np.testing.assert_array_equal(
        native.policy_outputs(network(), one, observations), native.policy_outputs(network(), one.copy(), observations)
    )
    for wrong in (params.astype(np.int64), params.astype(complex), params.astype(np.float16), params.tolist(), None):
        with pytest.raises(ValueError, match="`params` must be a NumPy array of float32 or float64"):
            native.policy_outputs(network(), wrong, observations)


def epoch(**changes):
    rng, params = np.random.default_rng(0), np.zeros(17, np.float32)
    state = {name: np.zeros_like(params) for name in ("grad", "exp_avg", "exp_avg_sq")}
    row = rng.standard_normal(6).astype(np.float32)
    arguments = {
        "network": network(),
        "objective": describe_objective("gspo"),
        "adam": Adam(1e-3, 0.5, 0.9, 0.999, 1e-8),
        "params": params,
        **state,
        "step": 0,
        "order": np.arange(6),
        "starts": np.array([0, 3, 6]),
        "segments": np.array([0, 0, 1, 0, 1, 2]),
        "observations": rng.standard_normal((6, 2)),
        "actions": np.array([[0], [1], [0], [1], [0], [1]]),
        "old_log_probs": row,
        "advantages": row,
    }
    return native.ppo_epoch(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": np.array([0, 2**63 - 1, -(2**63) + 6])}, "`starts` must ascend between 0 and 6"),
        ({"starts": np.array([0, 3.5, 6])}, "`starts` must hold integers"),
        ({"starts": np.array([[0, 3, 6]])}, r"`starts` must have shape \(any,\)"),
        ({"starts": np.array([0, 3, 3, 6])}, "`starts` must ascend"),
        ({"starts": np.array([0])}, "`starts` must ascend"),
        ({"order": np.arange(6) + 0.5}, "`order` must hold integers"),
        ({"order": np.ones(6, bool)}, "`order` must hold numbers, but bool"),
        ({"order": np.arange(6, dtype=np.uint64) + 2**63}, "`order` must fit int64, but 9223372036854775813"),
        ({"order": np.arange(6).reshape(2, 3)}, r"`order` must have shape \(any,\)"),
        ({"order": np.arange(1, 7)}, "`order` must hold rows from 0 to 5, but 1 to 6"),
        ({"segments": [0, 0, 9, 0, 1, 2]}, "`segments` must be numbered from 0 in every minibatch, .* but 0 to 9"),
        ({"segments": [0, 1]}, r"`segments` must have shape \(6,\)"),
        ({"segments": None}, "`segments` must have the shape"),
        ({"step": -1}, "`step` must be a whole number at least 0"),
        ({"actions": [[0], [1], [0], [1], [0], [2]]}, r"`actions` must be whole, at least 0 and below \[2\], but 2.0"),
        ({"actions": [[0], [1], [0], [1], [0], [0.5]]}, "`actions` must be whole, .* but 0.5"),
        ({"actions": None}, r"`actions` must have shape \(6, 1\), but None"),
        ({"observations": 3}, r"`observations` must have shape \(any, 2\)"),
        ({"adam": (1, 2, 3, 4, 5)}, "`adam` must be an `Adam`"),
        ({"adam": Adam("x", 0.5, 0.9, 0.999, 1e-8)}, "`adam.learning_rate` must be a number"),
        ({"objective": describe_objective()._replace(policy_loss=7)}, "`objective` must be made by `describe_objective`"),
        ({"params": np.zeros(34, np.float32)[::2]}, "`params` must be float32 .* contiguous and writable"),
        ({"grad": np.broadcast_to(np.float32(0), 17)}, "`grad` must be float32"),
        ({"exp_avg": np.zeros(17)}, "`exp_avg` must be float32"),
        ({"exp_avg_sq": [0.0] * 17}, "`exp_avg_sq` must be a NumPy array"),
    ],
)
def test_passes_that_would_leave_their_arrays_are_refused(changes, message):
    epoch()
    with pytest.raises(ValueError, match=message):
        epoch(**changes)


def test_losses_that_are_unknown_are_refused():
    with pytest.raises(ValueError, match=r"`policy_loss` must be one of 'clip'.*, but 'ppo' was given"):
        describe_objective("ppo")


def test_random_numbers_come_from_a_generator():
    with pytest.raises(ValueError, match=r"`rng` must be a numpy.random.Generator or None, but 0 was given"):
        native.policy_forward(network(), np.zeros(17), np.zeros((1, 2)), 0)
