"""The steps of the torch backend, and the minibatches they take, are torch's and SB3's to the last bit."""

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch as th
from on_policy import ACTION_SPACES, DICT, walks
from stable_baselines3.common.buffers import RolloutBuffer
from torch.distributions import Distribution

from sb3_flow import PPO, MaskablePPO
from sb3_flow.on_policy import gradient_steps
from sb3_flow.on_policy.gradient_steps import FlatAdam, in_place_activations

SHAPES = [(5, 3), (5,), (7, 5), (7,), (1, 7), (1,)]
SMALL = {"n_steps": 32, "batch_size": 24, "n_epochs": 2, "seed": 3, "device": "cpu"}


class Stock:
    """What SB3's ``train`` does."""

    def __init__(self, optimizer: th.optim.Optimizer, parameters: list[th.Tensor], max_grad_norm: float):
        self.optimizer, self.parameters, self.max_grad_norm = optimizer, parameters, max_grad_norm

    def step(self, loss: Any = None) -> None:
        th.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()

    def __enter__(self) -> "Stock":
        return self

    one_pass = nullcontext
    zero_grad = __exit__ = lambda self, *_: self.optimizer.zero_grad()


def stepped(kind: Any, optimizer_class: Any, left_out: bool = False, **options: Any) -> tuple[list, dict, bool]:
    """:return: parameters and the optimizer's state after three uses of 20 steps, and whether the last one was flat"""
    generator = th.Generator().manual_seed(0)
    parameters = [th.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
    optimizer = optimizer_class(parameters, lr=3e-3, **options)
    flat = False
    for use in range(3):
        with kind(optimizer, parameters, 0.5) as steps, steps.one_pass():
            for number in range(20):
                flat = getattr(steps, "flat", False)
                steps.zero_grad()
                for parameter in parameters:
                    parameter.grad = th.randn(parameter.shape, generator=generator) * 0.1 * (number % 4)
                if left_out and use == 1 and number == 10:
                    parameters[2].grad = None
                steps.step(th.tensor(0.0))
    return parameters, optimizer.state_dict()["state"], flat


@pytest.mark.parametrize(
    ("optimizer_class", "options", "expected"),
    [
        (th.optim.Adam, {"eps": 1e-5}, True),
        (th.optim.Adam, {"weight_decay": 0.1}, False),
        (th.optim.AdamW, {}, False),
        (th.optim.RMSprop, {}, False),
    ],
)
@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.parametrize("large", [1, 8, 2**17])
def test_steps_are_torchs(
    optimizer_class: Any, options: dict[str, Any], expected: bool, left_out: bool, large: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(gradient_steps, "LARGE", large)
    mine, state, flat = stepped(FlatAdam, optimizer_class, left_out, **options)
    theirs, original, _ = stepped(Stock, optimizer_class, left_out, **options)
    assert flat == (expected and not left_out)  # once their numbers of steps differ, it is the optimizer's own
    for a, b in zip(mine, theirs, strict=True):
        assert th.equal(a, b)
    for number, of_parameter in original.items():
        assert all(th.equal(value, state[number][name]) for name, value in of_parameter.items())


@pytest.mark.parametrize("large", [1, 8, 2**17])
@pytest.mark.parametrize(
    ("optimizer_class", "left_out"), [(th.optim.Adam, False), (th.optim.Adam, True), (th.optim.AdamW, False)]
)
def test_a_pass_that_ends_with_an_error_is_undone(optimizer_class: Any, left_out: bool, large: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(gradient_steps, "LARGE", large)
    generator = th.Generator().manual_seed(0)
    parameters = [th.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
    mean = th.zeros(2)
    optimizer = optimizer_class(parameters, lr=1e-2)

    def go(*passes: int, error: type[BaseException] | None = None) -> None:
        """Passes of so many steps, the last of which ends with the error."""
        with pytest.raises(error) if error else nullcontext(), FlatAdam(optimizer, parameters, 0.5, [mean]) as steps:
            for place, n_steps in enumerate(passes, start=1):
                with steps.one_pass():
                    for number in range(n_steps):
                        for parameter in parameters:
                            parameter.grad = th.randn(parameter.shape, generator=generator)
                        if left_out and number == 2:
                            parameters[1].grad = None
                        steps.step(th.tensor(0.0))
                        mean.add_(1)
                    if error and place == len(passes):
                        raise error

    def state() -> list[th.Tensor]:
        found = optimizer.state_dict()["state"]
        return [one.detach().clone() for one in (*parameters, mean, *(x for of in found.values() for x in of.values()))]

    start = state()
    go(3, error=FloatingPointError)  # the first pass of all
    assert all(map(th.equal, state(), start)) and not optimizer.state_dict()["state"]
    go(2)
    for n_steps in (0, 1, 3):
        start = state()
        go(n_steps, error=FloatingPointError)
        assert all(map(th.equal, state(), start)), n_steps
        twin = copy.deepcopy((parameters, optimizer.state_dict(), mean, generator.get_state()))
        go(1, 2)
        expected = state()
        for parameter, weights in zip(parameters, twin[0], strict=True):
            parameter.data.copy_(weights)
        optimizer.load_state_dict(twin[1])
        mean.copy_(twin[2])
        generator.set_state(twin[3])
        go(1, 2, n_steps, error=FloatingPointError)  # the passes before it stay
        assert all(map(th.equal, state(), expected)), n_steps
        assert not any(map(th.equal, expected, start)), n_steps
    go(3, error=KeyboardInterrupt)  # what was learned stays
    assert not any(map(th.equal, state()[: len(SHAPES)], expected))


@pytest.mark.parametrize("large", [1, 8, 2**17])
def test_a_single_step_that_would_break_is_not_taken(large: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(gradient_steps, "LARGE", large)
    generator = th.Generator().manual_seed(0)
    parameters = [th.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
    twins = [one.detach().clone().requires_grad_() for one in parameters]
    optimizer, other = th.optim.Adam(parameters), th.optim.Adam(twins)
    for number in range(6):
        for parameter, twin in zip(parameters, twins, strict=True):
            parameter.grad = th.randn(parameter.shape, generator=generator)
            twin.grad = parameter.grad.clone()
        if number == 4:
            parameters[3].grad[2] = np.inf
        if number not in (3, 4):
            Stock(other, twins, 0.5).step()
        with FlatAdam(optimizer, parameters, 0.5) as steps, steps.one_pass(single=True):
            steps.step(th.tensor(np.inf if number == 3 else 1.0))
            assert steps.weights_are_finite() == (number not in (3, 4))
        assert all(map(th.equal, parameters, twins))
        states = (one.state_dict()["state"].values() for one in (optimizer, other))
        assert all(th.equal(mine[name], theirs[name]) for mine, theirs in zip(*states, strict=True) for name in theirs)


@pytest.mark.parametrize("large", [1, 2**17])
def test_gradients_are_left_clipped(large: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(gradient_steps, "LARGE", large)
    parameter = th.ones(3, requires_grad=True)
    optimizer = th.optim.Adam([parameter])
    for _ in range(2):
        with FlatAdam(optimizer, [parameter], 0.5) as steps, steps.one_pass():
            parameter.grad = th.ones(3)
            steps.step(th.tensor(0.0))
        assert float(parameter.grad.norm()) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("algorithm", [PPO, MaskablePPO])
@pytest.mark.parametrize("by_episode", [False, True])
def test_minibatches_read_together_are_those_read_one_by_one(algorithm: Any, by_episode: bool) -> None:
    model = algorithm("MultiInputPolicy", walks(3, ACTION_SPACES["discrete"], DICT), **SMALL, policy_loss="decoupled").learn(1)
    found = []
    for at_once in (0, 60, 8192):
        np.random.seed(0)
        found.append(list(model.rollout_buffer.minibatches(10, by_episode, at_once)))
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert type(one.data) is type(other.data) and one.n_segments == other.n_segments
            assert th.equal(one.proximal_log_prob, other.proximal_log_prob)
            assert one.segments is None or th.equal(one.segments, other.segments)
            for name, column in one.data._asdict().items():
                parts, others_parts = (
                    list(x.values()) if isinstance(x, dict) else [x] for x in (column, getattr(other.data, name))
                )
                for a, b in zip(parts, others_parts, strict=True):
                    assert th.equal(a, b) and a.dtype == b.dtype and b.data_ptr() % 64 == 0


def test_samples_of_a_users_buffer_are_taken_one_minibatch_at_a_time() -> None:
    sizes = []

    class Own(RolloutBuffer):
        def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
            sizes.append(len(batch_inds))
            return super()._get_samples(batch_inds, env)

    PPO("MlpPolicy", walks(3, ACTION_SPACES["box"]), rollout_buffer_class=Own, **SMALL).learn(1)
    assert sizes == [24] * 8


def test_a_loss_that_is_not_a_number_ends_the_training() -> None:
    """torch's distributions, which would notice, do not look during the update."""
    model = PPO("MlpPolicy", walks(3, ACTION_SPACES["box"]), **SMALL, backend="torch").learn(1)
    model.rollout_buffer.returns[5] = np.nan
    with pytest.raises(FloatingPointError, match=r"The loss of minibatch . of 4 is nan"):
        model.train()
    assert Distribution._validate_args


@pytest.mark.parametrize("activation", [th.nn.Tanh, th.nn.ReLU, th.nn.ELU])
def test_activations_in_place_change_no_number(activation: Any) -> None:
    policy_kwargs = {"activation_fn": activation, "net_arch": [16, 16]}
    policy = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), policy_kwargs=policy_kwargs, backend="torch", **SMALL).policy
    observations, kept = th.randn(40, 3), []

    def gradients() -> list[th.Tensor]:
        given = observations.clone()
        values, log_prob, _ = policy.evaluate_actions(given, th.ones(40, 2))
        policy.optimizer.zero_grad()
        (values.sum() + log_prob.sum()).backward()
        assert th.equal(given, observations)
        return [values, log_prob, *(one.grad for one in policy.parameters())]

    wanted = gradients()
    first, second = policy.mlp_extractor.policy_net[0], policy.mlp_extractor.policy_net[2]
    second.register_forward_hook(lambda module, given, output: kept.append(output))
    with in_place_activations(policy):
        net = policy.mlp_extractor.policy_net
        assert [("forward" in vars(net[i])) for i in (1, 3)] == [activation is not th.nn.ELU, False]
        found = gradients()
    assert all(map(th.equal, found, wanted))
    # what a hook was shown is left as it was
    with th.no_grad():
        assert th.equal(kept[0], th.nn.functional.linear(net[1](first(observations)), second.weight, second.bias))
    assert not any("forward" in vars(module) for module in policy.modules())
