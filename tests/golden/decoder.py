"""A decoder of packages of format 1, written from docs/format.md alone: numpy, no torch, nothing of `tandem`.

It exists to be compared with: it is slow, says what the page says, and refuses what the page forbids.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Json = dict[str, Any]


class Weights(NamedTuple):
    """One expert: `w2 (silu(w1 x) * (w3 x))`."""

    w1: Floats  # [I, H], gate
    w3: Floats  # [I, H], up
    w2: Floats  # [H, I], down


class Key(NamedTuple):
    """Where a record lies. Its tensors are called `layer-00002/vq/expert-1/w1` in a .npz."""

    layer: int
    section: str
    expert: int

    def name(self, matrix: str) -> str:
        return f"layer-{self.layer:05d}/{self.section}/expert-{self.expert}/{matrix}"


ALIGN_BYTES = 4096
TILE_BYTES = 1088
TILE_ROWS = 64
BASES_BYTES = 64
PLANE_ALIGN_BYTES = 64
PANEL_COLUMNS = 64
HASH_ZEROS = "0" * 64

# docs/format.md, "Taps": FILTER[s][b][d].
FILTER = np.array(
    [
        [[-562393, -200433], [-394266, 389281], [-207186, -502656], [-164629, -406464]],
        [[75785, 273880], [-209723, 373214], [-315166, 93265], [310529, -178784]],
        [[364166, 261977], [-340057, -217815], [22357, -492149], [-487101, 269341]],
    ],
    dtype=np.int64,
)
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
E2M1 = np.concatenate([MAGNITUDES, -MAGNITUDES])  # code 8 is -0.0

# Section -> codec name -> version and parameters; raw's `dtype` is one of two.
CODECS: dict[str, dict[str, tuple[int, list[Json]]]] = {
    "vq": {"sac": (1, [{"taps": 3, "window": 64, "steps": 16}])},
    "fp4": {"fp4": (1, [{"group": 32}])},
    "raw": {"raw": (1, [{"dtype": "bf16"}, {"dtype": "fp32"}])},
}
MANIFEST_KEYS = {
    "format", "tandem", "codecs", "fp4", "default_fp4_top", "source", "routing_origin", "layers", "files",
}  # fmt: skip
LAYER_KEYS = {
    "layer", "drafter", "num_experts", "top_k", "hidden", "intermediate", "file", "bytes", "sha256", "routing",
    "sections",
}  # fmt: skip
SECTION_KEYS = {"offset", "stride", "record_bytes", "experts"}
FILE_KEYS = {"bytes", "sha256", "origin"}


def decode_package(folder: Path) -> dict[Key, Weights]:
    """Every record of every section as fp32. Raises ValueError where the package is not as the page says."""
    manifest = read_manifest(folder)
    decoded: dict[Key, Weights] = {}
    for entry in manifest["layers"]:
        data = np.frombuffer((folder / entry["file"]).read_bytes(), dtype=np.uint8)
        _check(data.size == entry["bytes"], f"{entry['file']} has {data.size} bytes, not {entry['bytes']}")
        _check(_sha256(data.tobytes()) == entry["sha256"], f"{entry['file']} has another hash")
        _check_sections(entry, manifest)
        for section, place in entry["sections"].items():
            for index, expert in enumerate(place["experts"]):
                start = place["offset"] + index * place["stride"]
                record = data[start : start + place["record_bytes"]]
                padding = data[start + place["record_bytes"] : start + place["stride"]]
                _check(not padding.any(), f"{entry['file']}: bytes behind record {index} of {section} are not zero")
                key = Key(entry["layer"], section, expert)
                decoded[key] = decode_record(
                    manifest["codecs"][section], record, entry["hidden"], entry["intermediate"]
                )
    return decoded


def read_manifest(folder: Path) -> Json:
    """tandem.json, checked against itself, config.json and every file outside experts/."""
    manifest: Json = json.loads((folder / "tandem.json").read_text())
    _check(manifest["format"] == 1, f"format {manifest['format']}, not 1")
    _check(set(manifest) == MANIFEST_KEYS, f"keys {sorted(manifest)} of tandem.json")
    for section, spec in manifest["codecs"].items():
        version, params = CODECS[section][spec["name"]]
        _check(spec["version"] == version and spec["params"] in params, f"codec {spec} of section {section}")
    config_text = (folder / "config.json").read_text()
    tandem = json.loads(config_text)["quantization_config"]["tandem"]
    _check(json.loads(config_text)["quantization_config"]["quant_method"] == "tandem_vq", "quant_method")
    _check(tandem["format"] == 1, f"format {tandem['format']} in config.json, not 1")
    _check(set(tandem) == {"format", "base", "experts_dir", "manifest_sha256"}, f"keys {sorted(tandem)} of config.json")
    _check(tandem["experts_dir"] == "experts", f"experts_dir {tandem['experts_dir']}")
    _check(tandem["manifest_sha256"] == manifest_sha256(manifest), "manifest_sha256 is not that of tandem.json")
    for name, file in manifest["files"].items():
        _check(set(file) == FILE_KEYS, f"keys {sorted(file)} of file {name}")
        content = (folder / name).read_bytes()
        if name == "config.json":
            content = content.replace(tandem["manifest_sha256"].encode(), HASH_ZEROS.encode())
        _check(len(content) == file["bytes"], f"{name} has {len(content)} bytes, not {file['bytes']}")
        _check(_sha256(content) == file["sha256"], f"{name} has another hash")
    return manifest


def manifest_sha256(manifest: Json) -> str:
    files = {name: {key: file[key] for key in file if key != "origin"} for name, file in manifest["files"].items()}
    canonical = json.dumps({**manifest, "files": files}, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return _sha256(canonical.encode("ascii"))


def decode_record(spec: Json, record: Bytes, hidden: int, intermediate: int) -> Weights:
    """record: [record_bytes] uint8 -> fp32."""
    decoders = {"sac": _decode_sac, "fp4": _decode_fp4}
    if spec["name"] == "raw":
        return _decode_raw(record, spec["params"]["dtype"], hidden, intermediate)
    return decoders[spec["name"]](record, hidden, intermediate)


def record_bytes(spec: Json, hidden: int, intermediate: int) -> int:
    _check(hidden % 32 == 0 and intermediate % 32 == 0, f"{hidden} x {intermediate}: not multiples of 32")
    if spec["name"] == "raw":
        return 3 * hidden * intermediate * {"bf16": 2, "fp32": 4}[spec["params"]["dtype"]]
    window = {"sac": 64, "fp4": 32}[spec["name"]]
    tiles = 2 * _ceil(intermediate, 64) * _ceil(hidden, window) + _ceil(hidden, 64) * _ceil(intermediate, window)
    return TILE_BYTES * tiles + (BASES_BYTES if spec["name"] == "sac" else 0)


def level_table() -> Floats:
    """L[b]: [256] fp32."""
    exact = np.exp2((np.arange(256, dtype=np.float64) - 255) / 16)
    exact[0] = 0
    return exact.astype(np.float32)


def tap_table() -> Floats:
    """TAPS[s][k][d]: [3, 16, 2] fp32, exact."""
    bits = (np.arange(16)[:, None] >> np.arange(4)) & 1
    sums = np.einsum("kb,sbd->skd", 2 * bits - 1, FILTER)
    return np.asarray(sums / 2**20, np.float32)


def _tiles(record: Bytes, start: int, rows: int, columns: int, window: int, *, by_window: bool) -> tuple[Bytes, Bytes]:
    """The matrix at byte `start` -> nibbles [rows, windows, 32] and scale bytes [rows, windows].

    Rows from `rows` on must be zero and are dropped.
    """
    row_tiles, windows = _ceil(rows, TILE_ROWS), _ceil(columns, window)
    nibbles = np.zeros((row_tiles * TILE_ROWS, windows, 32), dtype=np.uint8)
    scales = np.zeros((row_tiles * TILE_ROWS, windows), dtype=np.uint8)
    for t in range(row_tiles):
        for w in range(windows):
            at = start + TILE_BYTES * (w * row_tiles + t if by_window else t * windows + w)
            tile = record[at : at + TILE_BYTES]
            mine = slice(TILE_ROWS * t, TILE_ROWS * (t + 1))
            for p in range(16):
                column = tile[64 * p : 64 * p + 64]
                nibbles[mine, w, 2 * p] = column & 15
                nibbles[mine, w, 2 * p + 1] = column >> 4
            scales[mine, w] = tile[1024:1088]
    _check(not nibbles[rows:].any() and not scales[rows:].any(), f"rows from {rows} on are not zero")
    return nibbles[:rows], scales[:rows]


def _matrices(hidden: int, intermediate: int, window: int) -> list[tuple[int, int, int, bool]]:
    """(start byte, rows, columns, window by window) of w1, w3 and w2."""
    up_bytes = TILE_BYTES * _ceil(intermediate, TILE_ROWS) * _ceil(hidden, window)
    return [
        (0, intermediate, hidden, False),
        (up_bytes, intermediate, hidden, False),
        (2 * up_bytes, hidden, intermediate, True),
    ]


def _decode_sac(record: Bytes, hidden: int, intermediate: int) -> Weights:
    taps, levels = tap_table(), level_table()
    _check(not record[-BASES_BYTES + 12 :].any(), "bytes behind the bases are not zero")
    bases = record[-BASES_BYTES:][:12].view("<f4")
    matrices = []
    for base, (start, rows, columns, by_window) in zip(bases, _matrices(hidden, intermediate, 64), strict=True):
        n, b = _tiles(record, start, rows, columns, 64, by_window=by_window)
        # np.roll(n, s)[j] is n[(j - s) mod 32].
        total = sum(taps[s][np.roll(n, s, axis=2)] for s in range(3))  # [rows, windows, 32, 2]
        scaled = np.asarray(total, np.float32) * (levels[b] * base)[:, :, None, None]
        matrices.append(scaled.reshape(rows, -1)[:, :columns])
    return Weights(*matrices)


def _decode_fp4(record: Bytes, hidden: int, intermediate: int) -> Weights:
    matrices = []
    for start, rows, columns, by_window in _matrices(hidden, intermediate, 32):
        n, s = _tiles(record, start, rows, columns, 32, by_window=by_window)
        _check(not (s == 255).any(), "a scale is NaN")
        weights = np.ldexp(E2M1[n], s.astype(np.int32)[:, :, None] - 127)
        matrices.append(weights.reshape(rows, -1))
    return Weights(*matrices)


def _decode_raw(record: Bytes, dtype: str, hidden: int, intermediate: int) -> Weights:
    width = {"bf16": 2, "fp32": 4}[dtype]
    plane_bytes = _ceil(hidden * intermediate * width, PLANE_ALIGN_BYTES) * PLANE_ALIGN_BYTES

    def values(start: int, rows: int, columns: int) -> Floats:
        raw = record[start : start + rows * columns * width]
        bits = raw.view("<u4") if dtype == "fp32" else raw.view("<u2").astype("<u4") << 16
        return bits.astype(np.uint32).view(np.float32).reshape(rows, columns)

    panels, start = [], 2 * plane_bytes
    for first in range(0, intermediate, PANEL_COLUMNS):
        columns = min(PANEL_COLUMNS, intermediate - first)
        panels.append(values(start, hidden, columns))
        start += _ceil(hidden * columns * width, PLANE_ALIGN_BYTES) * PLANE_ALIGN_BYTES
    return Weights(
        values(0, intermediate, hidden), values(plane_bytes, intermediate, hidden), np.concatenate(panels, axis=1)
    )


def _check_sections(entry: Json, manifest: Json) -> None:
    """Keys, offsets, sizes and experts of one layer's sections, before a byte is used."""
    where, end, count = entry["file"], 0, entry["num_experts"]
    _check(set(entry) == LAYER_KEYS, f"keys {sorted(entry)} of {where}")
    _check(re.fullmatch(r"experts/layer-\d{5}\.bin", where) is not None, f"file {where}")
    _check(1 <= len(entry["sections"]) <= 2, f"{where} has {len(entry['sections'])} sections")
    for section, place in sorted(entry["sections"].items(), key=lambda item: item[1]["offset"]):
        experts = place["experts"]
        _check(set(place) == SECTION_KEYS, f"keys {sorted(place)} of {where}, {section}")
        _check(
            place["offset"] % ALIGN_BYTES == 0 and place["stride"] % ALIGN_BYTES == 0,
            f"{where}: {section} is unaligned",
        )
        _check(place["offset"] == end, f"{where}: {section} starts at {place['offset']}, not {end}")
        expected = record_bytes(manifest["codecs"][section], entry["hidden"], entry["intermediate"])
        _check(
            place["record_bytes"] == expected <= place["stride"], f"{where}: {section} record_bytes is not {expected}"
        )
        if section == "fp4":
            _check(len(experts) == min(manifest["fp4"]["max_top"], count), f"{where}: {len(experts)} experts in fp4")
            _check(sorted(set(experts)) == sorted(experts), f"{where}: an expert twice in fp4")
            _check(all(0 <= expert < count for expert in experts), f"{where}: experts {experts} of {count}")
        else:
            _check(experts == list(range(count)), f"{where}: experts {experts} of {count}")
        end += len(experts) * place["stride"]
    _check(end == entry["bytes"], f"{where}: sections end at {end}, not {entry['bytes']}")


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
