from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import Any

import pytest

from tandem.capabilities import Capabilities, capabilities
from tandem.errors import ServerError, UsageError
from tandem.launch import ServePlan, check_port_free, console_script, general_plugins, plan_server
from tandem.vllm_flags import parse_flags
from tests.serve.conftest import CONFIG

PROFILE = Path("/state/run/p.json")
GRAPHS = Capabilities(("single",), ("cpu",), True, False, ())


def plan(*flags: str, **changed: Any) -> ServePlan:
    stated: dict[str, Any] = {
        "package": Path("/packs/tiny"),
        "served_name": "tiny",
        "config": CONFIG,
        "profile": PROFILE,
        "host": None,
        "port": None,
        "flags": parse_flags(flags),
        "platform": "cpu",
        "capabilities": capabilities(),
        "cpus": [0, 1, 4, 5],
        "cores": 4,
        "executable": ("python", "vllm"),
        "plugins": ("other", "tandem"),
        "environment": {},
    }
    return plan_server(**(stated | changed))


def test_the_cpu_line() -> None:
    assert plan().argv == (
        *("python", "vllm", "serve", "/packs/tiny", "--host", "127.0.0.1", "--port", "8000"),
        *("--served-model-name", "tiny", "--enforce-eager", "--dtype", "bfloat16", "--gpu-memory-utilization", "0.2"),
        *("--max-model-len", "2048", "--additional-config", '{"tandem":{"profile":"/state/run/p.json"}}'),
    )
    assert plan().env == {
        "VLLM_PLUGINS": "tandem,other",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "3",
    }


def test_the_cuda_line() -> None:
    eager = plan(platform="cuda")
    assert eager.argv[8:] == (
        *("--served-model-name", "tiny", "--enforce-eager"),
        *("--additional-config", '{"tandem":{"profile":"/state/run/p.json"}}'),
    )
    assert eager.env == {"VLLM_PLUGINS": "tandem,other"}
    assert "--enforce-eager" not in plan(platform="cuda", capabilities=GRAPHS).argv


def test_the_users_flags_win_and_nothing_is_said_twice() -> None:
    made = plan(
        *("--max_model_len=512", "--no-enforce-eager", "--dtype", "float32", "--served-model-name", "a", "b"),
        *("--host", "0.0.0.0", "--port", "9000", "--gpu-memory-utilization", "0.5"),
    )
    names = [token.partition("=")[0].replace("_", "-") for token in made.argv if token.startswith("--")]
    assert len(names) == len(set(names))
    assert "--enforce-eager" not in names and "127.0.0.1" not in made.argv and "0.2" not in made.argv
    assert (made.host, made.port) == ("0.0.0.0", 9000) and made.base_url == "http://0.0.0.0:9000"


def test_a_users_additional_config_is_merged() -> None:
    merged = plan("--additional-config", '{"x":1}').argv[-1]
    assert merged == '{"tandem":{"profile":"/state/run/p.json"},"x":1}'
    assert plan("--additional-config.x.y", "2").argv[-1] == '{"tandem":{"profile":"/state/run/p.json"},"x":{"y":2}}'
    assert plan("--additional-config", '{"x":1}', profile=None).argv[-1] == '{"x":1}'
    assert "--additional-config" not in plan(profile=None).argv
    with pytest.raises(UsageError, match="use --profile"):
        plan("--additional-config", '{"tandem":{}}')


def test_a_unix_socket_has_no_address() -> None:
    made = plan("--uds", "/tmp/s")
    assert made.uds == "/tmp/s" and "--port" not in made.argv and "--host" not in made.argv


def test_the_environment_that_is_there_wins() -> None:
    there = {
        "VLLM_PLUGINS": "mine",
        "VLLM_CPU_KVCACHE_SPACE": "7",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    assert plan(environment=there).env == {"VLLM_PLUGINS": "tandem,mine"}


def test_kv_space_follows_the_context() -> None:
    wide = CONFIG | {
        "num_hidden_layers": 64,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 99999,
    }
    made = plan(config=wide)
    # 2 x 64 layers x 8 heads x 128 x 4 bytes = 512 KiB a token; 4096 tokens, 4 sequences
    assert made.env["VLLM_CPU_KVCACHE_SPACE"] == "8" and made.argv[made.argv.index("--max-model-len") + 1] == "4096"


def test_ranks_get_disjoint_cpus() -> None:
    env = plan("-tp", "2").env
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|4,5" and "VLLM_ENABLE_V1_MULTIPROCESSING" not in env
    with pytest.raises(UsageError, match="needs 8 CPUs and this box lets us use 4"):
        plan("-tp", "8")


def test_the_line_survives_a_shell() -> None:
    made = plan("--override-generation-config", '{"temperature": 0}')
    assert shlex.split(made.shell_line) == [
        *("env", "OMP_NUM_THREADS=3", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_ENABLE_V1_MULTIPROCESSING=0"),
        "VLLM_PLUGINS=tandem,other",
        *made.argv,
    ]


@pytest.mark.parametrize(("flags", "changed"), [(("--port", "x"), {}), ((), {"port": 80}), ((), {"port": 70000})])
def test_ports_outside_vllms_range(flags: tuple[str, ...], changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="between 1024 and 65535"):
        plan(*flags, **changed)


def test_a_port_given_on_both_sides() -> None:
    with pytest.raises(UsageError, match="--port is given to `tandem serve` and again"):
        plan("--port", "9000", port=9001)


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} of 127.0.0.1 is in use"):
            check_port_free("127.0.0.1", port)
    check_port_free("127.0.0.1", port)


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(ServerError, match=r"cannot listen at 192\.0\.2\.1:9000"):
        check_port_free("192.0.2.1", 9000)


def test_a_script_beside_the_interpreter_is_preferred() -> None:
    assert console_script("no-such-script", "a.b")[1:] == ("-m", "a.b")
    assert "tandem" in general_plugins()
