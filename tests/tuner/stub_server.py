"""A server that looks like `vllm serve` with the Tandem plugin, for tests: `stub_server.py serve PACKAGE --port N ...`.

Standard library only. It reads the profile as the engine does; the file in $TANDEM_STUB says what goes wrong, by knob:
{"cpu_threads=2": "oom"}. Two threads decode faster than one.
"""

import hashlib
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKENS = 12
TOKEN_S = {1: 0.004, 2: 0.002}


def value_of(flag: str) -> str:
    return sys.argv[sys.argv.index(flag) + 1]


profile = json.loads(Path(json.loads(value_of("--additional-config"))["tandem"]["profile"]).read_text())
content = {key: value for key, value in profile.items() if key != "id"}
sha256 = hashlib.sha256(
    json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
).hexdigest()
script = json.loads(Path(os.environ["TANDEM_STUB"]).read_text()) if "TANDEM_STUB" in os.environ else {}
fault = next((script[key] for name, value in profile["knobs"].items() if (key := f"{name}={value}") in script), None)

if fault == "oom":
    sys.exit("terminate called after throwing an instance of 'std::bad_alloc'")
if fault == "selfcheck":
    sys.exit("RuntimeError: selfcheck_failed: vq differs by 0.3 at 0.002")
if fault == "never_ready":
    time.sleep(600)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply({})
        elif self.path == "/v1/models":
            self.reply({"data": [{"id": value_of("--served-model-name"), "max_model_len": 2048}]})
        elif self.path == "/tandem/profile":
            shown = "0" * 64 if fault == "wrong_profile" else sha256
            self.reply({"profile_sha256": shown, "config_sha256": "1" * 64})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if fault == "crash":
            os._exit(3)
        if fault == "hang":
            time.sleep(600)
        if fault == "error":
            self.send_error(400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number in range(1, TOKENS + 1):
            time.sleep(TOKEN_S[profile["knobs"]["cpu_threads"]])
            last = number == TOKENS
            delta = {"content": "#### 7" if last else "a "}
            choice = {"index": 0, "delta": delta, "finish_reason": "stop" if last else None}
            usage = {"prompt_tokens": 9, "completion_tokens": number, "total_tokens": 9 + number}
            self.wfile.write(b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def reply(self, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


ThreadingHTTPServer(("127.0.0.1", int(value_of("--port"))), Handler).serve_forever()
