"""The errors that a person can do something about: one line each, and the exit code of the command that meets them."""

from __future__ import annotations

EXIT_INTERRUPTED = 130  # Ctrl-C; what was finished by then is kept


class TandemError(Exception):
    """The root. `str(error)` is one line: what, where, by how much, what to do."""

    exit_code = 1


class UsageError(TandemError):
    """A flag, key or value that does not exist, or two that exclude each other."""

    exit_code = 2


class PlanError(TandemError):
    """Bytes that do not fit: VRAM, RAM or disk."""

    exit_code = 3


class PackageError(TandemError):
    """A package or checkpoint that is damaged, incomplete, or of a format this build does not read."""

    exit_code = 4


class ProfileError(TandemError):
    """A profile that is not valid, or belongs to another box or package."""

    exit_code = 5


class UnsupportedError(TandemError):
    """A vLLM version, model, activation, GPU or vLLM feature that Tandem does not support."""

    exit_code = 6


class ServerError(TandemError):
    """A server that did not start, did not become ready, or died."""

    exit_code = 7


class TuneError(TandemError):
    """A study without one valid trial."""

    exit_code = 8


class CheckError(TandemError):
    """A check that ran and failed (verify, self-check, results)."""

    exit_code = 9
