"""What does verification cost a decode step?

    make bench-tags

Both ways in one run, step by step in turn, on one core: `interlace.rollout.verify.tag_cost` says
how. Expected: well below 1 % of a step of 8 sequences; the promise is at most 3 %. A busy machine
widens the spread, not the medians.
"""

from __future__ import annotations

import typer
from rich.console import Console

from interlace.rollout.verify.tag_cost import LIMIT, measure


def main(pairs: int = typer.Option(200, min=1, help="Pairs of steps, verified and not.")) -> None:
    """Print the cost; exit code 1 if it is above the limit."""
    cost = measure(pairs)
    console = Console(highlight=False)
    console.print(
        f"decode step of 8 sequences, {cost.num_tickets} tickets: {cost.step_s * 1e3:.2f} ms; "
        f"L0 and L1 add {cost.tags_s * 1e6:.0f} us, L2 at most {cost.headers_s * 1e6:.1f} us: "
        f"{cost.share:.2%} of a verified step (limit {LIMIT:.0%}, {cost.num_pairs} pairs)"
    )
    raise typer.Exit(cost.share > LIMIT)


if __name__ == "__main__":
    typer.run(main)
