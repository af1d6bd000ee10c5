"""The modes of acting of a generative actor and a critic: a sample, the best of several, a search, or a guided sample."""

from typing import Any, ClassVar, Literal, get_args

import torch as th
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_flow.common.checks import check_choice, check_number, check_whole
from sb3_flow.flow import AverageVelocity, Critic, beam_search, best_of_n
from sb3_flow.flow.guidance import Aggregation
from sb3_flow.offline_to_online.actors import GenerativeActor, batch_size_of
from sb3_flow.offline_to_online.chunking import ChunkedPolicy

ActingMode = Literal["sample", "zero", "best_of_n", "qgbs", "guided"]
ACTING_MODES: tuple[str, ...] = get_args(ActingMode)


class ActingPolicy(ChunkedPolicy):
    """
    A policy that finds its actions in one of five ways, by ``acting_mode``:

    =============  ====================================================================
    mode           an action is
    =============  ====================================================================
    ``sample``     the actor's answer to Gaussian noise
    ``zero``       the actor's answer to zeros
    ``best_of_n``  the best of ``n_candidates`` samples by the critics
    ``qgbs``       found by Q-guided beam search (arXiv 2605.12416, Algorithm 2)
    ``guided``     the actor's answer to Gaussian noise, of which each Euler step goes on along the gradient of a value of
                   partial actions (QGF, arXiv 2606.11087); of RQL alone
    =============  ====================================================================

    With ``deterministic=False`` noise is fresh. With ``deterministic=True`` it is a function of the observation and
    ``noise_seed``: an observation has the same action at every call, beside any other observations, before and after a reload.
    Over observations that noise is Gaussian, too, so that the policy is the same.

    Subclasses give the actor that acts and the critic; for ``qgbs`` the average velocity of the actor, too.
    """

    SEARCH: ClassVar[dict[str, Any]] = dict(beam_width=4, branches=4, iterations=1, eta=0.3, rho=1.5, completion="diagonal")
    """Settings of Q-guided beam search, with the values of the released implementation."""
    n_critics: int
    n_candidates: int
    acting_mode: ActingMode
    search: dict[str, Any]
    """Settings of Q-guided beam search that differ from ``SEARCH``."""
    q_aggregation: Aggregation = "min"
    no_search: str | None = None
    """Why there is no flow to search along; None if there is a flow."""
    no_guidance: str | None = "of the algorithms RQL alone learns them"
    """Why there are no values of partial actions to be guided by; None if there are."""

    @property
    def acting_actor(self) -> GenerativeActor:
        """Actor that ``predict`` uses."""
        raise NotImplementedError  # pragma: no cover

    @property
    def no_values(self) -> str | None:
        """Why no critic can value actions, if none can."""
        return "this policy has `n_critics=0`" if self.n_critics == 0 else None

    @property
    def acting_modes(self) -> tuple[str, ...]:
        """Modes that this policy can act in: ranking actions needs a critic, a search needs a flow."""
        return tuple(mode for mode in ACTING_MODES if self._refusal(mode) is None)

    def _refusal(self, mode: str) -> str | None:
        """Tell why this policy cannot act in a mode; None if it can."""
        if mode in ("sample", "zero"):
            return None
        if self.no_values is not None:
            return f'values actions by a critic, but {self.no_values}: give "sample" or "zero".'
        does, reason = {
            "qgbs": ("searches along a flow", self.no_search),
            "guided": ("follows values of partial actions", self.no_guidance),
        }.get(mode, ("", None))
        return None if reason is None else f'{does}, but {reason}: give "sample", "zero" or "best_of_n".'

    @property
    def steps_of_a_sample(self) -> int:
        """Evaluations of the actor's network for a sample."""
        return 1

    @property
    def steps_of_a_jump(self) -> int:
        """Evaluations of the actor's network for a jump of a search."""
        return 1

    @property
    def noise_dim(self) -> int:
        """Numbers of the noise of a decision."""
        return self.acting_actor.chunk_dim

    def samples(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        """
        Turn noise into actions, as the acting actor does.

        :param observation: B observations
        :param noise: n starting points for each of them, shape ``(B, n, noise_dim)``
        :return: actions in [-1, 1], shape ``(B, n, A)``
        """
        raise NotImplementedError  # pragma: no cover

    def guided_samples(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        """
        Turn noise into actions along the gradient of a value of partial actions.

        :param observation: B observations
        :param noise: a starting point for each of them, shape ``(B, noise_dim)``
        :return: actions in [-1, 1], shape ``(B, A)``
        """
        raise NotImplementedError  # pragma: no cover

    def _average_velocity(self, observation: PyTorchObs) -> AverageVelocity:
        """Give the average velocity of the acting actor for points of shape ``(B, n, A)`` of B observations."""
        raise NotImplementedError  # pragma: no cover

    def _bound_critic(self, observation: PyTorchObs) -> Critic:
        """Close the critic, from ``(B, n, A)`` to ``(K, B, n)``, over B observations; gradients reach actions only."""
        raise NotImplementedError  # pragma: no cover

    def set_acting_mode(self, mode: ActingMode, **search: Any) -> None:
        """
        Choose how ``predict`` finds actions from now on.

        :param mode: ``"sample"``, ``"zero"``, ``"best_of_n"``, ``"qgbs"`` or ``"guided"``, see the class
        :param search: settings of ``"qgbs"`` to change, see :func:`sb3_flow.flow.beam_search`
        :raises ValueError: if there is no such mode or setting, or the mode needs a critic or a flow that there is not
        """
        check_choice(ACTING_MODES, acting_mode=mode)
        if (refusal := self._refusal(mode)) is not None:
            raise ValueError(f'`acting_mode="{mode}"` {refusal}')
        unknown = sorted(set(search) - set(self.SEARCH))
        if unknown:
            raise ValueError(f"`search` knows {sorted(self.SEARCH)}, but {unknown} was given.")
        check_whole(1, **{name: search[name] for name in ("beam_width", "branches") if name in search})
        check_whole(0, iterations=search.get("iterations", 0))
        check_number(eta=search.get("eta"), rho=search.get("rho"))
        check_choice(("diagonal", "average"), completion=search.get("completion", "diagonal"))
        self.acting_mode = mode
        self.search = {**self.search, **search}

    @property
    def _search(self) -> dict[str, Any]:
        return {**self.SEARCH, **self.search}

    @property
    def network_evaluations(self) -> dict[str, int]:
        """
        Evaluations of the networks per decision and environment in the present mode: ``"actor"`` (the NFE of the paper) and
        ``"critic"``, of which ``"critic_gradient"`` with a gradient; ``"actions"`` counts the actions of a decision.
        """
        n, settings = self.n_candidates, self._search
        width, branches, iterations = (settings[name] for name in ("beam_width", "branches", "iterations"))
        moves = width * max(iterations, 1) if settings["eta"] else 0
        jumps = width * (1 + iterations * branches)
        counts = {
            "best_of_n": (n * self.steps_of_a_sample, n, 0),
            "qgbs": (jumps * self.steps_of_a_jump, width * iterations * branches + moves + width, moves),
            "guided": (self.steps_of_a_sample,) * 3,
        }
        found = counts.get(self.acting_mode, (self.steps_of_a_sample, 0, 0))
        actions = self.horizon_length if self.execution_horizon is None else self.execution_horizon
        return {**dict(zip(("actor", "critic", "critic_gradient"), found, strict=True)), "actions": actions}

    def predict_chunk(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        actor = self.acting_actor
        if self.acting_mode == "zero":
            zeros = th.zeros(batch_size_of(observation), 1, self.noise_dim, device=self.device)
            return self.samples(observation, zeros)[:, 0]
        noise = actor.noise(observation, self.generator, deterministic, self.noise_dim)
        if self.acting_mode == "best_of_n":
            return self.best_of(observation, self.samples(observation, noise(self.n_candidates)))
        if self.acting_mode == "qgbs":
            settings: dict[str, Any] = {**self._search, "aggregation": self.q_aggregation}
            if settings["eta"]:
                self._refuse_export()
            return beam_search(self._average_velocity(observation), self._bound_critic(observation), noise, **settings)
        if self.acting_mode == "guided":
            self._refuse_export()
            return self.guided_samples(observation, noise(1)[:, 0])
        return self.samples(observation, noise(1))[:, 0]

    def _refuse_export(self) -> None:
        if th.compiler.is_exporting() or th.jit.is_tracing():
            raise ValueError(
                f'`acting_mode="{self.acting_mode}"` takes gradients of the critic, which an exported program cannot: export '
                'the policy with "sample", "zero" or "best_of_n".'
            )

    def best_of(self, observation: PyTorchObs, candidates: th.Tensor, aggregation: Aggregation | None = None) -> th.Tensor:
        """
        Choose among actions by the critics.

        :param observation: B observations
        :param candidates: n actions for each of them, shape ``(B, n, A)``
        :param aggregation: of the critics, by default ``q_aggregation``
        :return: of each observation the candidate with the largest Q, shape ``(B, A)``
        """
        if candidates.shape[1] == 1:
            return candidates[:, 0]
        q_values = self._bound_critic(observation)(candidates)
        return best_of_n(candidates, q_values, aggregation or self.q_aggregation)
