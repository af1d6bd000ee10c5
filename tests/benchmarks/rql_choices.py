"""
What RQL gains if it chooses within the data: targets, actors and ways to act beside the published ones.

Run by hand, a command for each core, with tasks or seeds of its own; the last one prints the table over all rows:

    python -m tests.benchmarks.rql_choices --tasks puzzle-3x3-play-singletask-task1-v0 --episodes 100

A variant is trained offline for ``--steps`` gradient steps with the settings of the suite, then online for ``--online``
environment steps, and acts in every mode at both ends, with the bench's evaluation. Rows go to ``rql_choices.csv`` in
``--out``; the same command goes on after it was killed: models that are there are not trained again.

Variants of RQL (what it adds to the published one, which follows the value's gradient towards a target at fresh noise):

==================  =================================================================================================
``target``          the target is V_bar(s', a', 1) of the best of 4 decoded actions
``target, clone``   the same, and the actor only clones the data
``noise``           the target is V_bar(s', x', 0) of the best of 8 noises, none of which is decoded
``noise, clone``    the same, and the actor only clones the data
``critics``         5 value functions instead of 2
``half alpha``      half the weight of imitation
``explore best``    online, the best of 4 fresh samples is executed; offline it is the published one
``explore guided``  online, guided samples are executed; offline it is the published one
==================  =================================================================================================

``fql-best-of-n`` and ``dsrl`` are those of the bench. Modes: a sample; the best of n samples by the mean of the value
functions, or by their mean - 0.5 standard deviations (``careful``); ``acting_mode="guided"`` with its strength.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecNormalize, sync_envs_normalization

from sb3_flow import RQL, OfflineDataset
from sb3_flow.common.statistics import success_interval
from sb3_flow.data import ChunkSamples
from sb3_flow.flow import Velocity, best_of_n
from sb3_flow.losses import pessimistic_mean
from sb3_flow.rql.policies import RQLPolicy, Value
from sb3_flow.zoo.bench.command import locate_data
from sb3_flow.zoo.bench.results import add_row, read_rows, short_name
from sb3_flow.zoo.bench.suites import Plan, load_suite, plans
from sb3_flow.zoo.bench.training import EVALUATION_ENVS, environment, evaluate
from sb3_flow.zoo.registry import ALGORITHMS

COLUMNS = ("task", "variant", "seed", "steps", "mode", "episodes", "score")
MODES = ("sample", "best_of_4", "best_of_16", "careful_16", "guided_0.25", "guided_0.5", "guided_1")
OTHERS = ("fql-best-of-n", "dsrl")
VARIANTS = ("published", "target", "target, clone", "noise", "noise, clone", "critics", "half alpha")
EXPLORING = ("explore best", "explore guided")


class ChoosingPolicy(RQLPolicy):
    """RQL's policy, which can rank by a pessimistic mean and explore by its values."""

    pessimism = 0.0
    exploring = "published"

    def best_of(self, observation: Any, candidates: th.Tensor, aggregation: Any = None) -> th.Tensor:
        if not self.pessimism:
            return super().best_of(observation, candidates, aggregation)
        values = pessimistic_mean(self._bound_critic(observation)(candidates), self.pessimism)
        return best_of_n(candidates, values.unsqueeze(0), "mean")

    def explore_chunk(self, observation: Any) -> th.Tensor:
        noise = self.actor.noise(observation, self.exploration_generator)
        if self.exploring == "explore guided":
            return self.guided_samples(observation, noise(1)[:, 0])
        n = 4 if self.exploring == "explore best" else 1
        return self.best_of(observation, self.actor.act(observation, noise(n)))


class ChoosingRQL(RQL):
    """RQL with the variants of this comparison."""

    target = "published"
    clone = False

    def td_target(self, batch: ChunkSamples, noise: th.Tensor) -> th.Tensor:
        if self.target == "published":
            return super().td_target(batch, noise)
        n, rows = {"decoded": 4, "noise": 8}[self.target], len(noise)
        observations = batch.next_observations
        candidates = th.randn(rows, n, noise.shape[1], generator=self.draws)
        if self.target == "decoded":
            candidates = self.policy.actor_ema.act(observations, candidates)
        time = th.full((rows * n, 1), float(self.target == "decoded"))
        values = self.critic.bind(th.as_tensor(observations).repeat_interleave(n, dim=0))(candidates.flatten(0, 1), time)
        best = best_of_n(candidates, values.view(-1, rows, n), "mean")
        next_values = self.critic_target.bind(observations)(best, time[:rows])
        return batch.rewards + batch.discounts * pessimistic_mean(next_values, self.rho)

    def policy_loss(
        self, value: Value | None, velocity: Velocity, batch: ChunkSamples, noise: th.Tensor, time: th.Tensor
    ) -> tuple[th.Tensor, th.Tensor]:
        return super().policy_loss(None if self.clone else value, velocity, batch, noise, time)

    def update(self, batch: ChunkSamples, generator: th.Generator) -> dict[str, th.Tensor]:
        self.draws = generator
        return super().update(batch, generator)


def make(plan: Plan, variant: str, env: Any) -> Any:
    """Make the untrained model of a variant."""
    if variant in OTHERS:
        return ALGORITHMS[plan.algo]("MlpPolicy", env, seed=plan.seed, device="cpu", **plan.settings)  # type: ignore[call-arg]
    settings = {**plan.settings, "policy_kwargs": dict(plan.settings["policy_kwargs"])}
    if variant == "critics":
        settings["policy_kwargs"]["n_critics"] = 5
    if variant == "half alpha":
        settings["alpha"] /= 2
    if "target" in variant or "noise" in variant:
        settings["expectile"] = 0.5  # the choice takes the place of the expectile
    model = ChoosingRQL(ChoosingPolicy, env, seed=plan.seed, device="cpu", **settings)
    model.target = "decoded" if "target" in variant else "noise" if "noise" in variant else "published"
    model.clone = "clone" in variant
    return model


def set_mode(model: Any, mode: str) -> None:
    kind, _, number = mode.rpartition("_")
    model.policy.pessimism = 0.5 if kind == "careful" else 0.0
    if kind in ("best_of", "careful"):
        model.policy.n_candidates = int(number)
    if kind == "guided":
        model.policy.guidance = float(number)
    model.set_acting_mode({"best_of": "best_of_n", "careful": "best_of_n", "guided": "guided"}.get(kind, "sample"))


def steps_until(given: argparse.Namespace, online: int) -> str:
    """Name the end of a phase."""
    return f"{given.steps}+{online}" if online else str(given.steps)


def trained(given: argparse.Namespace, plan: Plan, variant: str, online: int) -> Any:
    """Load the model of a variant, or train it: offline, or from the end of that phase online."""
    name = "published" if variant in EXPLORING and not online else variant
    name = f"{name.replace(', ', '_').replace(' ', '_')}_{steps_until(given, online)}"
    folder = given.out / f"{plan.task}_{plan.seed}_{name}"
    if folder.exists():
        return load(folder, plan, variant)
    model = trained(given, plan, variant, 0) if online else make(plan, variant, environment(plan, 1, training=True))
    model.set_logger(configure(None, []))
    dataset = model.set_offline_dataset(OfflineDataset.load(locate_data(plan, given.data)))
    np.random.seed((plan.seed, online))  # OGBench draws from NumPy's global generator
    if online:
        model.policy.exploring = variant
        model.learn(online, log_interval=10**9)
    else:
        model.learn_offline(dataset, given.steps, log_interval=None)
    part = folder.with_suffix(".part")
    part.mkdir(exist_ok=True)
    model.save(part / "model.zip")
    model.get_vec_normalize_env().save(str(part / "vecnormalize.pkl"))
    part.rename(folder)
    return model


def load(folder: Path, plan: Plan, variant: str) -> Any:
    env: Any = environment(plan, 1, training=True)
    env = VecNormalize.load(str(folder / "vecnormalize.pkl"), env.venv)
    if variant in OTHERS:
        return ALGORITHMS[plan.algo].load(folder / "model.zip", env=env, device="cpu")
    # a file has the policy's class by value, as it was when the file was saved
    return ChoosingRQL.load(folder / "model.zip", env=env, device="cpu", custom_objects={"policy_class": ChoosingPolicy})


def evaluate_variant(given: argparse.Namespace, file: Path, plan: Plan, variant: str, online: int) -> None:
    """Let a variant act in the modes that have no row yet, at the end of a phase."""
    steps = steps_until(given, online)
    keys = {
        mode: (plan.task, variant, str(plan.seed), steps, mode, str(given.episodes))
        for mode in given.modes
        if possible(variant, mode)
    }
    done = {tuple(row[name] for name in COLUMNS[:-1]) for row in read_rows(file, COLUMNS)}
    todo = [mode for mode, key in keys.items() if key not in done]
    if not todo:
        return
    model = trained(given, plan, variant, online)
    evaluations = environment(plan, EVALUATION_ENVS, training=False)
    sync_envs_normalization(model.get_env(), evaluations)
    for mode in todo:
        set_mode(model, mode)
        model.policy.generator.manual_seed(plan.seed)
        score = evaluate(model, evaluations, given.episodes, plan.seed)
        add_row(file, dict(zip(COLUMNS, (*keys[mode], f"{score:g}"), strict=True)), COLUMNS, COLUMNS[:-1])
        print(f"{plan.task} seed {plan.seed} {variant}, {steps} steps, {mode}: {score:.2f}", flush=True)
    evaluations.close()
    model.get_env().close()


def possible(variant: str, mode: str) -> bool:
    """Tell whether a variant can act in a mode: what guides needs values of partial actions, DSRL has no candidates."""
    return variant not in OTHERS or mode == "sample" or (variant == "fql-best-of-n" and mode.startswith("best_of"))


def report(rows: list[dict[str, str]]) -> None:
    """Print a table for each task: a line for each variant and number of steps, a column for each mode, all seeds together."""
    modes = sorted({row["mode"] for row in rows}, key=lambda mode: (MODES.index(mode) if mode in MODES else len(MODES), mode))
    for task in sorted({row["task"] for row in rows}):
        print(f"\n| {short_name(task)} | steps | seeds | " + " | ".join(modes) + " |")
        print("|---" * (len(modes) + 3) + "|")
        lines = {(row["steps"], row["variant"]) for row in rows if row["task"] == task}
        for steps, variant in sorted(lines, key=lambda line: ([int(phase) for phase in line[0].split("+")], line[1])):
            mine = [row for row in rows if (row["task"], row["steps"], row["variant"]) == (task, steps, variant)]
            cells = []
            for mode in modes:
                found = [row for row in mine if row["mode"] == mode]
                episodes = sum(int(row["episodes"]) for row in found)
                score = sum(float(row["score"]) * int(row["episodes"]) for row in found) / max(1, episodes)
                share, low, high = success_interval(score, episodes) if found else (0.0, 0.0, 0.0)
                cells.append(f"{share:.2f} [{low:.2f}, {high:.2f}]" if found else "")
            seeds = " ".join(sorted({row["seed"] for row in mine}))
            print(f"| {variant} | {steps} | {seeds} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", help="of the suite (default: none, print the table)", default=[])
    known = [*VARIANTS, *EXPLORING, *OTHERS]
    parser.add_argument("--variants", nargs="+", choices=known, default=known)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=10_000, help="gradient steps offline (default: 10,000)")
    parser.add_argument("--online", type=int, default=0, help="environment steps afterwards (default: none)")
    parser.add_argument("--episodes", type=int, default=30)
    parser.add_argument("--data", type=Path, default=Path("bench/data"), help="the bench's folder of datasets")
    parser.add_argument("--out", type=Path, default=Path("bench/rql_choices"))
    given = parser.parse_args()
    th.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "rql_choices.csv"
    for task, seed, variant in itertools.product(given.tasks, given.seeds, given.variants):
        (plan,) = plans(load_suite("cpu"), [task], [variant if variant in OTHERS else "rql"], [seed])
        for online in sorted({0, given.online}):
            if variant not in EXPLORING or online:  # offline these are the published one
                evaluate_variant(given, file, plan, variant, online)
    report([row for row in read_rows(file, COLUMNS) if row["episodes"] == str(given.episodes)])


if __name__ == "__main__":
    main()
