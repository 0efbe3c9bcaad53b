"""`tandem-tune` with the stub server in vLLM's place, in a process of its own: tests signal and kill it."""

import sys
from pathlib import Path

from tandem import launch, refuse
from tandem_tuner import cli

launch.vllm_executable = lambda: (sys.executable, str(Path(__file__).with_name("stub_server.py")))
refuse.installed_vllm = lambda: refuse.Vllm("0.31.0", "cpu")

if __name__ == "__main__":
    cli.main()
