"""A tiny stand-in for the engine's process, run as a script: it listens on a Unix socket, answers
/health and one fixed chat stream, and can be told how to go wrong. Standard library only, so that
it starts in milliseconds.

    engine_process.py --uds PATH [--load-s S] [--exit-code N --say TEXT] [--crash-after-s S]
              [--hang-after-s S] [--ignore-term] [--life PATH]

`--life PATH` appends this process's id to a file when it starts.
"""

import argparse
import os
import signal
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

STREAM = (
    b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"content":"hi"},'
    b'"finish_reason":"stop"}]}\n\n'
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)


class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    began = time.monotonic()
    load_s = 0.0
    hang_after_s: float | None = None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        age_s = time.monotonic() - server.began
        if server.hang_after_s is not None and age_s > server.hang_after_s:
            time.sleep(60)
        self._answer(200 if age_s >= server.load_s else 503, b"{}", "application/json")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(200, STREAM, "text/event-stream")

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"  # a Unix peer has no host and port

    def log_message(self, *_: object) -> None:
        """stderr is for what `--say` says."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds", required=True)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--exit-code", type=int)
    parser.add_argument("--say", default="")
    parser.add_argument("--crash-after-s", type=float)
    parser.add_argument("--hang-after-s", type=float)
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--life")
    options = parser.parse_args()
    if options.life:
        with Path(options.life).open("a") as life:
            life.write(f"{os.getpid()}\n")
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.say:
        sys.stderr.write(options.say + "\n")
        sys.stderr.flush()
    if options.exit_code is not None:
        return int(options.exit_code)
    server = Server(options.uds, Handler)
    server.load_s = options.load_s
    server.hang_after_s = options.hang_after_s
    if options.crash_after_s is not None:
        threading.Timer(options.crash_after_s, os._exit, (70,)).start()
    server.serve_forever(poll_interval=0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main())
