"""The policies with memory, written step by step: what acting and learning of the recurrent classes are compared with."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from on_policy import Walk
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_flow.ppo.recurrent import RecurrentPPO

CELLS = {th.nn.LSTM: th.nn.LSTMCell, th.nn.GRU: th.nn.GRUCell}


class Telling(Walk):
    """A walk with masks of all kinds of actions, which keeps the masks that it told."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.told: list[np.ndarray] = []

    def action_masks(self) -> np.ndarray:
        if isinstance(self.action_space, spaces.MultiBinary):
            masks = np.ones((self.action_space.n, 2), dtype=bool)
            masks[np.arange(len(masks)), self.np_random.integers(2, size=len(masks))] = self.np_random.random(len(masks)) < 0.5
        else:
            masks = super().action_masks()
        self.told.append(masks.ravel())
        return masks.ravel()


def one_rollout(algorithm: type[RecurrentPPO], policy: str, actions: spaces.Space, **given: Any) -> Any:
    """:return: a model with a rollout from zero states, from which it has not learned, and networks that tell states apart"""
    env = DummyVecEnv([lambda: Telling(actions)] * 3)
    small = {"n_steps": 20, "n_epochs": 0, "seed": 0, "device": "cpu"}
    model = algorithm(policy, env, **small, policy_kwargs={"lstm_hidden_size": 6, "n_lstm_layers": 2, **given})
    with th.no_grad():
        for layer in (model.policy.action_net, model.policy.value_net):
            layer.weight.mul_(100 if layer is model.policy.action_net else 5)
        for name, weight in model.policy.named_parameters():
            if name.startswith("lstm"):
                weight.mul_(2)
    return model.learn(60)


def through_cells(network: th.nn.RNNBase, features: th.Tensor, starts: np.ndarray) -> th.Tensor:
    """Go through sequences ``(T, N, features)`` with torch's cells, whose states are zero where an episode begins."""
    kind = CELLS[th.nn.LSTM if isinstance(network, th.nn.LSTM) else th.nn.GRU]
    cells = []
    for layer in range(network.num_layers):
        cell = kind(network.input_size if layer == 0 else network.hidden_size, network.hidden_size)
        cell.load_state_dict({name: getattr(network, f"{name}_l{layer}") for name in cell.state_dict()})
        cells.append(cell)
    n = features.shape[1]
    states: list[Any] = [None] * len(cells)
    outputs = []
    for now, begins in zip(features, th.as_tensor(starts.astype(bool)), strict=True):
        for layer, cell in enumerate(cells):
            zeros = th.zeros(n, network.hidden_size)
            before = states[layer] if states[layer] is not None else ((zeros, zeros) if kind is th.nn.LSTMCell else zeros)
            if kind is th.nn.LSTMCell:
                states[layer] = cell(now, tuple(th.where(begins[:, None], zeros, part) for part in before))
                now = states[layer][0]
            else:
                now = states[layer] = cell(now, th.where(begins[:, None], zeros, before))
        outputs.append(now)
    return th.stack(outputs)


def log_prob_among(logits: th.Tensor, valid: np.ndarray, action: int) -> tuple[th.Tensor, th.Tensor]:
    """:return: log-probability and entropy of a choice among the valid actions alone"""
    (numbers,) = np.nonzero(valid)
    log_probs = th.log_softmax(logits[numbers], dim=0)
    return log_probs[list(numbers).index(action)], -(log_probs.exp() * log_probs).sum()


@th.no_grad()
def transcribed(model: Any, masks: np.ndarray | None = None) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
    """
    Evaluate a rollout as it was collected.

    :param masks: as the environments told them, ``(T, N, n_choices)``; None: all actions are valid
    :return: values, log-probabilities and entropies, ``(T, N)``
    """
    policy, buffer, space = model.policy, model.rollout_buffer, model.action_space
    seen, starts = th.as_tensor(buffer.observations), buffer.episode_starts
    latent_pi = through_cells(policy.lstm_actor, seen, starts)
    if policy.lstm_critic is not None:
        latent_vf = through_cells(policy.lstm_critic, seen, starts)
    else:
        latent_vf = latent_pi if policy.shared_lstm else policy.critic(seen)
    values = policy.value_net(policy.mlp_extractor.value_net(latent_vf)).squeeze(2)
    logits = policy.action_net(policy.mlp_extractor.policy_net(latent_pi))
    if isinstance(space, spaces.MultiBinary):  # 0 has the logit 0
        logits, sizes = th.stack([th.zeros_like(logits), logits], dim=3).flatten(2), [2] * space.n
    else:
        sizes = [int(space.n)] if isinstance(space, spaces.Discrete) else list(map(int, space.nvec))
    masks = np.ones(logits.shape, dtype=bool) if masks is None else masks
    log_probs, entropies = th.zeros_like(values), th.zeros_like(values)
    ends = np.cumsum(sizes)
    for step, env in np.ndindex(*values.shape):
        for number, (end, size) in enumerate(zip(ends, sizes, strict=True)):
            part = slice(end - size, end)
            action = int(buffer.actions[step, env].ravel()[number])
            found = log_prob_among(logits[step, env, part], masks[step, env, part], action)
            log_probs[step, env], entropies[step, env] = log_probs[step, env] + found[0], entropies[step, env] + found[1]
    return values, log_probs, entropies


@th.no_grad()
def evaluated(model: Any) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
    """:return: the same as the update computes it, in minibatches of padded sequences; rows are told apart by their returns"""
    buffer = model.rollout_buffer
    shape = buffer.buffer_size, buffer.n_envs
    buffer.returns[:] = np.arange(np.prod(shape)).reshape(shape)
    found = [th.full((int(np.prod(shape)),), th.nan) for _ in range(3)]
    for minibatch in buffer.minibatches(7):
        rows = minibatch.data.returns[minibatch.mask].long()
        for column, values in zip(found, model._evaluate(minibatch.data), strict=True):
            assert values.isfinite().all()  # in the padding, too
            column[rows] = values.flatten()[minibatch.mask]
    values, log_probs, entropies = (column.reshape(shape) for column in found)
    return values, log_probs, entropies


def distance(some: tuple[th.Tensor, ...], others: tuple[th.Tensor, ...]) -> float:
    """:return: the largest difference, infinite where there is no number"""
    return max(float((one - other).abs().nan_to_num(nan=th.inf).max()) for one, other in zip(some, others, strict=True))
