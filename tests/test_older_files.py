"""
Files of earlier versions. Saved when the modes of acting had other names, they load with the modes that they had. Saved when
modules had other names, they load as they were, and training goes on as it would have gone on then.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import saved_models
import torch as th

from sb3_flow import FMQ, RQL, FlowMapPolicy

FILES = Path(__file__).parent / "older_files"
CASES = {
    "rql_best_of_n": (RQL, "best_of_n", None),
    "rql_sample_in_policy_kwargs": (RQL, "sample", None),
    "fmq_one_step": (FMQ, "sample", 1),  # saved with n_sampling_steps=3, which this sampler did not look at
    "fmq_n_step": (FMQ, "sample", 3),
    "fmq_qgbs": (FMQ, "qgbs", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_models(name, tmp_path):
    algorithm, mode, steps = CASES[name]
    model = algorithm.load(FILES / name)
    observation = np.zeros((2, 3), np.float32)
    action, _ = model.predict(observation, deterministic=True)
    assert model.policy.acting_mode == mode
    assert steps is None or model.policy.n_sampling_steps == steps
    assert name != "fmq_qgbs" or model.policy.search == {"beam_width": 3}
    model.save(tmp_path / "model")
    again = algorithm.load(tmp_path / "model")
    assert again.policy.acting_mode == mode and not {"evaluation_mode", "sampler"} & set(vars(again))
    np.testing.assert_array_equal(again.predict(observation, deterministic=True)[0], action)
    np.testing.assert_array_equal(algorithm.load(FILES / name).predict(observation, deterministic=True)[0], action)


@pytest.mark.parametrize(("name", "mode"), [("rql_best_of_n", "sample"), ("fmq_one_step", "best_of_n")])
def test_load_has_the_last_word(name, mode):
    algorithm = CASES[name][0]
    assert algorithm.load(FILES / name, acting_mode=mode).policy.acting_mode == mode
    with pytest.raises(ValueError, match="is called `acting_mode` now"):
        algorithm.load(FILES / name, sampler="one_step")


def test_policies(tmp_path):
    shutil.copy(FILES / "flow_map_policy_n_step.pth", tmp_path / "policy")
    policy = FlowMapPolicy.load(tmp_path / "policy")
    assert (policy.acting_mode, policy.n_sampling_steps) == ("sample", 3)


OLD_MODULES = FILES / "old_modules"  # written by `python tests/saved_models.py tests/older_files/old_modules`
OTHER_ROUNDING = {"rtol": 1e-3, "atol": 1e-4}
"""Of another processor, after a few updates whose learning rate is 3e-3."""


def resumed(name: str, folder: Path, disturb: Any = None) -> dict[str, np.ndarray]:
    """:return: what comes of training the saved model further"""
    with saved_models.one_thread():
        model = saved_models.load(name, folder)
        if disturb is not None:
            disturb(model)
        return saved_models.go_on(name, model)


def compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], exactly: bool) -> None:
    """Check that numbers are those of the record, on its machine to the last bit."""
    assert found.keys() == expected.keys()
    for name, array in found.items():
        if exactly:
            np.testing.assert_array_equal(array, expected[name], name)
        else:
            np.testing.assert_allclose(array, expected[name], **OTHER_ROUNDING, err_msg=name)


@pytest.mark.parametrize("name", [*saved_models.MODELS, *saved_models.POLICIES])
def test_models_of_old_modules_resume(name):
    record, expected = saved_models.read(OLD_MODULES / name)
    for of_a_signature in ("arguments", "options"):  # `*arguments, **options` of older constructors, which are no settings
        assert record["settings"].pop(of_a_signature, "None") == "None"
    with saved_models.one_thread():
        found = saved_models.settings(saved_models.load(name, OLD_MODULES / name))
    # signatures of today may name more
    assert {setting: found.get(setting) for setting in record["settings"]} == record["settings"]
    compare(resumed(name, OLD_MODULES / name), expected, exactly=record["machine"] == saved_models.machine())


def change_a_weight(model: Any) -> None:
    with th.no_grad():
        next(iter(model.policy.parameters())).flatten()[0] += 0.01


def change_a_moment(model: Any) -> None:
    optimizer = getattr(model.policy, "optimizer", None) or model.policy.actor.optimizer
    next(iter(optimizer.state.values()))["exp_avg_sq"] *= 4


def draw_a_number(model: Any) -> None:
    np.random.rand()
    if hasattr(model, "random_streams"):
        th.rand(1, generator=model.random_streams["windows"])


def change_the_buffer(model: Any) -> None:
    model.replay_buffer.rewards[:] += 1


@pytest.mark.parametrize(
    ("name", "disturb"),
    [
        *(
            (name, disturb)
            for name in ("ppo_native", "ppo_torch", "rql", "fmq")
            for disturb in (change_a_weight, change_a_moment, draw_a_number)
        ),
        *((name, change_the_buffer) for name in ("rql", "fmq")),
    ],
)
def test_what_is_lost_on_the_way_is_noticed(name, disturb):
    _, expected = saved_models.read(OLD_MODULES / name)
    found = resumed(name, OLD_MODULES / name, disturb)
    with pytest.raises(AssertionError):
        compare(found, expected, exactly=False)
