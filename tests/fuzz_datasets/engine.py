"""One case: a file, what is done to it, what ``OfflineDataset.load`` makes of it, and whether that is right."""

import re
import tempfile
import warnings
import zlib
from pathlib import Path

import numpy as np

from sb3_flow.data import OfflineDataset
from tests.fuzz_datasets import minari_sets, plain_kinds, recorded_kinds, replay_buffers, saved_folder
from tests.fuzz_datasets.files import File, Kind, pick
from tests.fuzz_datasets.mutations import disguise, spoil

MODULES = (recorded_kinds, minari_sets, replay_buffers, plain_kinds, saved_folder)
KINDS = {name: kind for module in MODULES for name, kind in module.KINDS.items()}
TAKEN, REFUSED = "taken", "refused"
UNCLEAR = r"broadcast|setting an array element|operands|out of bounds for|cannot reshape|cannot be cast|NoneType' object"
"""What NumPy and Python say where nobody checked before."""


class Failure(AssertionError):
    """What ``load`` did was wrong."""


def prepare(kind: Kind, rng: np.random.Generator) -> tuple[File, bool]:
    """:return: a file and whether it is right"""
    file = kind.make(rng)
    fields = kind.fields(file)
    for _ in range(int(rng.integers(3))):
        name = pick(rng, fields)
        disguise(file, name, fields[name], rng)
    way = rng.random()
    right: bool | None = True
    if way < 0.55:
        name = pick(rng, fields)
        right = spoil(file, name, fields[name], rng)
    elif way < 0.8:
        mutation = pick(rng, kind.special)
        right = mutation(file, rng)
        if right is not None:
            file.notes.append(mutation.__name__)
    return file, right is None or right


def attack(name: str, seed: int, case: int) -> str:
    """
    Run one case.

    :return: ``TAKEN`` or ``REFUSED``
    :raises Failure: if that is wrong
    """
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed, case])
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file, right = prepare(kind, rng)
        folder = Path(place) / "given"
        folder.mkdir()
        location = kind.write(file, folder)
        if rng.random() < 0.06:
            right = _cut(folder, rng, file) and right
        options = dict(file.options)
        if name != "folder" and rng.random() < 0.15:
            options["mmap_dir"] = Path(place) / "mapped"
        notes = f"{'; '.join(file.notes) or 'nothing done'} {file.options or ''}"
        try:
            dataset = OfflineDataset.load(location, **options)
        except Exception as error:
            _judge_refusal(file, right, error, notes)
            return REFUSED
        if not right:
            raise Failure(f"taken although wrong: {notes}")
        _compare(dataset, kind.meaning(file), notes)
        return TAKEN


def _cut(folder: Path, rng: np.random.Generator, file: File) -> bool:
    """Cut a file short; false, as the file is wrong then."""
    path = pick(rng, [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size > 1])
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: int(rng.integers(size))])
    file.notes.append(f"{path.name} cut to {path.stat().st_size} of {size} bytes")
    return False


def _judge_refusal(file: File, right: bool, error: Exception, notes: str) -> None:
    text = f"{notes} | {type(error).__name__}: {str(error)[:300]}"
    if right:
        raise Failure(f"refused although right: {text}") from error
    no_space = isinstance(error, TypeError) and "must be a Gymnasium space" in str(error)
    if type(error) is not ValueError and not no_space:
        raise Failure(f"{type(error).__name__} instead of ValueError: {text}") from error
    if re.search(UNCLEAR, str(error)) or len(str(error)) < 20 or len(str(error)) > 2000:
        raise Failure(f"an unclear message: {text}") from error


def _compare(dataset: OfflineDataset, meant: dict[str, np.ndarray], notes: str) -> None:
    found = {}
    for name in ("observations", "actions", "rewards", "terminated", "trajectory_ends", "final_observations"):
        value = getattr(dataset, name)
        found |= {f"{name}/{key}": array for key, array in value.items()} if isinstance(value, dict) else {name: value}
    if found.keys() != meant.keys():
        raise Failure(f"arrays {sorted(found)} instead of {sorted(meant)}: {notes}")
    for name, array in found.items():
        if array.shape != meant[name].shape or not np.allclose(array, meant[name], rtol=1e-6, atol=1e-6):
            raise Failure(f"{name} is {array.tolist()} instead of {meant[name].tolist()}: {notes}")
    if not np.isfinite(dataset.rewards).all() or not np.isfinite(dataset.actions).all():
        raise Failure(f"numbers that are not finite: {notes}")
