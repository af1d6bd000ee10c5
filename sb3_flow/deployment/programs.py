"""Decisions of policies as functions of tensors, from raw observations to actions in the units of the environment."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from sb3_flow.offline_to_online.acting import ActingPolicy

Named = dict[str, th.Tensor]


class Normalized(nn.Module):
    """
    Observations as ``VecNormalize.normalize_obs`` gives them.

    :param env: has the statistics; None leaves observations as they are
    :param space: of the observations
    :raises ValueError: if the statistics are of other observations
    """

    def __init__(self, env: VecNormalize | None, space: spaces.Space[Any]) -> None:
        super().__init__()
        self.keys: tuple[str, ...] = ()
        if env is None or not env.norm_obs:
            return
        self.limit = float(env.clip_obs)
        statistics = env.obs_rms
        of_keys = {"": statistics} if isinstance(statistics, RunningMeanStd) else statistics
        self.keys = tuple(of_keys)
        shapes = {key: part.shape for key, part in space.items()} if isinstance(space, spaces.Dict) else {"": space.shape}
        found = {key: one.mean.shape for key, one in of_keys.items()}
        if not found.items() <= shapes.items():
            names = {key or "observation": shape for key, shape in found.items()}
            raise ValueError(
                f"`vec_normalize` has statistics of other observations than the policy's: {names}, but the policy sees "
                f"{space}. If a wrapper around the model's VecNormalize changes the observations (as VecFrameStack does), "
                "export `model.policy`, and normalise before you call the program."
            )
        for key, one in of_keys.items():
            self.register_buffer(f"mean_{key}", th.as_tensor(one.mean))
            self.register_buffer(f"deviation_{key}", th.as_tensor(np.sqrt(one.var + env.epsilon)))

    def forward(self, observation: PyTorchObs) -> PyTorchObs:
        if not isinstance(observation, dict):
            return self._one(observation, "") if self.keys else observation
        return {key: self._one(part, key) if key in self.keys else part for key, part in observation.items()}

    def _one(self, part: th.Tensor, key: str) -> th.Tensor:
        centred = part.double() - getattr(self, f"mean_{key}")
        return (centred / getattr(self, f"deviation_{key}")).clamp(-self.limit, self.limit).float()


class Program(nn.Module):
    """
    A policy's decision. A subclass defines ``decide``.

    :param policy: in evaluation mode
    :param env: statistics that observations are normalised by, if any
    """

    low: th.Tensor
    high: th.Tensor
    outputs: tuple[str, ...] = ("actions",)
    steps: int | None = None
    """Actions of a decision, an own dimension of the result; None: a decision is one action."""

    def __init__(self, policy: Any, env: VecNormalize | None) -> None:
        super().__init__()
        self.policy, self.normalized = policy, Normalized(env, policy.observation_space)
        space = policy.action_space
        if isinstance(space, spaces.Box):
            self.register_buffer("low", th.as_tensor(space.low))
            self.register_buffer("high", th.as_tensor(space.high))

    def inputs(self, n: int) -> Named:
        """
        Make inputs beside the observation, as examples.

        :param n: number of observations
        """
        return {}

    def forward(self, observation: PyTorchObs, *inputs: th.Tensor) -> Any:
        actions, *others = self.decide(self.normalized(observation), *inputs)
        found = (self.in_units(actions), *others)
        return found if len(found) > 1 else found[0]

    def decide(self, observation: PyTorchObs, *inputs: th.Tensor) -> tuple[th.Tensor, ...]:
        """
        Decide actions as the networks give them.

        :param observation: B observations, normalised
        :param inputs: see :meth:`inputs`
        :return: actions, and further outputs
        """
        raise NotImplementedError  # pragma: no cover

    def in_units(self, actions: th.Tensor) -> th.Tensor:
        """Bring actions into the action space as ``predict`` does."""
        space, steps = self.policy.action_space, () if self.steps is None else (self.steps,)
        actions = actions.reshape(-1, *steps, *space.shape)
        if not isinstance(space, spaces.Box):
            return actions
        if self.policy.squash_output:
            return self.low + 0.5 * (actions + 1.0) * (self.high - self.low)
        return actions.clamp(self.low, self.high)


class Chunks(Program):
    """
    Decisions of RQL, FMQ, FQL, RLPD, DSRL, QAM and FlowMapPolicy: chunks of actions, shape ``(B, h, *action_shape)``.

    :param keyed: noise is a function of the observation, as in ``predict(..., deterministic=True)``; else it is an input
    """

    policy: ActingPolicy

    def __init__(self, policy: ActingPolicy, env: VecNormalize | None, keyed: bool) -> None:
        super().__init__(policy, env)
        self.keyed = keyed
        self.steps = policy.horizon_length if policy.execution_horizon is None else policy.execution_horizon

    @property
    def n_noises(self) -> int:
        """Starting points of a decision that are inputs."""
        if self.keyed or self.policy.acting_mode == "zero":
            return 0
        return self.policy.n_candidates if self.policy.acting_mode == "best_of_n" else 1

    def inputs(self, n: int) -> Named:
        return {"noise": th.zeros(n, self.n_noises, self.policy.noise_dim)} if self.n_noises else {}

    def decide(self, observation: PyTorchObs, *inputs: th.Tensor) -> tuple[th.Tensor, ...]:
        with _given_noise(self.policy.acting_actor, *inputs):
            chunk = self.policy.predict_chunk(observation, deterministic=self.keyed)
        shape = self.policy.action_space.shape
        assert shape is not None
        return (chunk.reshape(-1, self.policy.horizon_length, *shape)[:, : self.steps],)


@contextmanager
def _given_noise(actor: Any, *noise: th.Tensor) -> Iterator[None]:
    """Have an actor draw the given noise, if there is any, within the context."""
    if noise:
        actor.noise = lambda *_, **__: lambda n: noise[0]
    try:
        yield
    finally:
        vars(actor).pop("noise", None)


class Actions(Program):
    """Decisions of PPO, GRPO and GSPO: the most probable actions, shape ``(B, *action_shape)``."""

    def decide(self, observation: PyTorchObs, *inputs: th.Tensor) -> tuple[th.Tensor, ...]:
        return (self.policy.get_distribution(observation, *inputs).get_actions(deterministic=True),)


class MaskedActions(Actions):
    """Decisions of MaskablePPO; ``action_masks`` is an input, bool."""

    def inputs(self, n: int) -> Named:
        n_choices = self.policy.action_net.out_features
        return {"action_masks": th.ones(n, n_choices, dtype=th.bool)}


class RecurrentActions(Program):
    """
    Decisions of RecurrentPPO. States of the LSTM or GRU, shape ``(layers, B, size)``, are inputs and outputs;
    ``episode_start``, of shape ``(B,)``, is 1 where an episode begins.
    """

    def __init__(self, policy: Any, env: VecNormalize | None) -> None:
        super().__init__(policy, env)
        self.states = ("hidden_state", "cell_state") if isinstance(policy.lstm_actor, nn.LSTM) else ("hidden_state",)
        self.outputs = ("actions", *(f"next_{name}" for name in self.states))

    def inputs(self, n: int) -> Named:
        lstm = self.policy.lstm_actor
        states = {name: th.zeros(lstm.num_layers, n, lstm.hidden_size) for name in self.states}
        return {**states, "episode_start": th.zeros(n)}

    def decide(self, observation: PyTorchObs, *inputs: th.Tensor) -> tuple[th.Tensor, ...]:
        n = len(self.states)
        states, episode_start = inputs[:n], inputs[n]
        policy, goes_on = self.policy, (1.0 - episode_start).view(1, -1, 1)
        # sb3-contrib's policy looks at the starts of episodes, which an exported program cannot
        prepared = preprocess_obs(observation, policy.observation_space, normalize_images=policy.normalize_images)
        features = policy.pi_features_extractor(prepared)
        output, states = policy.lstm_actor(features.unsqueeze(0), tuple(goes_on * state for state in states))
        latent = policy.mlp_extractor.forward_actor(output[0])
        return policy._get_action_dist_from_latent(latent).get_actions(deterministic=True), *states[:n]


class MaskedRecurrentActions(RecurrentActions):
    """Decisions of MaskableRecurrentPPO; ``action_masks`` is the last input, bool."""

    def inputs(self, n: int) -> Named:
        return {**super().inputs(n), "action_masks": th.ones(n, self.policy.n_choices, dtype=th.bool)}

    def decide(self, observation: PyTorchObs, *inputs: th.Tensor) -> tuple[th.Tensor, ...]:
        with self.policy.masked(inputs[-1]):
            return super().decide(observation, *inputs[:-1])
