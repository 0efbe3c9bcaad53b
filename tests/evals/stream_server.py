"""A small server on loopback that speaks the OpenAI stream, with faults on request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Script = Callable[[int, Body], "Answer"]


class Answer:
    """One answer: (content, reasoning, tokens) a chunk, and what goes wrong.

    fault: None, "status" (HTTP `status`), "cut" (the connection ends after the chunks), "hang" (silence after them),
    "error" (an error object in the stream), "no usage", "garbage". running_counts: token counts with every chunk, as
    vLLM gives them, or at the end only.
    """

    def __init__(
        self,
        *chunks: tuple[str, str, int],
        fault: str | None = None,
        status: int = 500,
        finish: str = "stop",
        running_counts: bool = True,
    ) -> None:
        self.chunks = chunks
        self.fault = fault
        self.status = status
        self.finish = finish
        self.running_counts = running_counts


class StreamServer:
    """What was asked, and how it is answered. `script(n, body)` gives the answer of the n-th request, from 0."""

    def __init__(self, script: Script, extra: Mapping[str, Any]) -> None:
        self.script = script
        self.extra = dict(extra)  # more GET paths and their JSON
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.in_flight = self.most_in_flight = 0
        self.url = ""


@contextmanager
def serve(script: Script, extra: Mapping[str, Any] | None = None, port: int = 0) -> Iterator[StreamServer]:
    state = StreamServer(script, extra or {})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Silence."""

        def do_GET(self) -> None:
            known: dict[str, Any] = {"/v1/models": {"data": [{"id": "tiny", "max_model_len": 512}]}, **state.extra}
            if self.path not in known:
                self._json(404, {"detail": "Not Found"})
            else:
                self._json(200, known[self.path])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                number = len(state.bodies)
                state.bodies.append(body)
                state.headers.append(dict(self.headers.items()))
                state.in_flight += 1
                state.most_in_flight = max(state.most_in_flight, state.in_flight)
            self.counted = True
            try:
                self._stream(state.script(number, body))
            finally:
                self._leave()

        def _leave(self) -> None:
            """Before the last byte: the client may ask again as soon as it has that."""
            with state.lock:
                state.in_flight -= self.counted
            self.counted = False

        def _stream(self, answer: Answer) -> None:
            if answer.fault == "status":
                self._json(answer.status, {"error": {"message": f"scripted\n{answer.status}"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            if answer.fault == "garbage":
                self._event("{not json")
            usage = {"usage": _usage(0)} if answer.running_counts else {}
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}], **usage})
            total = 0
            for content, reasoning, tokens in answer.chunks:
                total += tokens
                delta = {"content": content, "reasoning": reasoning}
                usage = {"usage": _usage(total)} if answer.running_counts else {}
                self._event({"choices": [{"delta": delta, "finish_reason": None}], **usage})
            if answer.fault == "cut":
                self.close_connection = True
                return
            if answer.fault == "hang":
                state.closing.wait(20)
                self.close_connection = True
                return
            if answer.fault == "error":
                self._event({"error": {"message": "EngineDeadError", "code": 500}})
            elif answer.fault == "no usage":
                self._event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            else:
                total += 1  # the end token has no text
                usage = {"usage": _usage(total)} if answer.running_counts else {}
                self._event({"choices": [{"delta": {"content": ""}, "finish_reason": answer.finish}], **usage})
                self._event({"choices": [], "usage": _usage(total)})
            self._event("[DONE]")
            self._leave()
            self.wfile.write(b"0\r\n\r\n")

        def _event(self, value: Any) -> None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)  # as vLLM
            data = f"data: {text}\n\n".encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
            time.sleep(0.002)

        def _json(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            if self.command == "POST":
                self._leave()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 7, "completion_tokens": tokens, "total_tokens": 7 + tokens}
