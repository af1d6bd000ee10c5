"""The README's script runs as it is printed, only shorter."""

import re
from pathlib import Path

from stable_baselines3.common import evaluation

from sb3_flow.data.generate import generate

README = Path(__file__).parents[1] / "README.md"


def test_the_ten_lines_run(tmp_path, monkeypatch, capsys):
    (script,) = [block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "import ogbench" in block]
    assert len(script.strip().splitlines()) <= 12
    for long, short in (("100_000, progress_bar=True", "3"), ("n_eval_episodes=50", "n_eval_episodes=1"), ("5_000", "3")):
        assert long in script
        script = script.replace(long, short)
    monkeypatch.chdir(tmp_path)
    generate("pointmaze-medium-navigate", 2, out=tmp_path / "data", episode_length=60, progress_bar=False)
    # one evaluation step is enough here
    monkeypatch.setattr(evaluation, "evaluate_policy", lambda model, env, **_: model.predict(env.reset()))
    exec(compile(script, "README.md", "exec"), {})
    assert (tmp_path / "pointmaze.zip").exists()
    assert "trajectories" in capsys.readouterr().out


def test_the_on_policy_scripts_run(monkeypatch):
    blocks = [block for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.S) if "CartPole" in block]
    assert len(blocks) == 2
    for block in blocks:
        for long, short in (
            ("100_000", "1"),
            ("200_000", "1"),
            ('"CartPole-v1", advantage', '"CartPole-v1", n_steps=64, advantage'),
        ):
            block = block.replace(long, short)
        exec(compile(block, "README.md", "exec"), {})
