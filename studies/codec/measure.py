"""The study's measurements of error and loss: data in, results out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from studies.codec.base import bits_per_weight, round_trip
from studies.codec.basis import block_hadamard
from studies.codec.codes import CODES, RETRAINABLE
from studies.codec.encode import Options, encode_experts
from studies.codec.mini import Experts, Mini, Moments, calibration, held_out, score
from studies.codec.refine import Sliding
from studies.codec.sources import SOURCES, relative_error, zero_bias
from studies.codec.stats import Interval, Spread, paired_interval, spread

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured; the defaults are the full study."""

    gaussian_seeds: int = 10
    fp4_seeds: int = 3
    repeats: int = 4  # re-encodings with rotation and feedback, for the A/A noise
    calibration_items: int = 300  # of each short task
    heldout_items: int | None = None  # at most, of a task
    layers: int | None = None  # of the mini model whose experts are replaced, the first ones; None: all
    options: tuple[Options, ...] = (Options(), Options(rotation=True), Options(feedback=True))
    scopes: bool = True  # codebooks per layer and per expert
    searches: bool = True  # feedback without the local search, for codes that have one


QUICK = Effort(
    gaussian_seeds=1,
    fp4_seeds=1,
    repeats=2,
    calibration_items=60,
    heldout_items=20,
    layers=1,
    options=(),
    scopes=False,
    searches=False,
)
BEST = Options(rotation=True, feedback=True)


class ErrorRow(NamedTuple):
    """Squared errors relative to the energy."""

    code: str
    bits: float  # a weight, scales included
    gaussian: Spread
    fp4_gaussian: Spread
    fp4_heavy: Spread
    fp4_heavy_rotated: Spread
    zero_bias: float  # mean decoded value over the zeros of fp4_gaussian, in sigma, mean of all seeds


class MiniRow(NamedTuple):
    code: str
    options: str
    error: float  # squared, relative, mean over matrices
    weighted: float  # of the outputs on the calibration inputs
    nll: Spread  # nats a reply token; n re-encodings
    over_reference: Interval  # paired 95 % interval over items of nll minus the checkpoint's; mean of re-encodings
    kl: Spread  # nats a token, prompts included


class MiniPart(NamedTuple):
    reference_nll: float
    items: int
    reply_tokens: int
    tokens: int
    rows: tuple[MiniRow, ...]


def errors(effort: Effort, say: Say, keys: Sequence[str] = tuple(CODES)) -> tuple[ErrorRow, ...]:
    """Every code on Gaussian and FP4 sources."""
    rows = []
    for key in keys:
        say(f"error: {key}")
        code = CODES[key]()
        found: dict[str, list[float]] = {}
        biases = []
        for name, source_of in SOURCES.items():
            for seed in range(effort.gaussian_seeds if name == "gaussian" else effort.fp4_seeds):
                source = source_of(seed)
                decoded = round_trip(code, source)
                found.setdefault(name, []).append(relative_error(source, decoded))
                if name == "fp4_gaussian":
                    biases.append(zero_bias(source, decoded))
                if name == "fp4_heavy":
                    basis = block_hadamard(source.shape[1], seed)
                    back = round_trip(code, source @ basis.T) @ basis
                    found.setdefault("rotated", []).append(relative_error(source, back))
        rows.append(
            ErrorRow(
                key,
                bits_per_weight(code),
                spread(found["gaussian"]),
                spread(found["fp4_gaussian"]),
                spread(found["fp4_heavy"]),
                spread(found["rotated"]),
                sum(biases) / len(biases),
            )
        )
    return tuple(rows)


def mini(effort: Effort, say: Say, keys: Sequence[str] = tuple(CODES)) -> MiniPart:
    """Every code and option on the mini model."""
    model, conversations = Mini(), held_out(effort.heldout_items)
    whole = model.experts
    replaced = slice(effort.layers * model.geometry.experts if effort.layers else None)
    moments = Moments(*(sums[replaced] for sums in model.moments(calibration(effort.calibration_items))))
    experts = Experts(*(matrices[replaced] for matrices in whole))
    reference = model.log_probabilities(conversations)
    base = score(conversations, reference, reference)
    rows = []
    for key in keys:
        code = CODES[key]()
        plans = [(options, (0,)) for options in effort.options]
        if effort.scopes and key in RETRAINABLE:
            plans += [(Options(scope="layer"), (0,)), (Options(scope="expert"), (0,))]
        if effort.searches and isinstance(code, Sliding):
            plans.append((BEST._replace(search=False), (1,)))
        for options, seeds in [*plans, (BEST, tuple(range(1, effort.repeats + 1)))]:
            encoded, scores = [], []
            for seed in seeds:
                say(f"mini: {key}, {options.text()}, seed {seed}")
                encoded.append(encode_experts(code, experts, moments, options, seed, model.geometry.experts))
                model.replace(_with_rest(encoded[-1].experts, whole))
                scores.append(score(conversations, reference, model.log_probabilities(conversations)))
            mean_nll = torch.stack([one.nll for one in scores]).mean(0)
            rows.append(
                MiniRow(
                    key,
                    options.text(),
                    spread([one.error for one in encoded]).mean,
                    spread([one.weighted for one in encoded]).mean,
                    spread([float(one.nll.sum() / one.reply_tokens.sum()) for one in scores]),
                    paired_interval(mean_nll, base.nll, base.reply_tokens),
                    spread([float(one.kl.sum() / one.tokens.sum()) for one in scores]),
                )
            )
    reply_tokens = int(base.reply_tokens.sum())
    return MiniPart(
        float(base.nll.sum()) / reply_tokens, len(conversations), reply_tokens, int(base.tokens.sum()), tuple(rows)
    )


def _with_rest(first: Experts, whole: Experts) -> Experts:
    """`first` in the place of as many of `whole`."""
    return Experts(*(torch.cat([a, b[len(a) :]]) for a, b in zip(first, whole, strict=True)))
