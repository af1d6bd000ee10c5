"""Surrogates in torch, in NumPy and in the compiled update against one reference, by one table of cases."""

import numpy as np
import pytest
import torch as th
from surrogate_reference import CASES, WRONG, surrogate

from sb3_flow.kernels import apply_gspo_clipping, compute_gspo_importance_ratios, compute_ppo_surrogate
from sb3_flow.losses import clipped_surrogate, decoupled_surrogate, gspo_loss, gspo_token_loss
from sb3_flow.native.objectives import POLICY_LOSSES
from sb3_flow.native.surrogate_loops import SEQUENCE_SUMS, rowwise_loss, sequence_loss


def by_torch(case, dtype):
    """:return: losses of the rows or sequences, and the gradient of their mean"""
    log_probs = th.tensor(case.log_probs, dtype=dtype, requires_grad=True)
    old, advantages = th.tensor(case.old, dtype=dtype), th.tensor(case.advantages, dtype=dtype)
    bounds = case.below, case.above
    if case.segments is not None:
        loss = gspo_loss if case.kind == "gspo" else gspo_token_loss
        losses = loss(log_probs, old, advantages, th.tensor(case.segments), case.n_segments, *bounds)
    elif case.kind == "decoupled":
        proximal = th.tensor(case.proximal, dtype=dtype)
        losses = decoupled_surrogate(log_probs, proximal, old, advantages, *bounds, case.rho_bar)
    else:
        dual_clip = case.dual_clip if case.kind == "dual_clip" else None
        losses = clipped_surrogate((log_probs - old).exp(), advantages, *bounds, dual_clip)
    return losses.detach().numpy(), th.autograd.grad(losses.mean(), log_probs)[0].numpy()


def by_loops(case, dtype):
    """:return: the mean of the losses, and its gradient"""
    log_probs, old, advantages = (x.astype(dtype) for x in (case.log_probs, case.old, case.advantages))
    kind, slopes = POLICY_LOSSES[case.kind], np.empty_like(log_probs)
    if case.segments is not None:
        sums = np.empty((SEQUENCE_SUMS, len(slopes)), dtype)
        loss = sequence_loss(kind, log_probs, old, advantages, case.segments, sums, case.below, case.above, slopes)[0]
    else:
        proximal = old if case.proximal is None else case.proximal.astype(dtype)
        options = case.below, case.above, case.dual_clip, case.rho_bar
        loss = rowwise_loss(kind, log_probs, old, proximal, advantages, *options, slopes)[0]
    return loss, slopes


def by_numpy(case):
    """:return: losses of the rows or sequences"""
    change = case.log_probs - case.old
    if case.segments is None:
        return -compute_ppo_surrogate(np.exp(change), case.advantages, case.below)
    sequences = [np.flatnonzero(case.segments == s) for s in range(case.n_segments)]
    new, old = ([x[rows].sum() for rows in sequences] for x in (case.log_probs, case.old))
    ratios = compute_gspo_importance_ratios(new, old, [max(len(rows), 1) for rows in sequences])
    advantages = [case.advantages[rows].mean() if len(rows) else 0.0 for rows in sequences]
    return -apply_gspo_clipping(ratios, advantages, case.below, case.above)


def check(found, expected, dtype=np.float64):
    tolerance = 1e-12 if dtype == np.float64 else 1e-4
    for ours, reference in zip(found, expected, strict=True):
        atol = tolerance * np.abs(reference).max()
        np.testing.assert_allclose(ours, reference, rtol=tolerance, atol=atol if np.isfinite(atol) else 0)


TWINS = {
    "torch": lambda case, wrong=None: check(by_torch(case, th.float64), surrogate(case, wrong)),
    "torch float32": lambda case, wrong=None: check(by_torch(case, th.float32), surrogate(case, wrong), np.float32),
    "loops": lambda case, wrong=None: check(by_loops(case, np.float64), _mean(surrogate(case, wrong))),
    "loops float32": lambda case, wrong=None: check(by_loops(case, np.float32), _mean(surrogate(case, wrong)), np.float32),
}
IN_NUMPY = ("clip", "clip narrow", "gspo", "gspo higher", "gspo far")
"""Cases that the NumPy functions cover, which have no gradients, no dual clip, no proximal policy and no tokens."""


def _mean(reference):
    return reference[0].mean(), reference[1]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("twin", TWINS)
def test_a_twin_is_the_reference(twin, name):
    TWINS[twin](CASES[name])


@pytest.mark.parametrize("name", IN_NUMPY)
def test_the_numpy_functions_are_the_reference(name):
    check([by_numpy(CASES[name])], surrogate(CASES[name])[:1])


@pytest.mark.parametrize(("wrong", "name"), [(wrong, name) for wrong, names in WRONG.items() for name in names])
def test_a_mistake_is_noticed(wrong, name):
    for twin in TWINS.values():
        with pytest.raises(AssertionError):
            twin(CASES[name], wrong)
    if name in IN_NUMPY and wrong not in ("gradient of clipped rows", "mean over the rows"):  # these leave the values
        with pytest.raises(AssertionError):
            check([by_numpy(CASES[name])], surrogate(CASES[name], wrong)[:1])


def test_the_cases_lie_on_both_sides_of_the_bounds():
    for case in CASES.values():
        _, gradient = surrogate(case)
        assert (gradient == 0).any() and (gradient != 0).any()
