"""
rl-zoo3's ``push_to_hub`` and ``load_from_hub``, with its arguments and its files on the Hub.

rl-zoo3 2.9.2's own ``push_to_hub`` asks sb3-team-hf-integration for a name that its version 3.2 does not have, and its
``load_from_hub`` takes an error for missing statistics that the Hub's library no longer raises.
"""

import argparse
import importlib
import re
import shlex
import shutil
import sys
import tempfile
import warnings
import zipfile
import zlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import rl_zoo3
import yaml
from huggingface_sb3 import EnvironmentName, ModelName
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.utils import StoreDict, create_test_env, get_latest_run_id, get_model_path, get_saved_hyperparams
from stable_baselines3.common.utils import set_random_seed

from sb3_flow.common.episodes import for_evaluation
from sb3_flow.common.saved_by import check_saved_by, saved_data
from sb3_flow.hub.connection import TRUST, Repository
from sb3_flow.hub.making import cut, how_it_was_made, readable
from sb3_flow.hub.replay_video import record
from sb3_flow.hub.upload import STATISTICS, Push, evaluate, in_python
from sb3_flow.zoo.viewing import latest_with_model, loader

CONFIGURATION = ("args.yml", "config.yml")
METRICS = "train_eval_metrics.zip"
MOST_BYTES = 10**9
"""Size of curves that are extracted: an archive of a few bytes can fill the disk."""
N_EVAL_EPISODES = 10
"""As in rl-zoo3."""


def push_to_hub() -> None:
    """Push a run of the zoo: model, best model, statistics, configuration, curves, evaluation and model card."""
    args = _arguments_of_push([*sys.argv[1:], *latest_with_model(sys.argv[1:])])
    for package in args.gym_packages:
        importlib.import_module(package)
    chosen = (args.load_best, args.load_checkpoint, args.load_last_checkpoint)
    _, model_path, log_path = get_model_path(args.exp_id, args.folder, args.algo, args.env, *chosen)
    run, settings = Path(log_path), Path(log_path, args.env)
    absent = [name for name in CONFIGURATION if not (settings / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{settings} has no {' and no '.join(absent)}, which `train` writes and `enjoy` needs.")
    name = ModelName(args.algo, args.env)
    push = Push(f"{args.organization}/{args.repo_name or name}", name.filename, None)
    set_random_seed(args.seed)
    trained_with = yaml.unsafe_load((settings / "args.yml").read_text())
    hyperparams, statistics = get_saved_hyperparams(str(settings), test_mode=True)
    env_kwargs = {
        **(hyperparams.pop("env_kwargs", None) or {}),
        **(trained_with.get("env_kwargs") or {}),
        **(args.env_kwargs or {}),
    }
    rendered = {} if args.no_render else {"render_mode": "rgb_array"}
    eval_env = create_test_env(
        args.env.gym_id,
        n_envs=args.n_envs,
        stats_path=statistics,
        seed=args.seed,
        should_render=not args.no_render,
        hyperparams=deepcopy(hyperparams),
        env_kwargs={**env_kwargs, **rendered},
    )
    model = _load(args, model_path, eval_env, hyperparams)
    drawn = ExperimentManager.is_atari(args.env.gym_id) or ExperimentManager.is_minigrid(args.env.gym_id)
    deterministic = not (args.stochastic or (drawn and not args.deterministic))
    with tempfile.TemporaryDirectory() as temporary, for_evaluation(eval_env, None) as env:
        folder = Path(temporary)
        _collect(run, settings, Path(model_path), folder, name.filename, env_kwargs)
        made = how_it_was_made(model, folder / name.filename, args.env.gym_id)
        made["command"] = training_command(trained_with)
        made["config"] = readable(dict(yaml.unsafe_load((settings / "config.yml").read_text())))
        if trained_with.get("n_timesteps", -1) > 0:  # which the command has, but not the file
            made["config"]["n_timesteps"] = trained_with["n_timesteps"]
        results = evaluate(model, env, args.env.gym_id, N_EVAL_EPISODES, deterministic, args.seed)
        record(model, env, args.n_timesteps, deterministic, folder / "replay.mp4")
        push.publish(folder, made, results, _loading(args, push, made, folder), args.commit_message)
    eval_env.close()


def _arguments_of_push(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Evaluate a trained run and push it to the Hugging Face Hub.")
    parser.add_argument("--env", type=EnvironmentName, required=True, help="environment id")
    parser.add_argument("-f", "--folder", required=True, help="log folder")
    parser.add_argument("--algo", required=True, choices=list(rl_zoo3.ALGOS), help="algorithm")
    parser.add_argument("-n", "--n-timesteps", type=int, default=1000, help="steps of the video")
    parser.add_argument("--n-envs", type=int, default=1, help="number of environments")
    parser.add_argument("--exp-id", type=int, default=0, help="number of the run (0: the latest, -1: no folder of a run)")
    parser.add_argument("--no-render", action="store_true", help="no video")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-best", action="store_true", help="the best model instead of the last")
    parser.add_argument("--load-checkpoint", type=int, help="the checkpoint of so many steps instead of the last model")
    parser.add_argument("--load-last-checkpoint", action="store_true", help="the last checkpoint instead of the last model")
    parser.add_argument("--deterministic", action="store_true", help="deterministic actions, the default but for Atari")
    parser.add_argument("--stochastic", action="store_true", help="drawn actions")
    parser.add_argument("--seed", type=int, default=0, help="seed of the evaluation")
    parser.add_argument("--env-kwargs", nargs="+", action=StoreDict, help="arguments of the environment")
    parser.add_argument("--gym-packages", nargs="+", default=[], help="packages that register environments")
    parser.add_argument("-orga", "--organization", required=True, help="user or organization on the Hub")
    parser.add_argument("-name", "--repo-name", help="repository, by default algo-env")
    parser.add_argument("-m", "--commit-message")
    for flag in ("--num-threads", "--verbose"):  # rl-zoo3's, for the sake of commands that have them
        parser.add_argument(flag, type=int, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def _load(args: argparse.Namespace, path: str, env: Any, hyperparams: dict[str, Any]) -> Any:
    has_her = "HerReplayBuffer" in str(hyperparams.get("replay_buffer_class", ""))
    model = loader(rl_zoo3.ALGOS[args.algo])(path, env=env if has_her else None, device=args.device)
    data = saved_data(path)  # viewing needs no replay buffer, but the model was made with one
    vars(model).update({key: data[key] for key in ("buffer_size", "optimize_memory_usage") if key in data})
    return model


def _collect(run: Path, settings: Path, model: Path, folder: Path, filename: str, env_kwargs: dict[str, Any]) -> None:
    """Copy the files of a run, as they are, to where rl-zoo3 has them on the Hub."""
    shutil.copy(model, folder / filename)
    copied = {settings / name: name for name in CONFIGURATION}
    copied |= {settings / "vecnormalize.pkl": STATISTICS, run / "best_model.zip": "best_model.zip"}
    for source, name in copied.items():
        if source.is_file():
            shutil.copy(source, folder / name)
    (folder / "env_kwargs.yml").write_text(yaml.dump(env_kwargs))
    with zipfile.ZipFile(folder / METRICS, "w") as archive:
        for file in (*run.glob("evaluations.npz"), *sorted(run.glob("*.csv"))):
            archive.write(file, file.name)


def training_command(args: dict[str, Any]) -> str:
    """
    Write the command that trains a run, from the arguments that the zoo kept.

    :param args: contents of ``args.yml``
    """
    words = [
        "python",
        "-m",
        "sb3_flow.zoo",
        "train",
        "--algo",
        args["algo"],
        "--env",
        args["env"],
        "--seed",
        str(args["seed"]),
    ]
    for flag, name, default in (("-n", "n_timesteps", -1), ("--vec-env", "vec_env", "dummy"), ("-i", "trained_agent", "")):
        if args.get(name, default) != default:
            words += [flag, cut(str(args[name]))]
    if args.get("conf_file"):
        words += ["--conf-file", cut(str(args["conf_file"]))]
    if args.get("gym_packages"):
        words += ["--gym-packages", *args["gym_packages"]]
    for flag, name in (("--env-kwargs", "env_kwargs"), ("-params", "hyperparams")):
        if args.get(name):
            words += [flag, *(f"{key}:{cut(value)!r}" for key, value in args[name].items())]
    return shlex.join(words)


def _loading(args: argparse.Namespace, push: Push, made: dict[str, Any], folder: Path) -> str:
    """Write the blocks of code that load a pushed run."""
    organization, repo_name = push.repo_id.split("/")
    of_run = shlex.join(["--algo", args.algo, "--env", args.env.gym_id])
    named = "" if not push.not_default else f" -name {repo_name}"
    return (
        f"```sh\nexport {TRUST}=True\npython -m sb3_flow.zoo load_from_hub {of_run} -orga {organization}{named} -f logs\n"
        f"python -m sb3_flow.zoo enjoy {of_run} -f logs\n```\n\n{in_python(push, made, folder)}"
    )


def _extract_curves(made: Path) -> None:
    """Extract the curves of a run, or warn where the archive cannot be read: they are not worth the model."""
    try:
        with zipfile.ZipFile(made / METRICS) as archive:
            curves = [one for one in archive.infolist() if re.fullmatch(r"evaluations\.npz|[\w.-]*\.csv", one.filename)]
            size = sum(one.file_size for one in curves)
            if size > MOST_BYTES:
                raise zipfile.BadZipFile(f"its {size:,} bytes are more than {MOST_BYTES:,}")
            archive.extractall(made, curves)
    except (
        zipfile.BadZipFile,
        zlib.error,
        RuntimeError,
        EOFError,
    ) as error:  # RuntimeError: encrypted, or packed in a way unknown
        warnings.warn(f"The curves of the run are left out, since {METRICS} is not extracted: {error}")
    (made / METRICS).unlink()


def load_from_hub() -> None:
    """Download a run into the folder where ``enjoy`` finds it."""
    parser = argparse.ArgumentParser(description="Download a run from the Hugging Face Hub to where `enjoy` finds it.")
    parser.add_argument("--env", type=EnvironmentName, required=True, help="environment id")
    parser.add_argument("-f", "--folder", required=True, help="log folder")
    parser.add_argument("-orga", "--organization", default="sb3", help="user or organization on the Hub")
    parser.add_argument("-name", "--repo-name", help="repository, by default algo-env")
    parser.add_argument("--algo", required=True, choices=list(rl_zoo3.ALGOS), help="algorithm")
    parser.add_argument("--exp-id", type=int, default=0, help="number of the run (0: a new one, -1: no folder of a run)")
    parser.add_argument("--verbose", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--force", action="store_true", help="replace the folder of the run")
    args = vars(parser.parse_args())
    args.pop("verbose")
    download_from_hub(env_name=args.pop("env"), **args)


def download_from_hub(
    algo: str,
    env_name: EnvironmentName,
    exp_id: int,
    folder: str,
    organization: str,
    repo_name: str | None = None,
    force: bool = False,
) -> None:
    """
    Download a run. The folder of the run is there whole, or not at all.

    :param algo: key of the algorithm
    :param env_name: name of the environment
    :param exp_id: number of the run; 0 for a new one, -1 for no folder of a run
    :param folder: log folder
    :param organization: user or organization on the Hub
    :param repo_name: repository, by default algo-env
    :param force: whether the folder is replaced if it is there
    :raises ValueError: if the folder is there, if another algorithm saved the model, or unless ``TRUST_REMOTE_CODE`` is set
    :raises OSError: if there is no such repository or file, or the connection breaks off
    """
    name = ModelName(algo, env_name)
    number = exp_id or get_latest_run_id(str(Path(folder, algo)), env_name) + 1
    run = Path(folder, algo, f"{env_name}_{number}") if number > 0 else Path(folder, algo)
    if run.is_dir() and (number < 0 or not force):
        hint = "give another --folder" if number < 0 else "--force replaces the folder, --exp-id 0 makes a new one"
        raise ValueError(f"The folder {run} is there already: {hint}.")
    repository = Repository(f"{organization}/{repo_name or name}")
    print(f"Downloading {repository.repo_id}, commit {repository.commit}")
    model = repository.download(name.filename)
    check_saved_by(rl_zoo3.ALGOS[algo], model)
    files = {f"{env_name}.zip": model, **{f"{env_name}/{one}": repository.download(one) for one in CONFIGURATION}}
    others = {"best_model.zip": "best_model.zip", "env_kwargs.yml": f"{env_name}/env_kwargs.yml"}
    others |= {STATISTICS: f"{env_name}/vecnormalize.pkl", METRICS: METRICS}
    files |= {place: repository.download(one) for one, place in others.items() if one in repository.names}
    run.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{run.name}-", dir=run.parent) as temporary:
        made = Path(temporary, run.name)
        (made / env_name).mkdir(parents=True)
        for place, file in files.items():
            shutil.copy(file, made / place)
        if (made / METRICS).is_file():
            _extract_curves(made)
        replaced = Path(temporary, "replaced")
        if run.is_dir():
            run.rename(replaced)
        try:
            made.rename(run)
        except BaseException:
            if replaced.is_dir():
                replaced.rename(run)  # it would go with the temporary folder
            raise
    print(f"Saved to {run}")
