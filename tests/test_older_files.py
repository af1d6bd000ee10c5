"""Files that were saved when the modes of acting had other names load with the modes that they had."""

import shutil
from pathlib import Path

import numpy as np
import pytest

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
