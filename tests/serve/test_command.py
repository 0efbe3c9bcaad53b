from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from tandem import launch, paths, refuse
from tandem.commands import serve
from tandem.console import new_app, run
from tandem.errors import PlanError
from tandem.machine import Gpu, probe_machine
from tandem.package.manifest import read_manifest
from tandem.profile import Profile, load_profile


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run `tandem serve ARGS` in process on an assumed CPU build of vLLM; gives (exit code, stdout, stderr)."""
    monkeypatch.setattr(refuse, "installed_vllm", lambda: refuse.Vllm("0.31.0+cpu", "cpu"))
    monkeypatch.setattr(launch, "vllm_executable", lambda: ("python", "vllm"))
    app = new_app("test")
    serve.register(app)
    app.command(name="other")(lambda: None)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tandem", "serve", *arguments])
        with pytest.raises(SystemExit) as ended:
            run(app, "tandem")
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def tuned(make_package: Callable[..., Path], make_profile: Callable[..., Profile]) -> tuple[Path, Profile]:
    """A package, and a profile for it on this very box."""
    package = make_package()
    profile = make_profile(machine=probe_machine(), package_sha256=read_manifest(package).sha256)
    profile.write(paths.profiles_dir() / "p.json")
    return package, profile


def test_print_config_says_value_and_origin(command: Callable[..., Any], tuned: tuple[Path, Profile]) -> None:
    package, profile = tuned
    code, out, err = command(str(package), "--print-config", "--json", "--cpu-threads", "1")
    assert code == 0, err
    document = json.loads(out)
    settings = {key: (entry["value"], entry["origin"]) for key, entry in document["settings"].items()}
    assert settings == {
        "fp4_top": (4, "profile"),
        "pinning": ("compact", "profile"),
        "cpu_threads": (1, "flag"),
        "reserve_cores": (2, "default"),
        "smt": (False, "default"),
        "cpu_kernel": ("auto", "default"),
    }
    assert document["profile"]["base"] == profile.sha256
    assert document["package"]["sha256"] == read_manifest(package).sha256
    assert not paths.run_dir().exists() and not paths.packages_dir().exists()
    code, out, _ = command(str(package), "--print-config")
    assert code == 0 and f"profile        {profile.id} {profile.sha256}" in out


def test_flags_become_a_profile_file_named_by_its_content(
    command: Callable[..., Any], tuned: tuple[Path, Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[launch.ServePlan] = []

    def start(plan: launch.ServePlan) -> None:
        started.append(plan)
        raise typer.Exit(0)

    monkeypatch.setattr(launch, "run", start)
    monkeypatch.setattr(launch, "check_port_free", lambda *_: None)
    package, profile = tuned
    for _ in range(2):
        assert command(str(package), "--fp4-top", "1", "--", "--max-num-seqs", "2")[0] == 0
    (written,) = paths.run_dir().glob("*.json")
    made = load_profile(written)
    assert written.name == f"profile-{made.id}.json" and made.base == profile.sha256
    assert made.resolved().config.fp4_top == 1 and made.resolved().config.pinning == "compact"
    assert json.loads(started[0].argv[-1]) == {"tandem": {"profile": str(written)}}
    assert started[0].argv[-4:-2] == ("--max-num-seqs", "2")
    assert command(str(package))[0] == 0
    assert json.loads(started[-1].argv[-1]) == {"tandem": {"profile": str(paths.profiles_dir() / "p.json")}}


def test_no_profile_is_said(command: Callable[..., Any], make_package: Callable[..., Path]) -> None:
    code, out, err = command(str(make_package()), "--dry-run")
    assert code == 0 and "--additional-config" not in out and "profile: none for this box and package" in err
    assert out.startswith("env ")


def test_profile_none_overrides_a_match(command: Callable[..., Any], tuned: tuple[Path, Profile]) -> None:
    code, out, _ = command(str(tuned[0]), "--dry-run", "--profile", "none", "--json")
    assert code == 0 and json.loads(out)["profile"] is None


def test_a_profile_of_another_box(command: Callable[..., Any], tuned: tuple[Path, Profile], make_profile: Any) -> None:
    package, profile = tuned
    path = paths.state_dir() / "foreign.json"
    make_profile(package_sha256=profile.package_sha256).write(path)
    code, out, err = command(str(package), "--profile", str(path))
    assert code == 5 and out == "" and "profile of another box: cpu CPU A != " in err
    assert command(str(package), "--profile", "gone.json", "--dry-run")[0] == 5


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--fp4-top", "9"], 3, "fp4_top 9 > 8, the FP4 experts a layer that"),
        (["--ram-gib", "2"], 3, "system 6.0 = 6.0 GiB > 2.0 GiB of RAM (short 4.0 GiB)"),
        (["--pinning", "hard"], 2, "pinning='hard' is not one of none, compact, spread"),
        (["--json"], 2, "--json is for --print-config and --dry-run"),
        (["--", "-ep"], 6, "does not support expert parallelism"),
        (["--dry-run", "--", "stray"], 2, "'stray' is not a flag of vLLM"),
        (["--colour"], 2, "No such option"),
    ],
)
def test_bad_input_has_a_code_and_a_line(
    command: Callable[..., Any], make_package: Callable[..., Path], arguments: list[str], code: int, said: str
) -> None:
    ended, out, err = command(str(make_package()), *arguments)
    assert (ended, out) == (code, "") and said in err and "Traceback" not in err


def test_flags_after_the_dashes_are_never_the_target(command: Callable[..., Any], tuned: tuple[Path, Profile]) -> None:
    from tandem.target import remember

    remember(tuned[0], tuned[1].package_sha256)
    code, out, _ = command("--dry-run", "--", "--max-num-seqs", "2")
    assert code == 0 and str(tuned[0]) in out and "--max-num-seqs 2" in out


def test_a_port_in_use(command: Callable[..., Any], make_package: Callable[..., Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        code, out, err = command(str(make_package()), "--port", port)
    assert (code, out) == (7, "") and f"port {port} of 127.0.0.1 is in use" in err


def test_dry_run_packs_nothing(command: Callable[..., Any], tmp_path: Path) -> None:
    source = tmp_path / "m"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (source / "model.safetensors").write_bytes(b"w")
    code, out, _ = command(str(source), "--dry-run")
    assert code == 0 and out.startswith(f"would pack {source} into {paths.packages_dir()}")
    assert not paths.packages_dir().exists()
    (source / "config.json").write_text('{"model_type": "deepseek_v41"}')
    assert command(str(source), "--dry-run")[0] == 6


def test_v41_is_planned_before_any_work() -> None:
    machine = probe_machine()
    gpu = Gpu(
        index=0, name="G", vram_bytes=96 << 30, compute_capability=(9, 0), pcie_gen=5, pcie_gen_max=5, pcie_width=16,
        pcie_width_max=16, numa_node=-1, power_limit_w=None, uuid_sha256="0" * 64,
    )  # fmt: skip
    config = {
        "model_type": "deepseek_v41", "num_hidden_layers": 40, "n_routed_experts": 384, "num_experts_per_tok": 6,
        "num_nextn_predict_layers": 3, "dspark_n_routed_experts": 128, "hidden_size": 5120,
        "moe_intermediate_size": 2304, "engram_num_embeddings": [384006168, 384016682], "engram_head_dim": 256,
    }  # fmt: skip
    boxed = machine.model_copy(update={"gpus": (gpu,)})
    vllm = refuse.Vllm("0.31.0", "cuda")
    with pytest.raises(PlanError) as caught:
        serve.box_gate(vllm, boxed, 256 << 30)(config)
    assert "expert codes" in str(caught.value) and "Engram tables" in str(caught.value) and "short" in str(caught.value)
    serve.box_gate(vllm, boxed, 512 << 30)(config)
    small = machine.model_copy(update={"gpus": (gpu.model_copy(update={"vram_bytes": 8 << 30}),)})
    with pytest.raises(PlanError, match="cuda:0"):
        serve.box_gate(vllm, small, 512 << 30)(config)
