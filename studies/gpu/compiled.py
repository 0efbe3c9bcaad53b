"""`python -m studies.gpu.compiled`: what each kernel uses as machine code for sm_90, in each shape. Needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from studies.gpu.tables import features, lookup_tables
from studies.gpu.variants import PRODUCTS, SHAPES, Shape

WINDOWS, TILES = 80, 36  # 5120 inputs, 2304 rows
TABLE_NAMES = ("tables", "operand", "factors", "takes")


class Resources(NamedTuple):
    registers: int  # of a thread
    spilled_bytes: int  # of a thread, in local memory
    shared_bytes: int  # of a block
    instructions: int  # in the kernel's text


def signature(variant: str) -> dict[str, str]:
    inputs = {"operand": "*i8", "factors": "*fp32", "takes": "*fp32"} if variant == "computed" else {"tables": "*fp32"}
    return inputs | {"records": "*i64", "ids": "*i32", "matrices": "*i64", "parts": "*fp32"}


def compile_shape(variant: str, shape: Shape, *, overlap: bool = True) -> Any:
    """-> Triton's compiled kernel, for compute capability 9.0."""
    constants = shape.constants(variant) | {"windows": WINDOWS, "tiles": TILES, "overlap": overlap}
    pointers = signature(variant)
    return compile_kernel(PRODUCTS[variant], pointers, constants, warps=shape.warps, stages=shape.stages)


def compile_tables(variant: str) -> Any:
    """-> the kernel that makes what the product reads instead of x."""
    outputs = [name for name in signature(variant) if name in TABLE_NAMES]
    types = {"x": "*bf16", "filters": "*fp32"} | {name: signature(variant)[name] for name in outputs}
    kernel = features if variant == "computed" else lookup_tables
    return compile_kernel(kernel, types | {"hidden": "i32"}, {"overlap": True}, warps=1, stages=1)


def compile_kernel(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int, stages: int) -> Any:
    """types: of the arguments in order, all of them multiples of 16."""
    import triton  # type: ignore[import-not-found,unused-ignore]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found,unused-ignore]

    source = triton.compiler.ASTSource(
        kernel,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs=dict(constants),
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(types))},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})


def resources(kernel: Any) -> Resources:
    from triton.backends import nvidia  # type: ignore[import-not-found,unused-ignore]

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, text = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    count = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", text, re.MULTILINE))
    return Resources(int(found[1]), int(found[2]), kernel.metadata.shared, count)


def main() -> None:
    print("| kernel | shape | registers | spilled bytes | shared bytes | instructions |")
    print("| --- | --- | --- | --- | --- | --- |")
    for variant in ("l1_gather", "computed"):
        _row("lookup_tables" if variant == "l1_gather" else "features", "a warp a window", compile_tables(variant))
    for variant, shapes in SHAPES.items():
        for shape in shapes:
            _row(variant, shape.label(variant), compile_shape(variant, shape))


def _row(name: str, shape: str, kernel: Any) -> None:
    print(f"| {name} | {shape} | {' | '.join(map(str, resources(kernel)))} |", flush=True)


if __name__ == "__main__":
    main()
