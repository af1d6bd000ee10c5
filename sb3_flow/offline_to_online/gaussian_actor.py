"""The tanh-Gaussian actor of SAC (T. Haarnoja et al., arXiv 1812.05905) and its entropy coefficient."""

import math
from typing import Any, NamedTuple

import torch as th
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn
from torch.nn import functional as F

from sb3_flow.common.checks import check_number
from sb3_flow.flow import GaussianNetwork
from sb3_flow.offline_to_online.actors import GenerativeActor

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0


class TanhGaussian(NamedTuple):
    """
    Distributions of tanh(mean + std z), z ~ N(0, I), of which several terms of a loss can share one evaluation of the actor.

    :param mean: before tanh, shape ``(B, n, A)``, where n is 1 without a condition
    :param log_std: logarithm of the standard deviation before tanh, of the same shape
    """

    mean: th.Tensor
    log_std: th.Tensor

    def sample(self, noise: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        Turn noise into actions with their log-probabilities; gradients reach the actor.

        :param noise: z, n for each observation, shape ``(B, n, A)``
        :return: actions, shape ``(B, n, A)``, and log-probabilities of whole chunks, shape ``(B, n)``
        """
        u = self.mean + self.log_std.exp() * noise
        return th.tanh(u), self._log_density(noise, u)

    def log_prob(self, actions: th.Tensor) -> th.Tensor:
        """
        Compute log-probabilities of given actions; gradients reach the actor.

        :param actions: inside (-1, 1), n for each observation, shape ``(B, n, A)``
        :return: shape ``(B, n)``
        """
        u = th.atanh(actions)
        return self._log_density((u - self.mean) / self.log_std.exp(), u)

    def _log_density(self, z: th.Tensor, u: th.Tensor) -> th.Tensor:
        """Give log-probabilities of the actions tanh(u), where u is mean + std z (arXiv 1812.05905, Appendix C)."""
        log_gaussian = -0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u))  # log(1 - tanh(u)^2), finite for every u
        density: th.Tensor = (log_gaussian - log_slope).sum(dim=-1)
        return density


class GaussianActor(GenerativeActor):
    """
    Tanh-Gaussian policy, as SAC's: a = tanh(mean(s) + std(s) z) for noise z ~ N(0, I). The answer to z = 0 is the mode.

    ``GenerativeActor`` describes the other arguments.

    :param condition_dim: inputs of the network besides the observation's features, the ``condition`` of the methods
    """

    def __init__(self, *args: Any, condition_dim: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.condition_dim = condition_dim
        input_dim = self.features_dim + condition_dim
        self.network = GaussianNetwork(input_dim, self.chunk_dim, self.net_arch, self.activation_fn)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), "condition_dim": self.condition_dim}

    def gaussian(self, observation: PyTorchObs, condition: th.Tensor | None = None) -> TanhGaussian:
        """
        Compute the distributions of actions; gradients reach the network.

        :param observation: B observations
        :param condition: shape ``(B, n, condition_dim)``
        """
        features = self.extract_features(observation, self.features_extractor)
        inputs, n = features, 1
        if condition is not None:
            n = condition.shape[1]
            inputs = th.cat([features.unsqueeze(1).expand(-1, n, -1), condition], dim=-1).flatten(0, 1)
        mean, log_std = self.network(inputs)
        log_std = log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)
        return TanhGaussian(mean.unflatten(0, (-1, n)), log_std.unflatten(0, (-1, n)))

    def act(self, observation: PyTorchObs, noise: th.Tensor, condition: th.Tensor | None = None) -> th.Tensor:
        """
        Turn noise into actions.

        :param observation: B observations
        :param noise: z, n for each of them, shape ``(B, n, A)``
        :param condition: shape ``(B, n, condition_dim)``
        :return: actions in [-1, 1], shape ``(B, n, A)``
        """
        mean, log_std = self.gaussian(observation, condition)
        return th.tanh(mean + log_std.exp() * noise)

    def predict_chunk(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        """Decide chunks: the mode if ``deterministic``, as SAC's actor does, otherwise samples."""
        noise = self.noise(observation, self.generator)(1)
        return self.act(observation, th.zeros_like(noise) if deterministic else noise)[:, 0]


class EntropyCoefficient(nn.Module):
    """
    The coefficient alpha of the entropy in SAC's objectives, learned or constant, with the names and meaning of SB3's SAC.

    :param ent_coef: ``"auto"`` learns alpha from 1, ``"auto_0.1"`` from 0.1; a number keeps alpha constant
    :param target_entropy: entropy that a learned alpha aims at; ``"auto"`` is -A, ``"auto_0.5"`` is -0.5 A
    :param chunk_dim: A, numbers of an action chunk
    :param lr_schedule: learning rate of alpha
    :raises ValueError: if an argument has neither form, or alpha would be negative, or would be learned from zero
    """

    optimizer: th.optim.Optimizer
    log_ent_coef: nn.Parameter
    ent_coef: th.Tensor

    def __init__(self, ent_coef: str | float, target_entropy: str | float, chunk_dim: int, lr_schedule: Schedule) -> None:
        super().__init__()
        check_entropy(ent_coef, target_entropy)
        is_learned, alpha = _read("ent_coef", ent_coef)
        is_relative, entropy = _read("target_entropy", target_entropy)
        self.is_learned = is_learned
        self.target_entropy = -entropy * chunk_dim if is_relative else entropy
        if is_learned:
            self.log_ent_coef = nn.Parameter(th.tensor(math.log(alpha)))
            self.optimizer = th.optim.Adam([self.log_ent_coef], lr=lr_schedule(1), fused=True)  # waits for no device
        else:
            self.register_buffer("ent_coef", th.tensor(alpha), persistent=False)  # an argument, which `load` may change

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *lists: list[str],
    ) -> None:
        state_dict.pop(f"{prefix}ent_coef", None)  # older files have it
        was_learned = f"{prefix}log_ent_coef" in state_dict
        if was_learned != self.is_learned:
            kind, form = ("learned", '"auto"') if was_learned else ("constant", "a number")
            # part of the error of `load_state_dict`, which raises it only if it is strict
            missing_keys.append(f"`ent_coef` was {kind} when the model was saved: give {form}, or leave it as it was.")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *lists)

    def forward(self) -> th.Tensor:
        """Give alpha, a scalar without a gradient."""
        return self.log_ent_coef.detach().exp() if self.is_learned else self.ent_coef

    def loss(self, log_prob: th.Tensor) -> th.Tensor:
        """
        Compute -log(alpha) (log_prob + target_entropy), SB3's loss, whose gradient reaches alpha alone.

        :param log_prob: of actions of the policy, any shape
        :return: scalar; zero if alpha is constant
        """
        if not self.is_learned:
            return log_prob.new_zeros(())
        return -(self.log_ent_coef * (log_prob + self.target_entropy).detach()).mean()


class HasEntropyCoefficient:
    """An algorithm with SAC's entropy coefficient, under the names of SB3's SAC."""

    entropy_coefficient: EntropyCoefficient

    @property
    def log_ent_coef(self) -> th.Tensor | None:
        """Logarithm of alpha while it is learned, otherwise None."""
        return self.entropy_coefficient.log_ent_coef if self.entropy_coefficient.is_learned else None

    @property
    def ent_coef_tensor(self) -> th.Tensor:
        """The present alpha; SB3's SAC has this only while alpha is constant."""
        return self.entropy_coefficient.forward()


def check_entropy(ent_coef: str | float, target_entropy: str | float) -> None:
    """
    Refuse arguments that :class:`EntropyCoefficient` cannot use.

    :param ent_coef: see there
    :param target_entropy: see there
    :raises ValueError: see there
    """
    is_learned, alpha = _read("ent_coef", ent_coef)
    if alpha < 0 or (is_learned and alpha == 0):
        least = "greater than 0 where it is learned" if is_learned else "at least 0"
        raise ValueError(f"`ent_coef` must be {least}, but {ent_coef!r} was given.")
    _read("target_entropy", target_entropy)


def why_not_learned(ent_coef: str | float) -> str | None:
    """Say why ``target_entropy`` has no effect, or None if it has."""
    return None if isinstance(ent_coef, str) and ent_coef.startswith("auto") else f"`ent_coef` is {ent_coef}, and not learned"


def _read(name: str, given: Any) -> tuple[bool, float]:
    """Read ``"auto"``, ``"auto_<number>"`` or a number: whether the word is there, and the number, by default 1."""
    word, _, number = given.partition("_") if isinstance(given, str) else ("", "", given)
    is_auto = word == "auto"
    try:
        value = float(number or 1.0) if is_auto else float(given)
    except (TypeError, ValueError):
        raise ValueError(f'`{name}` must be "auto", "auto_<number>" or a number, but {given!r} was given.') from None
    read: dict[str, Any] = {name: value}
    check_number(**read)
    return is_auto, value
