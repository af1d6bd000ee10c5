"""
Write what the bench found into the manual: its table, and a row and curves on the page of each algorithm.

Run by hand: ``python -m tests.benchmarks.bench_pages --results bench/cpu/results.csv`` copies the rows into
``zoo_configs/bench/cpu.csv``, in the suite's order, and writes tables and pictures from them; without ``--results`` it writes
them anew from the rows that are there.
"""

import argparse
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from sb3_flow.zoo.bench.pictures import draw_curves
from sb3_flow.zoo.bench.results import COLUMNS, PHASES, Row, as_csv, read_rows, scores_of, short_name, table, write_text
from sb3_flow.zoo.bench.suites import SUITES, load_suite

DOCS = Path(__file__).parents[2] / "docs"
SUITE = "cpu"
RESULTS = SUITES / f"{SUITE}.csv"
SHOWN = {
    "algorithms/rql.md": ("rql", "bc"),
    "algorithms/fmq.md": ("fmq", "fmq-bc"),
    "algorithms/fql.md": ("fql", "fql-best-of-n"),
    "algorithms/dsrl.md": ("dsrl",),
    "algorithms/qam.md": ("qam",),
    "algorithms/rlpd.md": ("rlpd",),
}
"""The rows of the bench that belong to a page."""
WHOLE = "guide/bench.md"


def texts(rows: Sequence[Row]) -> dict[str, str]:
    """
    Give each page with its part anew: what stands between ``<!-- bench -->`` and ``<!-- end of bench -->``.

    :param rows: of the CSV
    :return: text by path in the manual
    :raises ValueError: if a page has no such place
    """
    _, whole = table(rows).split("\n", 1)
    parts = {WHOLE: whole} | {page: scores(rows, names) for page, names in SHOWN.items()}
    found = {}
    for page, part in parts.items():
        begin, end = "<!-- bench -->\n", "<!-- end of bench -->"
        picture = f"\n![Success over the steps of the bench]({_picture(page).name})\n"
        text, places = re.subn(
            f"{begin}.*?{end}", lambda _, new=f"{begin}{part}\n{picture}{end}": new, (DOCS / page).read_text(), flags=re.S
        )
        if places != 1:
            raise ValueError(f"{page} has {places} places for the bench's part, not one.")
        found[page] = text
    return found


def pictures() -> dict[Path, tuple[str, ...] | None]:
    """List the pictures: by path, the algorithms that the picture sets off against all others; None for no such."""
    return {_picture(page): SHOWN.get(page) for page in (WHOLE, *SHOWN)}


def digest(rows: Sequence[Row]) -> str:
    """Name the rows, as each picture does that was made of them."""
    return hashlib.sha256(as_csv(COLUMNS, rows).encode()).hexdigest()


def _picture(page: str) -> Path:
    path = DOCS / page
    return path.with_name(path.name if path.stem == "bench" else f"bench_{path.name}").with_suffix(".png")


def scores(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Write the scores of some algorithms, a line for each task, beside the lowest and the highest of the others."""
    ends = [scores_of(rows, phase) for phase in PHASES]
    lines = ["| Success | " + " | ".join(f"`{name}`" for name in names) + " | others |", "|---" * (len(names) + 2) + "|"]
    for task in sorted({row["task"] for row in rows}):
        groups = [{name} for name in names] + [set().union(*ends).difference(names)]
        cells = [short_name(task), *(_ends(ends, group, task) for group in groups)]
        lines.append("".join(f"| {cell} " if cell else "| " for cell in cells) + "|")
    return "\n".join(lines)


def _ends(ends: Sequence[dict[str, dict[str, dict[int, float]]]], names: Iterable[str], task: str) -> str:
    """Give the lowest and the highest score of some algorithms (mean over seeds) on a task at the end of each phase."""
    found = [[by_name[name][task] for name in names if task in by_name.get(name, {})] for by_name in ends]
    return " -> ".join(_span([fmean(seeds.values()) for seeds in runs]) for runs in found) if any(found) else ""


def _span(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Sort rows as the suite lists algorithms and tasks; rows of algorithms and tasks that the suite lacks are left out."""
    suite = load_suite(SUITE)
    tasks, algorithms = list(suite.tasks), list(suite.algorithms)
    known = [row for row in rows if row["task"] in tasks and row["algorithm"] in algorithms]
    return sorted(known, key=lambda row: (algorithms.index(row["algorithm"]), tasks.index(row["task"]), int(row["seed"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="results.csv of `python -m sb3_flow.zoo bench --suite cpu`")
    given = parser.parse_args()
    rows = in_order(read_rows(given.results or RESULTS))
    write_text(RESULTS, as_csv(COLUMNS, rows))
    for page, text in texts(rows).items():
        write_text(DOCS / page, text)
    description = {"Description": digest(rows)}
    for path, names in pictures().items():
        draw_curves(rows, None, names).savefig(path, dpi=80, metadata=description)
    print(table(rows))


if __name__ == "__main__":
    main()
