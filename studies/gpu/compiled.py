"""`python -m studies.gpu.compiled`: each variant in each shape as machine code for sm_90, and what it uses. No GPU needed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from studies.gpu.variants import PRODUCTS, SHAPES, Shape

WINDOWS, TILES = 80, 36  # 5120 inputs, 2304 rows


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
    import triton
    from triton.backends.compiler import GPUTarget

    constants = shape.constants(variant) | {"windows": WINDOWS, "tiles": TILES, "overlap": overlap}
    pointers = signature(variant)
    source = triton.compiler.ASTSource(
        PRODUCTS[variant],
        signature=pointers | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(pointers))},
    )
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def resources(kernel: Any) -> Resources:
    from triton.backends import nvidia

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
    print("| variant | shape | registers | spilled bytes | shared bytes | instructions |")
    print("| --- | --- | --- | --- | --- | --- |")
    for variant, shapes in SHAPES.items():
        for shape in shapes:
            used = resources(compile_shape(variant, shape))
            print(f"| {variant} | {shape.label(variant)} | {' | '.join(map(str, used))} |", flush=True)


if __name__ == "__main__":
    main()
