"""Policies of RecurrentPPO with a GRU in place of the LSTM."""

from typing import Any

import torch as th
from sb3_contrib.common.recurrent.policies import (
    RecurrentActorCriticCnnPolicy,
    RecurrentActorCriticPolicy,
    RecurrentMultiInputActorCriticPolicy,
)
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import Schedule


class Gru(th.nn.GRU):
    """A GRU with the calls of an LSTM. Its cell state is empty: a tensor whose last dimension has no entries."""

    def forward(  # type: ignore[override]
        self, features: th.Tensor, states: tuple[th.Tensor, ...]
    ) -> tuple[th.Tensor, tuple[th.Tensor, th.Tensor]]:
        """
        Go through sequences.

        :param features: shape ``(length, n_sequences, features)``
        :param states: hidden state before the sequences, ``(layers, n_sequences, size)``, and a cell state, which is ignored
        :return: hidden states of the last layer after each step, and both states after the sequences
        """
        output, hidden = super().forward(features, states[0])
        return output, (hidden, hidden[..., :0])


class RecurrentPolicy(RecurrentActorCriticPolicy):
    """sb3-contrib's ``MlpLstmPolicy``, also for MultiDiscrete observations, and with all its arguments in its own files."""

    def make_features_extractor(self) -> BaseFeaturesExtractor:
        extractor = super().make_features_extractor()
        extractor._features_dim = int(extractor._features_dim)  # of MultiDiscrete NumPy's integer, which torch's LSTM refuses
        return extractor

    def _get_constructor_parameters(self) -> dict[str, Any]:
        layers, _, size = self.lstm_hidden_state_shape
        flags = {name: getattr(self, name) for name in ("shared_lstm", "enable_critic_lstm", "lstm_kwargs")}
        return {**super()._get_constructor_parameters(), "lstm_hidden_size": size, "n_lstm_layers": layers, **flags}


class GruPolicy(RecurrentPolicy):
    """
    Policy with a GRU (arXiv 1406.1078) where sb3-contrib's ``MlpLstmPolicy`` has an LSTM. Its arguments are those of
    ``MlpLstmPolicy``, also by name: ``lstm_hidden_size``, ``n_lstm_layers``, ``shared_lstm``, ``enable_critic_lstm``, and
    ``lstm_kwargs`` for ``torch.nn.GRU``.
    """

    def __init__(self, observation_space: Any, action_space: Any, lr_schedule: Schedule, *arguments: Any, **options: Any):
        super().__init__(observation_space, action_space, lr_schedule, *arguments, **options)
        for name in ("lstm_actor", "lstm_critic"):
            lstm = getattr(self, name)
            if lstm is not None:
                setattr(self, name, Gru(lstm.input_size, lstm.hidden_size, lstm.num_layers, **self.lstm_kwargs))
        rate: Any = lr_schedule(1)
        self.optimizer = self.optimizer_class(self.parameters(), lr=rate, **self.optimizer_kwargs)  # type: ignore[call-arg]


class GruCnnPolicy(GruPolicy, RecurrentActorCriticCnnPolicy):
    """The same for images."""


class GruMultiInputPolicy(GruPolicy, RecurrentMultiInputActorCriticPolicy):
    """The same for Dict observations."""
