"""`tandem pack`, `tandem inspect`, `tandem verify`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import typer

from tandem.console import emit_json
from tandem.errors import PackageError, UsageError


class CodecChoice(str, Enum):
    """What `--codec` takes: `sac`, 2 bits a weight; `raw`, lossless, large and slow: for tests."""

    SAC = "sac"
    RAW = "raw"


CODECS: dict[CodecChoice, Literal["sac", "raw"]] = {
    CodecChoice.SAC: "sac",
    CodecChoice.RAW: "raw",
}


class DeviceChoice(str, Enum):
    """What `--device` takes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


DEVICES: dict[DeviceChoice, Literal["auto", "cpu", "cuda"]] = {
    DeviceChoice.AUTO: "auto",
    DeviceChoice.CPU: "cpu",
    DeviceChoice.CUDA: "cuda",
}
PackageArgument = Annotated[Path, typer.Argument(metavar="PACKAGE", help="A folder that `tandem pack` made.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def register(app: typer.Typer) -> None:
    app.command("pack")(pack_command)
    app.command("inspect")(inspect_command)
    app.command("verify")(verify_command)


def pack_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="The official checkpoint's folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The package's folder, new or an interrupted pack's.")],
    codec: Annotated[CodecChoice | None, typer.Option(help="How all experts are held. Default: sac.")] = None,
    fp4_top: Annotated[
        str, typer.Option(metavar="N|all", help="Experts a layer held in FP4 too; all: every one, in FP4 only.")
    ] = "0",
    default_fp4_top: Annotated[
        int | None, typer.Option(min=0, help="How many of them a server computes from FP4. Default: all of them.")
    ] = None,
    routing: Annotated[
        Path | None, typer.Option(help="A file of `tandem trace`: FP4 holds the most routed experts.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What the model is called, by servers too. Default: the folder's or the hub's name."),
    ] = None,
    device: Annotated[
        DeviceChoice, typer.Option(help="What searches 2-bit codes; the package does not depend on it.")
    ] = DeviceChoice.AUTO,
    overwrite: Annotated[bool, typer.Option(help="Replace a package or an interrupted pack in OUT.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn an official checkpoint into a package. Repeat the command to go on after an interruption."""
    from tandem.package.inspect import lines, summary
    from tandem.package.pack import PackOptions, pack
    from tandem.package.progress import report
    from tandem.package.reader import open_package
    from tandem.package.routing import Routing

    options = PackOptions(
        codec=None if codec is None else CODECS[codec],
        fp4_top=_top(fp4_top),
        default_fp4_top=default_fp4_top,
        routing=Routing.read(routing, PackageError) if routing is not None else None,
        device=DEVICES[device],
    )
    with report() as progress:
        pack(source, out, options, name=name, overwrite=overwrite, report=progress)
    package = open_package(out)
    if as_json:
        emit_json(summary(package))
    else:
        typer.echo("\n".join(lines(package)))


def inspect_command(package: PackageArgument, as_json: JsonOption = False) -> None:
    """Show what a package holds."""
    from tandem.package.inspect import lines, summary
    from tandem.package.reader import open_package

    opened = open_package(package)
    if as_json:
        emit_json(summary(opened))
    else:
        typer.echo("\n".join(lines(opened)))


def verify_command(
    package: PackageArgument,
    fast: Annotated[bool, typer.Option("--fast", help="Sizes and a sample of experts only, no hashes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check every file of a package: sizes, offsets, hashes, and a sample of its experts decoded."""
    from tandem.package.progress import report
    from tandem.package.verify import verify

    with report() as progress:
        result = verify(package, fast=fast, report=progress)
    if as_json:
        emit_json(result._asdict())
    else:
        looked = "sizes and sha256" if result.hashed else "sizes"
        typer.echo(
            f"{package}: whole. {result.files} files, {result.bytes / 1e9:.3f} GB ({looked}), "
            f"{result.experts_decoded} experts decoded; manifest {result.manifest_sha256}"
        )


def _top(text: str) -> int | Literal["all"]:
    if text == "all":
        return "all"
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--fp4-top {text!r} is neither a whole number nor `all`") from None
