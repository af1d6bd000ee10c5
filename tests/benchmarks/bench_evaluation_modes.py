"""
The noise that an action starts from, compared on the models that the demo saved: success and return of every evaluation mode.

Run by hand after ``make demo``: ``python -m tests.benchmarks.bench_evaluation_modes --models demo_output``.
"""

import argparse
from pathlib import Path

from stable_baselines3.common.vec_env import VecNormalize

from examples.demo import EPISODES, evaluate, make_env, row
from sb3_flow import RQL

MODES = (
    ("sample", False, "fresh noise (the paper's protocol)"),
    ("sample", True, "one fixed noise"),
    ("best_of_n", False, "best of 32 fresh noises"),
    ("best_of_n", True, "best of 32 fixed noises"),
    ("qgbs", True, "Q-guided beam search"),
    ("zero", True, "zero noise (default)"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("demo_output"), help="the demo's folder")
    folder = parser.parse_args().models
    print(f"{EPISODES} episodes a row, 95% intervals; local data")
    for name in ("rql_offline", "rql_online"):
        env = VecNormalize.load(str(folder / f"{name}_vecnormalize.pkl"), make_env(10, training=False).venv)
        env.training = False
        model = RQL.load(folder / name, env=env)
        for mode, deterministic, title in MODES:
            model.set_evaluation_mode(mode)
            print(row(f"{name}, {title}", evaluate(model, env, deterministic)), flush=True)


if __name__ == "__main__":
    main()
