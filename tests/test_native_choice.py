"""Which backend "auto" is, that it stays so, and what is said about it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stable_baselines3
import torch as th
from on_policy import ACTION_SPACES, walks
from stable_baselines3.common.callbacks import BaseCallback

from sb3_flow import PPO
from sb3_flow.common import backends
from sb3_flow.common.backends import choose_backend
from sb3_flow.on_policy.backend_choice import torch_is_faster

SMALL = {"n_steps": 32, "batch_size": 24, "n_epochs": 1, "seed": 3, "device": "cpu"}
NARROW = [(3, 64), (64, 64), (64, 1)] * 2
WIDE = [(3, 1024), (1024, 1024), (1024, 1)] * 2


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: Any) -> None:
    monkeypatch.delenv("SB3_FLOW_BACKEND", raising=False)


@pytest.fixture
def torch_faster(monkeypatch: Any) -> None:
    """As for a network of this size on many threads."""
    monkeypatch.setattr("sb3_flow.on_policy.policy_gradient.torch_is_faster", lambda *_: "layers of 64 units, for example")


def built(backend: str = "auto", **kwargs: Any) -> Any:
    return PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), backend=backend, **SMALL | kwargs)


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
def test_the_rule_has_one_boundary(threads: int) -> None:
    def native(layers: list[tuple[int, int]], batch_size: int, n_envs: int = 1) -> bool:
        return torch_is_faster(layers, batch_size, n_envs, threads) is None

    weights = sum(n_in * n_out for n_in, n_out in WIDE)
    limit = {1: 600e6, 2: 100e6, 3: 50e6, 8: 100e6 / 7, 64: 8e6}[threads]
    rows = int(limit // weights)
    assert native(WIDE, rows) and not native(WIDE, rows + 1)
    assert native(WIDE, 1, 2 * rows + 1) and not native(WIDE, 1, 2 * rows + 2)
    # SB3's defaults are native everywhere, and more threads do not speak for loops that run on one
    assert native(NARROW, 64) and native(NARROW, 64, 512)
    assert native(WIDE, rows + 1) <= (torch_is_faster(WIDE, rows + 1, 8, max(threads - 1, 1)) is None)


def test_the_rule_says_what_it_looked_at() -> None:
    expected = "layers have up to 1024 units, minibatches 4096 rows, there are 8 environments, and torch has 2 threads"
    assert torch_is_faster(WIDE, 4096, 8, 2) == expected
    assert str(torch_is_faster(WIDE, 4096, 8, 1)).endswith("torch has one thread")


def test_the_model_hands_over_what_it_is(monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setattr("sb3_flow.on_policy.policy_gradient.torch_is_faster", lambda *given: seen.append(given))
    built(policy_kwargs={"net_arch": {"pi": [7], "vf": [9, 5]}})
    built(batch_size=1000, policy_kwargs={"net_arch": []})  # more than a rollout has
    threads = th.get_num_threads()
    assert sorted(seen[0][0]) == sorted([(3, 7), (7, 2), (3, 9), (9, 5), (5, 1)]) and seen[0][1:] == (24, 2, threads)
    assert sorted(seen[1][0]) == [(3, 1), (3, 2)] and seen[1][1:] == (64, 2, threads)


def test_auto_says_what_it_chose_and_why(torch_faster: None, capsys: Any, monkeypatch: Any) -> None:
    assert built(verbose=1).native is None
    assert "Using the torch backend, which is faster here: layers of 64 units, for example" in capsys.readouterr().out
    built()
    assert capsys.readouterr().out == ""
    monkeypatch.undo()
    assert built(verbose=1).native is not None
    assert "Using the native backend, which is faster here.\n" in capsys.readouterr().out


def test_the_choice_is_kept(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A model that is loaded where the rule says otherwise goes on as it would have."""
    first = built().learn(64)
    first.save(tmp_path / "native")
    with monkeypatch.context() as patched:
        patched.setattr("sb3_flow.on_policy.policy_gradient.torch_is_faster", lambda *_: "of another machine")
        second = built().learn(64)
        second.save(tmp_path / "torch")
        loaded = PPO.load(tmp_path / "native", verbose=1)
        assert loaded.native is not None and loaded.backend == "auto"
        assert "Using the native backend, which was chosen when the model was built" in capsys.readouterr().out
        assert PPO.load(tmp_path / "native", backend="torch").native is None
        # SB3's file holds no choice
        env = walks(2, ACTION_SPACES["box"])
        stable_baselines3.PPO("MlpPolicy", env, **SMALL).save(tmp_path / "stock")
        assert PPO.load(tmp_path / "stock").native is None
    assert second.native is None and PPO.load(tmp_path / "torch").native is None
    assert PPO.load(tmp_path / "torch", backend="native").native is not None
    assert PPO.load(tmp_path / "stock").native is not None
    found = []
    for _ in range(2):
        again = PPO.load(tmp_path / "native", env=walks(2, ACTION_SPACES["box"]))
        again.set_random_seed(0)
        found.append(th.cat([one.flatten() for one in again.learn(64).policy.parameters()]))
    assert th.equal(*found)


class Watch(BaseCallback):
    """Looks at gradients or at calls of the policy, as ``wandb.watch`` does, or at steps of its optimizer."""

    def __init__(self, kind: str, since: str = "_init_callback"):
        super().__init__()
        self.kind, self.since, self.seen = kind, since, 0
        self.handle: Any = None

    def note(self, *_: Any) -> None:
        self.seen += 1

    def hook(self, since: str) -> None:
        if since == self.since and self.handle is None:
            policy: Any = self.model.policy
            register = {
                "gradients": policy.action_net.weight.register_hook,
                "calls": policy.register_forward_hook,
                "steps": policy.optimizer.register_step_post_hook,
                "coming steps": policy.optimizer.register_step_pre_hook,
            }
            self.handle = register[self.kind](self.note)

    def _init_callback(self) -> None:
        self.hook("_init_callback")

    def _on_training_start(self) -> None:
        self.hook("_on_training_start")

    def _on_rollout_start(self) -> None:
        self.hook("_on_rollout_start")

    def _on_rollout_end(self) -> None:
        self.hook("_on_rollout_end")

    def _on_step(self) -> bool:
        return True


@pytest.mark.parametrize("since", ["_init_callback", "_on_training_start", "_on_rollout_start", "_on_rollout_end"])
@pytest.mark.parametrize("kind", ["gradients", "calls", "steps", "coming steps"])
def test_hooks_of_a_callback_are_called(kind: str, since: str, tmp_path: Path, capsys: Any) -> None:
    model, watch = built(verbose=1), Watch(kind, since)
    model.learn(64, callback=watch)
    calls = 0 if since == "_on_rollout_end" else 32
    assert watch.seen == (calls if kind == "calls" else 3)  # steps of both environments; minibatches of a rollout
    said = "Using the torch backend, which is slower: hooks look into the policy or its gradients.\n"
    assert model.native is None and said in capsys.readouterr().out
    model.save(tmp_path / "hooked")
    watch.handle.remove()
    model.learn(64)
    assert model.native is not None
    assert PPO.load(tmp_path / "hooked").native is not None
    with pytest.raises(ValueError, match=r'`backend` is "native", but .* hooks look into the policy or its gradients'):
        built("native").learn(64, callback=Watch(kind, since))


def test_the_variable_replaces_auto_only(monkeypatch: Any) -> None:
    monkeypatch.setenv("SB3_FLOW_BACKEND", "torch")
    assert built().native is None and built("native").native is not None
    monkeypatch.setenv("SB3_FLOW_BACKEND", "native")
    assert built().native is not None and built("torch").native is None
    with pytest.raises(ValueError, match=r"SB3_FLOW_BACKEND.*ELU"):
        built(policy_kwargs={"activation_fn": th.nn.ELU})
    monkeypatch.setenv("SB3_FLOW_BACKEND", "jax")
    with pytest.raises(ValueError, match="SB3_FLOW_BACKEND"):
        built()


def test_without_compiled_code_auto_is_torch(monkeypatch: Any, tmp_path: Path) -> None:
    built().save(tmp_path / "native")
    monkeypatch.setattr(backends, "unavailable", lambda: "numba is not there")
    with pytest.warns(UserWarning, match="Using the torch backend, which is slower: numba is not there"):
        model = built()
    assert model.native is None
    with pytest.warns(UserWarning, match="slower"):
        assert PPO.load(tmp_path / "native").native is None
    assert built("torch").native is None
    with pytest.raises(ValueError, match=r'`backend` is "native", but .*numba is not there'):
        built("native")
    model.learn(64)
    assert np.isfinite(model.policy.log_std.detach().numpy()).all()


def test_elsewhere_torch_is_not_called_slower(monkeypatch: Any, capsys: Any) -> None:
    """There is nothing else, and nobody has measured it against compiled loops."""
    monkeypatch.setattr(backends, "unavailable", lambda: "numba is not there")
    assert choose_backend("auto", None, "the networks are on cuda", None, 1, "cuda") == "torch"
    assert capsys.readouterr().out == "Using the torch backend: the networks are on cuda.\n"


def test_a_loaded_choice_does_not_outweigh_what_is_covered(capsys: Any) -> None:
    assert choose_backend("auto", "native", "the policy is on cuda", None, 1) == "torch"
    assert "Using the torch backend, which is slower: the policy is on cuda" in capsys.readouterr().out
