"""The `tandem` command."""

from __future__ import annotations

from tandem.commands import bench, doctor, package, serve, trace
from tandem.console import new_app, run

app = new_app("Serve Mixture-of-Experts models that do not fit your VRAM, as a plugin of stock vLLM.")
for module in (doctor, package, serve, trace, bench):
    module.register(app)


def main() -> None:
    run(app, "tandem")


if __name__ == "__main__":
    main()
