"""From a package and its settings to the exact `vllm serve` line and environment. Torch-free; only `run` acts."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from tandem.capabilities import Capabilities
from tandem.errors import ServerError, UnsupportedError, UsageError
from tandem.refuse import Platform, check_flags, check_graphs, tensor_parallel
from tandem.vllm_flags import Flag, given, json_of, value_of

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
GENERAL_PLUGINS = "vllm.general_plugins"
OUR_PLUGIN = "tandem"

GIB = 1 << 30
CPU_MAX_MODEL_LEN = 4096  # KV of longer contexts is RAM that the experts need; `-- --max-model-len` changes it
CPU_KV_SEQUENCES = 4  # sequences of full length that the default KV cache holds
CPU_MEMORY_SHARE = "0.2"  # vLLM's start-up check of free RAM, a share of the node; the KV size is set by itself
KV_BYTES_PER_VALUE = 4  # fp32, the widest that vLLM's CPU build keeps

LineOrigin = Literal["tandem", "platform", "flag"]


class LineItem(NamedTuple):
    """A part of the line, and who asked for it."""

    tokens: tuple[str, ...]
    origin: LineOrigin


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What `exec` gets."""

    argv: tuple[str, ...]
    env: Mapping[str, str]  # set beside the environment that is there already
    host: str
    port: int
    uds: str | None  # a Unix socket in place of host and port

    @property
    def shell_line(self) -> str:
        """The line for a shell, environment included."""
        return shlex.join(["env", *(f"{key}={value}" for key, value in sorted(self.env.items())), *self.argv])

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def plan_server(
    *,
    package: Path,
    served_name: str,
    config: Mapping[str, Any],
    profile: Path | None,
    host: str | None,
    port: int | None,
    flags: Sequence[Flag],
    platform: Platform,
    capabilities: Capabilities,
    cpus: Sequence[int],
    cores: int | None = None,
    executable: Sequence[str],
    plugins: Iterable[str],
    environment: Mapping[str, str],
) -> ServePlan:
    """The plan. `config`: the package's config.json; `cpus`: ids of usable CPUs; `cores`: how many cores they are
    (None: as many as CPUs).

    A flag of the user's wins over each default of ours, and no flag is emitted twice. Raises UsageError and
    UnsupportedError for flags that contradict it.
    """
    check_flags(flags)
    check_graphs(flags, capabilities.cuda_graphs, platform)
    items = [
        LineItem(("serve", str(package)), "tandem"),
        *_address(host, port, flags),
        *_defaults(served_name, config, flags, platform, capabilities),
        *(LineItem(flag.tokens, "flag") for flag in flags if flag.name not in ("--additional-config",)),
        *_additional_config(profile, flags),
    ]
    argv = (*executable, *(token for item in items for token in item.tokens))
    return ServePlan(
        argv,
        _environment(config, flags, platform, cpus, len(cpus) if cores is None else cores, plugins, environment),
        value_of(flags, "--host") or host or DEFAULT_HOST,
        port_number(value_of(flags, "--port"), port),
        value_of(flags, "--uds"),
    )


def general_plugins() -> tuple[str, ...]:
    """Names of every general plugin of vLLM that is installed."""
    return tuple(sorted({entry.name for entry in importlib.metadata.entry_points(group=GENERAL_PLUGINS)}))


def console_script(name: str, module: str) -> tuple[str, ...]:
    """How to run an installed command with this interpreter.

    The script beside the interpreter, run by it: no dependence on PATH or on a shebang, and unlike `-m` it does not
    put the current folder in front of the module search path.
    """
    script = Path(sys.executable).parent / name
    if script.is_file():
        return (sys.executable, str(script))
    return (sys.executable, "-m", module)


def vllm_executable() -> tuple[str, ...]:
    """Raises UnsupportedError when this environment has no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise UnsupportedError("vLLM is not installed in this environment; `./run` sets it up")
    return console_script("vllm", "vllm.entrypoints.cli.main")


def check_port_free(host: str, port: int) -> None:
    """Raises ServerError when nothing can listen at `host:port`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise ServerError(
                f"port {port} of {host} is in use; stop what listens there, or choose another with --port"
            ) from None
        raise ServerError(f"cannot listen at {host}:{port}: {problem.strerror or problem}") from None


def run(plan: ServePlan) -> NoReturn:
    """Become the server: no wrapper process stays behind."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(plan.argv[0], list(plan.argv), {**os.environ, **plan.env})


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Bytes of keys and values a token of context, from config.json; 0 where the model says it in other terms."""
    heads, layers = config.get("num_attention_heads"), config.get("num_hidden_layers")
    hidden = config.get("hidden_size")
    if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(hidden, int)):
        return 0
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    return int(2 * layers * kv_heads * head_dim * KV_BYTES_PER_VALUE)


def _address(host: str | None, port: int | None, flags: Sequence[Flag]) -> list[LineItem]:
    for name, value in (("--host", host), ("--port", port)):
        if value is not None and given(flags, name):
            raise UsageError(f"{name} is given to `tandem serve` and again after `--`; give it once")
    if given(flags, "--uds"):
        return []
    items = []
    if not given(flags, "--host"):
        items.append(LineItem(("--host", host or DEFAULT_HOST), "tandem"))
    if not given(flags, "--port"):
        items.append(LineItem(("--port", str(port_number(None, port))), "tandem"))
    return items


def port_number(flag: str | None, port: int | None) -> int:
    value = flag if flag is not None else str(port if port is not None else DEFAULT_PORT)
    if not value.isdigit() or not 1024 <= int(value) <= 65535:  # vLLM's own bounds
        raise UsageError(f"port {value!r} is not a number between 1024 and 65535")
    return int(value)


def _defaults(
    served_name: str,
    config: Mapping[str, Any],
    flags: Sequence[Flag],
    platform: Platform,
    capabilities: Capabilities,
) -> list[LineItem]:
    wanted: list[tuple[str, ...]] = [("--served-model-name", served_name)]
    if platform == "cpu" or not capabilities.cuda_graphs:
        wanted.append(("--enforce-eager",))
    if platform == "cpu":
        dtype = config.get("dtype") or config.get("torch_dtype")
        if isinstance(dtype, str):
            # vLLM's `auto` turns fp32 into bf16
            wanted.append(("--dtype", dtype.removeprefix("torch.")))
        wanted.append(("--gpu-memory-utilization", CPU_MEMORY_SHARE))
        longest = config.get("max_position_embeddings")
        if isinstance(longest, int):
            wanted.append(("--max-model-len", str(min(longest, CPU_MAX_MODEL_LEN))))
    same = {"--gpu-memory-utilization": "--device-memory-utilization"}
    return [
        LineItem(tokens, "platform")
        for tokens in wanted
        if not given(flags, tokens[0]) and not given(flags, same.get(tokens[0], tokens[0]))
    ]


def _additional_config(profile: Path | None, flags: Sequence[Flag]) -> list[LineItem]:
    stated = json_of(flags, "--additional-config")
    if OUR_PLUGIN in stated:
        raise UsageError('--additional-config holds "tandem", which `tandem serve` sets; use --profile PATH')
    if profile is not None:
        stated = {**stated, OUR_PLUGIN: {"profile": str(profile)}}
    if not stated:
        return []
    text = json.dumps(stated, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return [LineItem(("--additional-config", text), "tandem")]


def _environment(
    config: Mapping[str, Any],
    flags: Sequence[Flag],
    platform: Platform,
    cpus: Sequence[int],
    cores: int,
    plugins: Iterable[str],
    environment: Mapping[str, str],
) -> dict[str, str]:
    stated = environment.get("VLLM_PLUGINS")
    names = set(plugins) if stated is None else {name for name in stated.split(",") if name}
    # ours is named because vLLM loads endpoint plugins (/tandem/profile, /tandem/stats) only when they are
    chosen: dict[str, str] = {"VLLM_PLUGINS": ",".join([OUR_PLUGIN, *sorted(names - {OUR_PLUGIN})])}
    if platform != "cpu":
        return chosen
    defaults = {"VLLM_CPU_KVCACHE_SPACE": str(_kv_gib(config, flags))}
    ranks = tensor_parallel(flags)
    if ranks > 1:
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = _core_sets(cpus, ranks)
    else:
        # The only rank then lives in the engine's process: one import of vLLM and one process less. vLLM gives each
        # worker process its OpenMP threads (all cores but one); without such a process we say how many.
        defaults |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(max(1, cores - 1))}
    return chosen | {key: value for key, value in defaults.items() if key not in environment}


def _kv_gib(config: Mapping[str, Any], flags: Sequence[Flag]) -> int:
    """Whole GiB, as vLLM wants it: room for CPU_KV_SEQUENCES contexts of the served length."""
    longest = config.get("max_position_embeddings")
    stated = value_of(flags, "--max-model-len")
    tokens = int(stated) if stated and stated.isdigit() else min(int(longest or CPU_MAX_MODEL_LEN), CPU_MAX_MODEL_LEN)
    return max(1, -(-kv_bytes_per_token(config) * tokens * CPU_KV_SEQUENCES // GIB))


def _core_sets(cpus: Sequence[int], ranks: int) -> str:
    """Disjoint CPUs for each rank, in vLLM's form: 0,1|2,3. Raises UsageError with fewer CPUs than ranks."""
    if len(cpus) < ranks:
        raise UsageError(f"--tensor-parallel-size {ranks} needs {ranks} CPUs and this box lets us use {len(cpus)}")
    each = len(cpus) // ranks
    return "|".join(",".join(map(str, cpus[rank * each : (rank + 1) * each])) for rank in range(ranks))
