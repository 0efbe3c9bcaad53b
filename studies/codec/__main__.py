"""`python -m studies.codec`, from the checkout's root: measure, and print one Markdown table.

    --quick                 under two minutes: fewer seeds and items, one option
    --parts error,mini,rates    measure these only
    --codes product,sac     on these codes only (error and mini)
    --json FILE             write the results
    --from FILE             start from these results; measured parts replace theirs
    --gpu-fraction sac=0.6  a measured share of the GPU's copy rate, instead of the assumption

`python -m studies.codec train` makes constants.json anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from studies.codec import additive, constants, measure, report, signs, speed
from studies.codec.codes import CODES
from studies.codec.results import Results, from_json, to_json

PARTS = ("error", "mini", "rates")


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)  # work is spread by threads of our own, tandem.codec.parallel
    if args.verb == "train":
        constants.store({"magnitudes": signs.train(), "additive": additive.train()})
        return
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", file=sys.stderr, flush=True)

    effort = measure.QUICK if args.quick else measure.Effort()
    found = Results(
        measure.errors(effort, say, args.codes) if "error" in args.parts else (),
        measure.mini(effort, say, args.codes) if "mini" in args.parts else None,
        speed.rates() if "rates" in args.parts else (),
    )
    results = (from_json(args.start) if args.start else Results()).merged(found)
    fractions = dict(args.gpu_fraction)
    print(report.markdown(results, fractions))
    print("\n" + report.verdict(results, fractions))
    if args.json:
        args.json.write_text(to_json(results) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m studies.codec", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("verb", nargs="?", choices=("measure", "train"), default="measure")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", type=lambda text: _listed(text, PARTS), default=PARTS)
    parser.add_argument("--codes", type=lambda text: _listed(text, tuple(CODES)), default=tuple(CODES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--from", dest="start", type=Path)
    parser.add_argument("--gpu-fraction", type=_fraction, action="append", default=[], metavar="CODE=SHARE")
    return parser.parse_args()


def _listed(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Words of a comma-separated list; none is allowed, an unknown one is an error."""
    words = tuple(word for word in text.split(",") if word)
    unknown = [word for word in words if word not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return words


def _fraction(text: str) -> tuple[str, float]:
    code, _, share = text.partition("=")
    if code not in CODES or not 0 < float(share or "0") <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: CODE=SHARE, CODE one of {', '.join(CODES)}, 0 < SHARE <= 1")
    return code, float(share)


if __name__ == "__main__":
    main()
