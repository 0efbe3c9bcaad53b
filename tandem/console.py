"""How every command of Tandem talks: results on stdout, progress on stderr, one line for an error a person can mend."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import typer
from rich.console import Console

from tandem.errors import EXIT_INTERRUPTED, TandemError

progress = Console(stderr=True, highlight=False)


def new_app(help_text: str) -> typer.Typer:
    return typer.Typer(help=help_text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def say(line: str) -> None:
    """A progress line on stderr, plain when it is not a terminal."""
    progress.print(line, markup=False, soft_wrap=True)


def emit_json(value: Any) -> None:
    """The JSON twin of a screen, on stdout."""
    sys.stdout.write(json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")


def run(app: typer.Typer, name: str) -> None:
    """Run a command line; turn a TandemError into one line and its exit code. A bug keeps its traceback."""
    try:
        code = app(prog_name=name, standalone_mode=False)
    except TandemError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # the reader (head, less) has what it wanted; keep Python from complaining again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        # a usage error of the command line: its class moved between typer's releases, its two methods did not
        if not (hasattr(error, "show") and hasattr(error, "exit_code")):
            raise
        error.show()
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
