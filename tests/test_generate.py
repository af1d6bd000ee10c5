"""Locally generated OGBench data: layout, determinism, resumption, and oracles that do their task."""

import builtins
import functools
import pathlib
import tempfile
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("ogbench")

from sb3_flow.data import generate as module
from sb3_flow.data.generate import generate
from sb3_flow.data.oracles import DTYPES, RECIPES, EpisodeMaker, cube_in_sight, find_recipe, maze_cells

pytestmark = pytest.mark.filterwarnings("ignore")  # gymnasium, glfw and mujoco about precision and displays

MANIPULATION = sorted({recipe.domain for recipe in RECIPES.values() if recipe.kind != "navigate"})
LENGTH = 40


@pytest.fixture(scope="module")
def make() -> Callable[[str], EpisodeMaker]:
    """Environments are compiled once a domain: the two kinds of manipulation data share theirs."""

    @functools.cache
    def of_domain(domain: str) -> EpisodeMaker:
        recipe = next(recipe for recipe in RECIPES.values() if recipe.domain == domain)
        return EpisodeMaker(recipe, 300)

    def maker(name: str, length: int = LENGTH) -> EpisodeMaker:
        recipe = find_recipe(name)
        found = of_domain(recipe.domain)
        found.recipe = recipe
        found.env._max_episode_steps = length  # TimeLimit
        return found

    return maker


def tiny(name: str, out: pathlib.Path, **changes) -> pathlib.Path:
    arguments = {"episodes": 3, "episode_length": LENGTH, "progress_bar": False, "out": out, **changes}
    return generate(name, **arguments)


def val_file(train: pathlib.Path) -> pathlib.Path:
    return train.with_name(train.name.replace(".npz", "-val.npz"))


def both_bytes(train: pathlib.Path) -> tuple[bytes, bytes]:
    return train.read_bytes(), val_file(train).read_bytes()


def assert_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert list(first) == list(second)
    for key in first:
        assert first[key].tobytes() == second[key].tobytes(), key


@pytest.fixture(scope="module")
def maze_file() -> pathlib.Path:
    with tempfile.TemporaryDirectory() as folder:
        yield tiny("pointmaze-medium-navigate", pathlib.Path(folder) / "new" / "folder")


# --- what is in the files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_every_data_set_makes_an_episode(name, make):
    episode = make(name).episode(seed=0, split=0, index=0)
    with_buttons = name.startswith(("scene", "puzzle"))
    assert list(episode) == [key for key in DTYPES if key != "button_states" or with_buttons]
    for key, values in episode.items():
        assert values.dtype == DTYPES[key]
        assert len(values) == LENGTH
        assert np.isfinite(values).all()
    assert episode["terminals"].sum() == 1 and episode["terminals"][-1]
    assert np.abs(episode["actions"]).max() <= 1.0
    if name.startswith("pointmaze"):
        same = np.all(episode["observations"] == episode["qpos"], axis=1)
        # a teleported point is observed at the entrance and stored at the exit, as in the published data
        assert same.all() if "teleport" not in name else same.mean() > 0.9
    else:  # positions before the step, like the observation
        assert np.array_equal(episode["observations"][:, :6], episode["qpos"][:, :6])
        assert episode["actions"].shape == (LENGTH, 5)


def test_file_layout(maze_file):
    assert maze_file.name == "pointmaze-medium-navigate-v0.npz"
    for path, episodes in ((maze_file, 3), (val_file(maze_file), 1)):
        with np.load(path) as data:
            assert data.files == ["observations", "actions", "terminals", "qpos", "qvel"]
            assert {key: data[key].dtype for key in data.files} == {key: DTYPES[key] for key in data.files}
            assert data["observations"].shape == (episodes * LENGTH, 2)
            assert data["qvel"].shape == (episodes * LENGTH, 2)
            assert np.flatnonzero(data["terminals"]).tolist() == [LENGTH * (i + 1) - 1 for i in range(episodes)]
    assert [entry.name for entry in maze_file.parent.iterdir() if entry.name.startswith(".")] == []


def test_splits_and_episodes_differ(maze_file):
    with np.load(maze_file) as train, np.load(val_file(maze_file)) as val:
        starts = np.concatenate([train["qpos"][::LENGTH], val["qpos"][::LENGTH]])
    assert len(np.unique(starts, axis=0)) == 4


@pytest.mark.parametrize("name", ["pointmaze-large-navigate", "cube-single-noisy", "scene-play"])
def test_ogbench_reads_and_labels_it(name, tmp_path):
    import ogbench

    path = tiny(name, tmp_path, episodes=2)
    with np.load(path) as data:
        stored = dict(data)
    domain, kind = name.rsplit("-", 1)
    _, train, val = ogbench.make_env_and_datasets(f"{domain}-{kind}-singletask-v0", dataset_path=str(path), add_info=True)
    assert len(train["rewards"]) == 2 * (LENGTH - 1)
    assert len(val["rewards"]) == LENGTH - 1
    kept = ~stored["terminals"]
    for key in set(stored) - {"terminals"}:
        assert np.array_equal(train[key], stored[key][kept]), key
    assert np.array_equal(np.flatnonzero(train["terminals"]), [LENGTH - 2, 2 * LENGTH - 3])
    assert train["masks"].min() >= 0.0 and train["rewards"].max() <= 0.0
    assert ("button_states" in train) == (domain.split("-")[0] in ("scene", "puzzle"))


# --- oracles do what they are for ------------------------------------------------------------------------------------


def test_navigate_statistics(make):
    episodes = [make("pointmaze-medium-navigate", 1001).episode(0, 0, index) for index in range(5)]
    actions = np.concatenate([episode["actions"] for episode in episodes])
    assert np.mean(np.abs(actions) == 1.0) == pytest.approx(0.27, abs=0.03)
    moved = np.concatenate([np.linalg.norm(np.diff(episode["qpos"], axis=0), axis=1) for episode in episodes])
    assert moved.mean() == pytest.approx(0.19, abs=0.02)  # a full action is .2 a component
    # One goal after the other. The median, because an episode may hover for long at a cell's centre, from where the
    # recipe reaches a goal in the cell's corner only by its noise.
    visited = [len(np.unique(np.round((episode["qpos"] + 4) / 4), axis=0)) for episode in episodes]
    assert np.median(visited) >= 12  # of the 26 free cells


@pytest.mark.parametrize("kind", ["play", "noisy"])
def test_cube_oracle_carries_the_cube(kind, make):
    cube = make(f"cube-single-{kind}", 300).episode(0, 0, 0)["qpos"][:, 14:17]
    assert np.ptp(cube[:, 2]) > 0.04  # it is lifted
    assert np.linalg.norm(cube[:, :2] - cube[0, :2], axis=1).max() > 0.05  # and put elsewhere


@pytest.mark.parametrize("kind", ["play", "noisy"])
def test_button_oracle_presses_buttons(kind, make):
    buttons = make(f"puzzle-3x3-{kind}", 200).episode(0, 0, 0)["button_states"]
    assert len(np.unique(buttons, axis=0)) >= 3


def test_scene_oracles_change_the_scene(make):
    """Between them, a few short episodes press a button and move cube, drawer and window."""
    changed = np.zeros(4, dtype=bool)
    for index in range(12):
        episode = make("scene-play", 150).episode(0, 0, index)
        qpos = episode["qpos"]  # 14 arm joints, 7 for the cube, 2 buttons, drawer, window
        travel = [np.ptp(qpos[:, 14:16], axis=0).max(), np.ptp(qpos[:, 23]), np.ptp(qpos[:, 24])]
        changed |= [np.ptp(episode["button_states"], axis=0).max() > 0, *(value > 0.05 for value in travel)]
        if changed.all():
            return
    raise AssertionError(f"button, cube, drawer, window: {changed}")


def test_maze_cells():
    free, junctions = maze_cells(
        np.array([[1, 1, 1, 1, 1], [1, 0, 0, 0, 1], [1, 1, 1, 0, 1], [1, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
    )
    assert free == [(1, 1), (1, 2), (1, 3), (2, 3), (3, 3)]
    assert junctions == [(1, 1), (1, 3), (3, 3)]  # dead ends and the bend, not the corridors


@pytest.mark.parametrize(
    ("y", "z", "expected"),
    [(0.0, 0.02, True), (0.29, 0.02, False), (-0.31, 0.02, False), (-0.31, 0.07, True), (-0.31, 0.09, False)],
)
def test_cube_in_sight(y, z, expected):
    qpos = np.zeros((3, 25))
    qpos[1, 15:17] = y, z
    assert cube_in_sight(qpos) == expected


def test_scene_episode_is_redrawn_until_the_cube_is_in_sight(make, monkeypatch):
    maker = make("scene-play")
    first = maker.episode(0, 0, 0)
    verdicts = [False, True]
    monkeypatch.setattr("sb3_flow.data.oracles.cube_in_sight", lambda qpos: verdicts.pop(0))
    second = maker.episode(0, 0, 0)
    assert verdicts == []
    assert not np.array_equal(first["qpos"], second["qpos"])


# --- determinism -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pointmaze-teleport-navigate", "cube-single-noisy", "scene-noisy", "puzzle-3x3-noisy"])
def test_reused_environment_equals_fresh_one(name, make):
    length = 100 if name.startswith("scene") else LENGTH
    used, fresh = make(name, length), EpisodeMaker(find_recipe(name), length)
    for index in range(3):
        used.episode(0, 1, index)
    if not name.startswith("pointmaze"):  # inactive targets, too: they are what ogbench's reset forgets
        infos = [maker._reset(np.random.SeedSequence(0))[1] for maker in (used, fresh)]
        assert infos[0].keys() == infos[1].keys()
        for key, value in infos[0].items():
            assert np.array_equal(value, infos[1][key]), key
    assert_same(used.episode(0, 0, 0), fresh.episode(0, 0, 0))


def test_same_bytes_for_any_number_of_workers(tmp_path):
    one = tiny("cube-single-noisy", tmp_path / "1", episodes=2)
    two = tiny("cube-single-noisy", tmp_path / "2", episodes=2, workers=2)
    assert both_bytes(one) == both_bytes(two)


def test_rerun_same_bytes_and_other_seed_other_data(maze_file, tmp_path):
    again = tiny("pointmaze-medium-navigate-v0", tmp_path / "again")
    other = tiny("pointmaze-medium-navigate", tmp_path / "other", seed=1)
    assert both_bytes(again) == both_bytes(maze_file)
    assert not set(both_bytes(other)) & set(both_bytes(maze_file))


def test_first_episodes_do_not_depend_on_how_many(maze_file, tmp_path):
    with np.load(tiny("pointmaze-medium-navigate", tmp_path, episodes=1)) as one, np.load(maze_file) as three:
        assert np.array_equal(one["actions"], three["actions"][:LENGTH])


def test_global_numpy_state_is_neither_read_nor_changed(maze_file, tmp_path):
    np.random.seed(123)
    before = np.random.get_state()
    path = tiny("pointmaze-medium-navigate", tmp_path)
    after = np.random.get_state()
    assert np.array_equal(before[1], after[1]) and before[2:] == after[2:]
    assert both_bytes(path) == both_bytes(maze_file)


# --- stopping and going on -------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(tmp_path, monkeypatch) -> pathlib.Path:
    """A folder in which a run was killed after its last episode; returns the folder of the parts."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "merge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tiny("pointmaze-medium-navigate", tmp_path)
    parts = tmp_path / ".pointmaze-medium-navigate-v0.parts"
    assert sorted(path.name for path in parts.iterdir()) == [
        "manifest.json",
        *(f"train-{i:06d}.npz" for i in range(3)),
        "val-000000.npz",
    ]
    return parts


def test_resumes_with_the_missing_episodes_only(stopped, maze_file, monkeypatch):
    (stopped / "train-000001.npz").unlink()
    truncated = stopped / "train-000002.npz"
    truncated.write_bytes(truncated.read_bytes()[:-200])
    flipped = stopped / "val-000000.npz"
    content = bytearray(flipped.read_bytes())
    content[200] ^= 1
    flipped.write_bytes(content)
    made = []
    original = module._make_part
    monkeypatch.setattr(module, "_make_part", lambda plan, *job: (made.append(job), original(plan, *job)))
    path = tiny("pointmaze-medium-navigate", stopped.parent)
    assert made == [(0, 1), (0, 2), (1, 0)]
    assert both_bytes(path) == both_bytes(maze_file)
    assert not stopped.exists()


def test_killed_between_the_two_files(stopped, maze_file):
    val_file(stopped.parent / maze_file.name).write_bytes(b"old")
    assert both_bytes(tiny("pointmaze-medium-navigate", stopped.parent)) == both_bytes(maze_file)


def test_parts_of_another_run_are_refused(stopped):
    with pytest.raises(ValueError, match=r"navigate-v0\.parts holds .* \(seed 0 there, 1 now\).*delete this folder"):
        tiny("pointmaze-medium-navigate", stopped.parent, seed=1)
    with pytest.raises(ValueError, match=r"episode_length 40 there, 41 now"):
        tiny("pointmaze-medium-navigate", stopped.parent, episode_length=41)
    (stopped / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no manifest"):
        tiny("pointmaze-medium-navigate", stopped.parent)


def test_an_error_leaves_no_unfinished_file(tmp_path):
    with pytest.raises(RuntimeError), module.replacing(tmp_path / "file") as file:
        file.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_finished_data_is_not_overwritten(maze_file):
    with pytest.raises(FileExistsError, match=r"exists already: delete it"):
        tiny("pointmaze-medium-navigate", maze_file.parent, seed=3)


# --- arguments, messages, command line -------------------------------------------------------------------------------


def test_defaults_are_the_published_sizes():
    sizes = {name: (recipe.episodes, recipe.episode_length) for name, recipe in RECIPES.items()}
    assert len(sizes) == 22
    assert sizes["pointmaze-giant-navigate"] == (500, 2001)
    assert sizes["cube-triple-play"] == sizes["puzzle-4x5-noisy"] == (3000, 1001)
    assert sizes["cube-quadruple-noisy"] == sizes["puzzle-4x6-play"] == (5000, 1001)
    assert sizes["scene-play"] == sizes["puzzle-4x4-play"] == sizes["cube-double-play"] == (1000, 1001)
    assert RECIPES["puzzle-3x3-noisy"].random_actions == 0.2
    assert RECIPES["scene-noisy"].random_actions == 0.1
    assert RECIPES["scene-play"].random_actions == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes": 0}, "episodes=0: expected an integer >= 1"),
        ({"episodes": 2.5}, "episodes=2.5: expected an integer >= 1"),
        ({"workers": 0}, "workers=0: expected an integer >= 1"),
        ({"workers": True}, "workers=True: expected an integer"),
        ({"seed": -1}, "seed=-1: expected an integer >= 0"),
        ({"val_episodes": 0}, "val_episodes=0: expected an integer >= 1"),
        ({"episode_length": 1}, "episode_length=1: expected an integer >= 2"),
    ],
)
def test_bad_numbers(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tiny("cube-single-play", tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


def test_bad_names(tmp_path):
    with pytest.raises(ValueError, match=r"'cube-quintuple-play' is not .* known: .*cube-single-play.*puzzle-4x6-noisy"):
        tiny("cube-quintuple-play", tmp_path)
    for name in ("antmaze-large-navigate-v0", "humanoidmaze-medium-navigate", "antsoccer-arena-navigate"):
        with pytest.raises(ValueError, match="expert policies, which cannot be made here"):
            tiny(name, tmp_path)


def test_out_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file' is not a folder"):
        tiny("cube-single-play", tmp_path / "file")


def test_without_ogbench(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs the package ogbench: pip install 'sb3-flow\[ogbench\]'"):
        tiny("cube-single-play", tmp_path)


def test_command_line(maze_file, tmp_path, capsys):
    options = ["--episodes", "3", "--episode-length", str(LENGTH), "--out", str(tmp_path), "--seed", "0"]
    module.main(["pointmaze-medium-navigate", *options])
    shown = capsys.readouterr()
    path = pathlib.Path(shown.out.strip())
    assert both_bytes(path) == both_bytes(maze_file)
    assert "4/4" in shown.err
    with pytest.raises(SystemExit):
        module.main(["pointmaze-medium-navigate", *options])
    assert "exists already" in capsys.readouterr().err


def test_progress_without_tqdm(capsys, monkeypatch):
    real_import = builtins.__import__

    def no_tqdm(name, *args, **kwargs):
        if name == "tqdm":
            raise ImportError
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_tqdm)
    with module._progress("some-data", total=3, done=1, show=True) as advance:
        advance()
        advance()
    assert "some-data: 3/3 episodes, " in capsys.readouterr().err
