"""Learning curves and importance ratios: what is drawn is what was measured."""

import subprocess
import sys

import numpy as np
import pytest
import torch as th
from matplotlib.image import imread
from on_policy import ACTION_SPACES, walks
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import load_results
from stable_baselines3.common.results_plotter import ts2xy, window_func
from tasks import PointEnv

from sb3_flow import GSPO, PPO, RecurrentPPO
from sb3_flow.common.statistics import bootstrap_interval
from sb3_flow.envs import SuccessInfo
from sb3_flow.plotting.curves import learning_curves
from sb3_flow.plotting.ratio_histogram import importance_ratios

ON_POLICY = {"n_steps": 16, "policy_kwargs": {"net_arch": [8]}, "seed": 0, "learning_rate": 0.01}


def write_evaluations(folder, steps, results, **arrays):
    folder.mkdir(parents=True)
    np.savez(folder / "evaluations.npz", timesteps=steps, results=results, ep_lengths=np.ones_like(results), **arrays)
    return folder


def curve(figure, number=0):
    """:return: points of a line, and lower and upper edge of its band"""
    (axis,) = figure.axes
    x, y = axis.lines[number].get_data()
    vertices = axis.collections[number].get_paths()[0].vertices
    edges = [(vertices[vertices[:, 0] == one, 1].min(), vertices[vertices[:, 0] == one, 1].max()) for one in x]
    return np.asarray(x), np.asarray(y), np.array(edges)


# ------------------------------------------------------------------ learning curves


def test_several_runs(tmp_path):
    rng = np.random.default_rng(0)
    results = rng.normal(size=(5, 3, 2))
    runs = [write_evaluations(tmp_path / str(i), [10, 20, 30], one) for i, one in enumerate(results)]
    figure = learning_curves({"ours": runs, "one": str(runs[0])}, title="a title", path=tmp_path / "new" / "curves.png")
    x, y, edges = curve(figure)
    assert x.tolist() == [10, 20, 30]
    for point in range(3):
        estimate = bootstrap_interval(results[:, point].mean(axis=1), resamples=2000)
        assert (y[point], *edges[point]) == pytest.approx(estimate)
    x, y, edges = curve(figure, 1)
    assert y == pytest.approx(results[0].mean(axis=1))
    assert edges[0] == pytest.approx(sorted(results[0, 0])), "of a single run: over its episodes"
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["ours (5 runs)", "one"]
    assert figure.axes[0].get_xlabel() == "time steps", "SB3's own file does not say which"
    assert imread(tmp_path / "new" / "curves.png").shape[:2] == (630, 1050)


def test_runs_of_other_lengths(tmp_path):
    runs = [
        write_evaluations(tmp_path / "a", [10, 20, 30], np.array([[0.0], [10.0], [20.0]])),
        write_evaluations(tmp_path / "b", [15, 25], np.array([[100.0], [200.0]])),
    ]
    x, y, _ = curve(learning_curves(runs))
    assert x.tolist() == [15, 20, 25], "where both runs are"
    assert y.tolist() == [52.5, 80.0, 107.5]


@pytest.mark.parametrize(
    ("offline", "steps", "label"),
    [
        ([True, True, False], [10, 20, 30], "gradient steps (offline); right of the line environment steps (online)"),
        ([True, True, True], [10, 20, 30], "gradient steps (offline)"),
        ([False, False, False], [10, 20, 30], "environment steps"),
    ],
)
def test_phases(offline, steps, label, tmp_path):
    counted = [10, 20, 10 if offline == [True, True, False] else 30]
    folder = write_evaluations(tmp_path / "a", counted, np.ones((3, 4)), offline=offline)
    figure = learning_curves(folder)
    assert figure.axes[0].lines[0].get_xdata().tolist() == steps
    assert figure.axes[0].get_xlabel() == label
    assert len(figure.axes[0].lines) == (2 if offline == [True, True, False] else 1)


@pytest.mark.parametrize("caveat", ["", "they are walks"])
def test_what_the_data_score_is_a_band(caveat, tmp_path):
    nan, own, other = [np.nan] * 3, [3.0, 2.0, 4.0], [7.0, 6.0, 8.0]
    folders = [
        write_evaluations(
            tmp_path / str(number),
            [1, 2, 1],
            np.zeros((3, 2)),
            offline=[True, True, False],
            behaviour_return=[behaviour, behaviour, nan],
            behaviour_caveat=[caveat, caveat, ""],
        )
        for number, behaviour in enumerate([own, own, other, nan])
    ]

    def drawn(runs, **kwargs):
        (axis,) = learning_curves(runs, **kwargs).axes
        legend = axis.get_legend()
        lines = [line.get_ydata()[0] for line in axis.lines if "dataset" in str(line.get_label())]
        bands = [(one.get_y(), one.get_y() + one.get_height()) for one in axis.patches]
        return lines, bands, [] if legend is None else [text.get_text() for text in legend.get_texts()]

    end = ", not of the task's episodes" if caveat else ""
    assert drawn(folders[:2]) == ([3.0], [(2.0, 4.0)], ["2 runs", f"dataset's own return{end}"])
    both = {"a": folders[0], "b": [folders[1], folders[2]]}
    labels = ["a", "b (2 runs)", f"dataset's own return (a){end}", f"dataset's own return (b){end}"]
    assert drawn(both) == ([3.0, 7.0], [(2.0, 4.0), (6.0, 8.0)], labels)
    assert drawn(folders[3]) == drawn(folders[0], quantity="length") == ([], [], [])


def test_success_and_length(tmp_path):
    arrays = {"successes": np.array([[True, False], [True, True]])}
    folder = write_evaluations(tmp_path / "a", [1, 2], np.zeros((2, 2)), **arrays)
    assert curve(learning_curves(folder, quantity="success"))[1].tolist() == [0.5, 1.0]
    assert curve(learning_curves(folder, quantity="length"))[1].tolist() == [1.0, 1.0]


def test_monitor_files_as_sb3_reads_them(tmp_path):
    env = make_vec_env(
        lambda: SuccessInfo(PointEnv()),
        n_envs=2,
        seed=0,
        monitor_dir=str(tmp_path),
        monitor_kwargs={"info_keywords": ("is_success",)},
    )
    env.reset()
    for _ in range(600):
        env.step(np.array([env.action_space.sample() for _ in range(2)]))
    env.close()
    steps, returns = ts2xy(load_results(str(tmp_path)), "timesteps")
    expected_x, expected_y = window_func(steps, returns, 10, np.mean)
    x, y, _ = curve(learning_curves(tmp_path, window=10))
    places = np.searchsorted(expected_x, x)
    assert np.array_equal(expected_x[places], x)
    assert expected_x[[0, -1]].tolist() == x[[0, -1]].tolist()
    assert y == pytest.approx(expected_y[places])
    successes = load_results(str(tmp_path))["is_success"].to_numpy()
    assert curve(learning_curves(tmp_path, quantity="success", window=10))[1][0] == pytest.approx(successes[:10].mean())
    with open(tmp_path / "0.monitor.csv", "a") as file:
        file.write("-3.0,")  # killed while writing
    assert curve(learning_curves(tmp_path, window=10))[1] == pytest.approx(y)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"runs": "nowhere"}, "nowhere has no evaluations.npz and no .*monitor.csv"),
        ({"runs": "nowhere", "source": "evaluations"}, "nowhere has no evaluations.npz"),
        ({"runs": {}}, "`runs` is empty"),
        ({"runs": {"a": []}}, "`runs` names a curve without a folder"),
        ({"runs": "x", "quantity": "reward"}, "`quantity` must be one of 'return', 'success', 'length', but 'reward'"),
        ({"runs": "x", "source": "csv"}, "`source` must be one of"),
    ],
)
def test_curves_that_cannot_be_drawn(arguments, message):
    with pytest.raises(ValueError, match=message):
        learning_curves(**arguments)


def test_no_success_in_the_file(tmp_path):
    folder = write_evaluations(tmp_path / "a", [1], np.zeros((1, 2)))
    with pytest.raises(ValueError, match=r"has no 'successes'.*SuccessInfo"):
        learning_curves(folder, quantity="success")


# ---------------------------------------------------------------- importance ratios


def test_ratios_of_the_last_rollout():
    model = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), batch_size=8, **ON_POLICY).learn(32)
    log_ratios, episodes = model.log_importance_ratios()
    buffer = model.rollout_buffer
    _, present, _ = model.policy.evaluate_actions(th.as_tensor(buffer.observations), th.as_tensor(buffer.actions))
    assert log_ratios == pytest.approx(present.detach().numpy() - buffer.log_probs.ravel(), abs=1e-6)
    assert np.abs(log_ratios).max() > 0.01, "the policy has moved"
    assert episodes[0] != episodes[16], "environments are episodes apart"
    figure = importance_ratios(model)
    (axis,) = figure.axes
    assert sum(bar.get_height() for bar in axis.patches) == 32
    assert [line.get_xdata()[0] for line in axis.lines] == pytest.approx([0.8, 1.2])
    share = np.mean((np.exp(log_ratios) < 0.8) | (np.exp(log_ratios) > 1.2))
    assert f"{100 * share:.1f} % outside" in figure.get_supxlabel()


def test_ratios_of_episodes():
    model = GSPO("MlpPolicy", walks(3, ACTION_SPACES["discrete"]), group_by="none", backend="torch", **ON_POLICY).learn(48)
    figure = importance_ratios(model)
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == 3, "a rollout of one episode an environment"
    assert figure.axes[0].get_xlabel() == "importance ratio of an episode"


def test_ratios_of_sequences():
    kwargs = {**ON_POLICY, "policy_kwargs": {"net_arch": [8], "lstm_hidden_size": 8}}
    model = RecurrentPPO("MlpLstmPolicy", walks(2, ACTION_SPACES["discrete"]), batch_size=8, **kwargs).learn(32)
    log_ratios, _ = model.log_importance_ratios()
    assert len(log_ratios) == 32
    assert np.isfinite(log_ratios).all()


def test_given_ratios(tmp_path):
    figure = importance_ratios(np.log([0.001, 1.0, 30.0]), clip_range=0.2, clip_range_high=0.3, path=tmp_path / "ratios.png")
    assert figure.axes[0].get_xscale() == "log"
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == 3
    assert "66.7 % outside [0.8, 1.3]" in figure.get_supxlabel()
    assert (tmp_path / "ratios.png").exists()
    assert importance_ratios(np.zeros(3)).axes[0].get_xscale() == "linear"
    far = importance_ratios(np.array([-1e3, 0.0, 1e3]), clip_range=1.5)
    assert sum(bar.get_height() for bar in far.axes[0].patches) == 3


def test_ratios_that_are_not_there():
    with pytest.raises(ValueError, match="`source` must be a model or finite log-ratios"):
        importance_ratios([np.nan])
    with pytest.raises(ValueError, match="has no rollout"):
        importance_ratios(PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), **ON_POLICY))


def test_without_matplotlib():
    """The package is imported without it; the error says which extra brings it."""
    script = """
import sys
sys.modules["matplotlib"] = sys.modules["matplotlib.figure"] = None
from sb3_flow.plotting import FlowVisualisationCallback, action_flow, flow_values, importance_ratios, learning_curves
flows = (lambda: action_flow(None, None), lambda: flow_values(None, None))
for draw in (lambda: learning_curves("x"), lambda: FlowVisualisationCallback(), lambda: importance_ratios([0.0]), *flows):
    try:
        draw()
    except ImportError as error:
        print(error)
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["Pictures need matplotlib: pip install 'sb3-flow[plots]'"] * 5
