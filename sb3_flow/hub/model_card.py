"""The model card: what the model is, how well it did in which evaluation, how it was made, and how to use it."""

from pprint import pformat
from typing import Any

from sb3_flow.hub.connection import TRUST, hub_library


def model_card(repo_id: str, made: dict[str, Any], results: dict[str, Any], loading: str) -> str:
    """
    Write the README.md of a repository: metadata that the Hub reads, and text.

    :param repo_id: the repository
    :param made: see :func:`~sb3_flow.hub.making.how_it_was_made`; ``command`` and ``config``, if there, are of the zoo
    :param results: see :func:`~sb3_flow.hub.upload.evaluate`
    :param loading: a block of code that loads the model
    """
    algorithm, env_id = made["algorithm"], results["env_id"]
    parts = [
        f"---\n{_metadata(made, results)}\n---",
        f"# **{algorithm}** in **{env_id}**",
        f"A model of `{algorithm}` for [Stable-Baselines3](https://github.com/DLR-RM/stable-baselines3), pushed by sb3_flow.",
        "## Evaluation",
        _table(results),
        "## How it was made",
        "\n".join(f"{number}. {phase}" for number, phase in enumerate(made["phases"], 1)),
    ]
    if "command" in made:
        parts.append(f"By the command\n\n```sh\n{made['command']}\n```")
    if "config" in made:
        parts.append(f"with the hyperparameters\n\n```python\n{pformat(made['config'], sort_dicts=False)}\n```")
    else:
        parts.append(
            f"Policy `{made['policy']}`; arguments that differ from the default:\n\n"
            f"```python\n{pformat(made['changed'], sort_dicts=False)}\n```"
        )
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    parts += [
        f"Saved with {versions}. `config.json` has all arguments, `results.json` the return of each episode.",
        "## Use",
        f"Loading runs code from the files. Set `{TRUST}` only if you trust whoever can write to {repo_id}.",
        loading,
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(made: dict[str, Any], results: dict[str, Any]) -> str:
    hub, env_id = hub_library(), results["env_id"]
    task = {"task_type": "reinforcement-learning", "task_name": "reinforcement-learning"}
    task |= {"dataset_type": env_id, "dataset_name": env_id}
    metrics = {"mean_reward": f"{results['mean_reward']:.2f} +/- {results['std_reward']:.2f}"}
    if results["success_rate"] is not None:
        metrics["success_rate"] = f"{results['success_rate']:.2f}"
    tags = [env_id, "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3", "sb3-flow"]
    if made["dataset"]:
        tags.append("offline-reinforcement-learning")
    data = hub.ModelCardData(
        library_name="stable-baselines3",  # by which the Hub finds models for SB3 and counts their downloads
        pipeline_tag="reinforcement-learning",
        tags=tags,
        model_name=made["algorithm"],
        eval_results=[
            hub.EvalResult(**task, metric_type=name, metric_name=name, metric_value=value) for name, value in metrics.items()
        ],
    )
    return str(data.to_yaml())


def _table(results: dict[str, Any]) -> str:
    rows = {
        "mean return": f"{results['mean_reward']:.2f} +/- {results['std_reward']:.2f}",
        "success rate": None if results["success_rate"] is None else f"{results['success_rate']:.2f}",
        "episodes": results["n_eval_episodes"],
        "actions": "deterministic" if results["is_deterministic"] else "drawn",
        "mode of acting": results["acting_mode"],
        "seed of the environment": results["seed"],
        "run by the push, at": results["eval_datetime"],
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value is not None]
    return "\n".join([f"| {results['env_id']} | |", "|---|---|", *lines])
