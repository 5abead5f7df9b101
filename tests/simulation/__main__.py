"""`python -m tests.simulation SEED [--trace]`, or `FROM-TO [--table]`: play seeds and tell."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.simulation.campaign import Campaign, tell_table


def main() -> int:
    given = _parser().parse_args()
    first, _, last = given.seeds.partition("-")
    campaign = Campaign()
    for seed in range(int(first), int(last or first) + 1):
        played = campaign.play(seed)
        if given.trace:
            print("\n".join(campaign.app.last_trace))
        if played is None:
            print(f"seed {seed}: {campaign.broken[seed]}", flush=True)
            if given.first:
                break
        elif given.digest or not last:
            print(
                f"seed {seed}: trace {played.digest}, {played.runs} runs, {played.iterations} turns"
            )
    print(campaign)
    if given.table:
        print(tell_table(campaign))
    if given.json:
        given.json.write_text(json.dumps(campaign.as_json()))
    return 1 if campaign.broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", help="a seed, or FROM-TO")
    parser.add_argument("--trace", action="store_true", help="print all that happened")
    parser.add_argument("--digest", action="store_true", help="print the digest of each trace")
    parser.add_argument(
        "--table", action="store_true", help="print which faults and steps there were"
    )
    parser.add_argument("--first", action="store_true", help="stop at the first broken promise")
    parser.add_argument("--json", type=Path, help="write what they met together to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
