"""Other proxies, when they are installed: to be measured and judged beside ours in the same minute.

nginx is found on the PATH. `LITELLM=/path/to/bin/litellm` names LiteLLM's command (it lives in an
environment of its own), `PORTKEY=/path/to/node_modules/@portkey-ai/gateway` Portkey's folder, and
`NODE` the node that runs it (its streams fail on node 20).
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from tests.services import free_port

START_S = 90.0
TIMEOUT_S = 2  # what each is told to wait for its upstream


class Peer(Struct, frozen=True, kw_only=True):
    """A running one."""

    name: str
    port: int
    pid: int
    key: str = "sk-bench"
    headers: dict[str, str] = {}


def installed() -> list[str]:
    """Those that can be started here."""
    found = ["nginx"] if shutil.which("nginx") else []
    if Path(os.environ.get("LITELLM", "/nowhere")).exists():
        found.append("litellm")
    if Path(os.environ.get("PORTKEY", "/nowhere")).exists():
        found.append("portkey")
    return found


@contextlib.contextmanager
def running(name: str, upstream: int, folder: Path, model: str) -> Iterator[Peer]:
    """One of `installed`, in front of the server on port `upstream`."""
    start = {"nginx": _nginx, "litellm": _litellm, "portkey": _portkey}[name]
    with start(upstream, folder, model) as peer:
        yield peer


@contextlib.contextmanager
def _process(port: int, command: list[str], folder: Path, **env: str) -> Iterator[int]:
    with (folder / f"log-{port}").open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **env},
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / f"log-{port}").read_text()[-2000:])
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _nginx(upstream: int, folder: Path, model: str) -> Iterator[Peer]:
    """Plain: no key check, no log, one process."""
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;\n"
        "events { worker_connections 4096; }\n"
        f"http {{ access_log off; client_body_temp_path {folder}/body;\n"
        f"proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;\n"
        f"uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;\n"
        f"upstream mock {{ server 127.0.0.1:{upstream}; keepalive 1024; }}\n"
        f"server {{ listen 127.0.0.1:{port}; client_max_body_size 64m;\n"
        "location / { proxy_pass http://mock; proxy_http_version 1.1; proxy_buffering off;\n"
        f'proxy_set_header Connection ""; proxy_read_timeout {TIMEOUT_S}s; }} }} }}\n'
    )
    with _process(port, ["nginx", "-e", f"{folder}/nginx.log", "-c", str(config)], folder) as pid:
        version = subprocess.run(["nginx", "-v"], capture_output=True, text=True, check=True).stderr
        number = re.search(r"nginx/(\S+)", version)
        yield Peer(name=f"nginx {number[1] if number else ''}", port=port, pid=pid)


@contextlib.contextmanager
def _litellm(upstream: int, folder: Path, model: str) -> Iterator[Peer]:
    """With a master key, without a database."""
    port, command = free_port(), os.environ["LITELLM"]
    config = folder / "litellm.yaml"
    parameters = {
        "model": f"openai/{model}",
        "api_base": f"http://127.0.0.1:{upstream}/v1",
        "api_key": "sk-upstream",
        "timeout": TIMEOUT_S,
        "stream_timeout": TIMEOUT_S,
        "max_retries": 0,
    }
    config.write_text(
        json.dumps(
            {
                "model_list": [{"model_name": model, "litellm_params": parameters}],
                "litellm_settings": {"num_retries": 0, "telemetry": False},
                "router_settings": {"num_retries": 0, "disable_cooldowns": True},
                "general_settings": {"master_key": "sk-bench"},
            }
        )
    )
    python = Path(command).parent / "python"
    version = subprocess.run(
        [python, "-c", "from importlib.metadata import version as v; print(v('litellm'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    arguments = [command, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with _process(port, arguments, folder, LITELLM_LOG="ERROR") as pid:
        yield Peer(name=f"LiteLLM {version}", port=port, pid=pid)


@contextlib.contextmanager
def _portkey(upstream: int, folder: Path, model: str) -> Iterator[Peer]:
    """Its open source gateway; it has no key check of its own."""
    port, home = free_port(), Path(os.environ["PORTKEY"])
    version = json.loads((home / "package.json").read_text())["version"]
    node = os.environ.get("NODE", "node")
    arguments = [node, str(home / "build" / "start-server.js"), f"--port={port}", "--headless"]
    headers = {
        "x-portkey-provider": "openai",
        "x-portkey-custom-host": f"http://127.0.0.1:{upstream}/v1",
        "x-portkey-request-timeout": str(TIMEOUT_S * 1000),
    }
    with _process(port, arguments, folder, TRUSTED_CUSTOM_HOSTS="127.0.0.1,localhost") as pid:
        yield Peer(name=f"Portkey {version}", port=port, pid=pid, headers=headers)
