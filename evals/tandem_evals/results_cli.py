"""The `tandem-results` command. This build has no submissions: each verb says so."""

from __future__ import annotations

import typer

from tandem.console import new_app, run
from tandem.errors import UnsupportedError

VERBS = {
    "pack": "Make a submission from records.",
    "check": "Check a submission.",
    "board": "Render the board of submissions.",
}
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}

app = new_app("Submissions of measured results, and the board of them. This build has no submissions yet.")


def _refuse(context: typer.Context) -> None:
    raise UnsupportedError(
        f"tandem-results {context.info_name}: this build has no submissions yet; keep the records of `tandem-eval run`"
    )


for verb, help_text in VERBS.items():
    app.command(verb, help=help_text, context_settings=ANYTHING)(_refuse)


def main() -> None:
    run(app, "tandem-results")


if __name__ == "__main__":
    main()
