"""Where Tandem keeps what it makes: packages, profiles, studies and files of a running server."""

from __future__ import annotations

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent  # a source tree; site-packages when installed from a wheel


def state_dir() -> Path:
    """`$TANDEM_STATE_DIR` (`./run` sets it: `.tandem` in the checkout), else `tandem` in the user's state folder."""
    stated = os.environ.get("TANDEM_STATE_DIR")
    if stated:
        return Path(stated).expanduser().absolute()
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home).expanduser().absolute() if home else Path.home() / ".local" / "state") / "tandem"


def packages_dir() -> Path:
    """Packages that `tandem serve` and `tandem-tune` made from a checkpoint."""
    return state_dir() / "packages"


def profiles_dir() -> Path:
    """Profiles that `tandem-tune run` wrote."""
    return state_dir() / "profiles"


def studies_dir() -> Path:
    """One folder a study: its database, its records, the logs of its servers."""
    return state_dir() / "studies"


def run_dir() -> Path:
    """Files that a running server reads, such as a profile with the command line's settings in it."""
    return state_dir() / "run"


def shipped_profiles_dir() -> Path:
    """The profiles that come with this build: package data of an installed build, `profiles/` of a source tree."""
    installed = Path(__file__).resolve().parent / "shipped_profiles"
    return installed if installed.is_dir() else CHECKOUT / "profiles"


def mini_model_dir() -> Path | None:
    """The mini model that the source tree holds; None when there is none (a wheel holds no weights)."""
    model = CHECKOUT / "examples" / "mini" / "model"
    return model if (model / "config.json").is_file() else None
