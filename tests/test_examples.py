"""Every example runs, shortened, and ends with what it promises."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from stable_baselines3 import PPO

from sb3_flow import FMQ, RQL, export
from tests.tasks import PointEnv

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _threads() -> Any:
    """The examples choose a number of threads for the process."""
    import torch as th

    before = th.get_num_threads()
    yield
    th.set_num_threads(before)


def run(name: str, *arguments: object) -> None:
    """As from the command line, in this process: imports take longer than the rest."""
    before = sys.argv
    sys.argv = [name, *map(str, arguments)]
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = before


def test_each_example_is_tested() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"demo"}  # `make demo` runs for minutes
    source = Path(__file__).read_text()
    assert {name for name in names if f'run("{name}"' in source} == names


def test_drop_in_ppo(capsys: Any) -> None:
    run("drop_in_ppo", "--steps", 1)
    rows = capsys.readouterr().out.splitlines()[1:]
    names = [row.split("  ")[0] for row in rows]
    assert names == ["stable_baselines3.PPO", "sb3_flow.PPO", 'sb3_flow.PPO(backend="torch")']
    speeds, returns = ([float(row[40:].split()[column]) for row in rows] for column in (0, 2))
    assert min(speeds) > 0
    assert returns[0] == returns[2] > 0  # the same numbers


def test_offline_rql(tmp_path: Path, capsys: Any) -> None:
    run("offline_rql", "--episodes", 3, "--steps", 3, "--eval-episodes", 2, "--out", tmp_path)
    out = capsys.readouterr().out
    assert "in 3 trajectories" in out and out.count("arrives") == 5
    assert (tmp_path / "offline_rql" / "paths.png").stat().st_size > 10_000
    assert RQL.load(tmp_path / "offline_rql" / "model.zip").offline_updates == 3


def test_offline_to_online_fmq(tmp_path: Path, capsys: Any) -> None:
    sizes = ("--episodes", 2, "--episode-length", 60, "--workers", 1, "--eval-episodes", 1)
    run("offline_to_online_fmq", *sizes, "--offline-steps", 3, "--online-steps", 32, "--out", tmp_path)
    folder = tmp_path / "offline_to_online_fmq"
    out = capsys.readouterr().out
    assert "offline, gradient step     3" in out and "online, environment step    32" in out
    assert (folder / "curve.png").stat().st_size > 10_000
    model = FMQ.load(folder / "model.zip")
    assert (model.offline_updates, model.num_timesteps) == (3, 32)


@pytest.mark.filterwarnings("ignore::UserWarning:minari.*")
@pytest.mark.parametrize("minari", [(), ("--minari",)])
def test_own_dataset(minari: tuple[str, ...], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    run("own_dataset", "--episodes", 5, "--steps", 3, "--out", tmp_path, *minari)
    assert RQL.load(tmp_path / "own_dataset" / "boat.zip").offline_updates == 3
    out = capsys.readouterr().out
    assert "rows            " in out and "in 5 trajectories" in out


def test_grpo_groups(tmp_path: Path, capsys: Any) -> None:
    run("grpo_groups", "--steps", 1, "--out", tmp_path)
    assert capsys.readouterr().out.count("mean return") == 3
    assert (tmp_path / "grpo_groups" / "curves.png").stat().st_size > 10_000


def test_async_ppo(tmp_path: Path, capsys: Any) -> None:
    run("async_ppo", "--steps", 4096, "--out", tmp_path)
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("  ")[0] for row in rows[1:4]] == ["PPO", 'AsyncPPO(mode="lockstep")', 'AsyncPPO(mode="free")']
    assert all("lag_mean" in row for row in rows[2:4])


def test_cluster_ppo(capsys: Any) -> None:
    ray = pytest.importorskip("ray")
    try:
        run("cluster_ppo", "--steps", 2048)
    finally:
        ray.shutdown()
    ours, sac = [line for line in capsys.readouterr().out.splitlines() if "return" in line]
    assert ours.startswith("AsyncPPO, 2 actors: ") and sac.startswith("SAC in a RayVecEnv: 200 steps, return -")


def test_custom_callback_tensorboard(tmp_path: Path, capsys: Any) -> None:
    run("custom_callback_tensorboard", "--data-steps", 300, "--steps", 210, "--out", tmp_path)
    out = capsys.readouterr().out
    for phase in ("offline", "online"):
        assert sum(line.startswith(f"{phase} ") and "samples/" in line for line in out.splitlines()) == 3
    assert len(list((tmp_path / "tensorboard").glob("samples_*/events*"))) == 2


def test_load_into_stock_sb3(tmp_path: Path, capsys: Any) -> None:
    run("load_into_stock_sb3", "--steps", 1, "--out", tmp_path)
    out = capsys.readouterr().out
    assert out.count("actions identical: True") == 5
    assert "actions identical: False" not in out
    PPO.load(tmp_path / "load_into_stock_sb3" / "stock.zip")


def test_robot(tmp_path: Path, capsys: Any) -> None:
    model = RQL("MlpPolicy", PointEnv(), horizon_length=3, policy_kwargs={"net_arch": [8]}, device="cpu")
    for mode in ("sample", "zero"):
        model.set_acting_mode(mode)
        export(model, tmp_path / "policy.onnx")
        run("robot", tmp_path / "policy.onnx", "--hertz", 200, "--seconds", 0.1)
        assert "20 steps at 200 Hz; late by (median, 99 %, most): " in capsys.readouterr().out
    ppo = PPO("MlpPolicy", PointEnv(), n_steps=8, device="cpu")
    export(ppo, tmp_path / "ppo.onnx")  # SB3's policies are taken, too
    run("robot", tmp_path / "ppo.onnx", "--hertz", 200, "--seconds", 0.1)
