"""`make demo`: a whole system with traffic, in one command and on a CPU. The bundled engine, two
scripted vendors of which one fails now and then, four tenants of different habits, a budget that
runs out and a limit that binds; then the bill by tenant and the story of one request. Serves on
until Ctrl-C. Data are in ./demo-data, which is begun anew each time.
"""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from msgspec import Struct

FOLDER = Path("demo-data")
PORT = int(os.environ.get("DEMO_PORT", "8080"))
SECONDS = float(os.environ.get("DEMO_SECONDS", "20"))  # of traffic before the first bill
COMMAND = [sys.executable, "-m", "gateway"]

CONFIG = f"""
[server]
port = {PORT}
[[engines]]
name = "local"
model = "smollm2-135m-instruct"
gpu = {{ rate_per_hour = 0.20, count = 1 }}
[[backends]]
name = "vendor"
kind = "scripted"
price = {{ input = 2.50, output = 10.00 }}
[backends.script]
output_tokens = 40
first_token_s = 0.2
inter_token_s = 0.02
fail = "500"
fail_every = 6
[[backends]]
name = "deputy"
kind = "scripted"
price = {{ input = 0.15, output = 0.60 }}
script = {{ output_tokens = 40, first_token_s = 0.1, inter_token_s = 0.01 }}
[[routes]]
model = "assistant"
targets = [{{ backend = "local", model = "smollm2-135m-instruct" }}]
[[routes]]
model = "large"
targets = [{{ backend = "vendor" }}, {{ backend = "deputy", weight = 0 }}]
"""


class Habit(Struct, frozen=True):
    """What a tenant asks for."""

    tenant: str
    model: str
    stream: bool
    pause_s: float


HABITS = (
    Habit("acme", "large", True, 0.4),
    Habit("globex", "large", False, 0.2),
    Habit("initech", "assistant", True, 1.5),
    Habit("hooli", "large", True, 0.1),
)
QUESTIONS = (
    "What is the capital of France?",
    "Name three primes.",
    "Write a haiku about rivers.",
    "Why is the sky blue?",
)


def main() -> None:
    """Serve, ask, tell."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    (FOLDER / "meterline.toml").write_text(CONFIG)
    with _serving():
        keys = {habit.tenant: _tenant(habit.tenant) for habit in HABITS}
        _run("budget", "set", "hooli", "0.02", "--window", "month")
        _run("limit", "set", "globex", "requests", "60", "--per", "1m")
        stop = threading.Event()
        threads = [
            threading.Thread(target=_ask, args=(habit, keys[habit.tenant], stop), daemon=True)
            for habit in HABITS
        ]
        for thread in threads:
            thread.start()
        _say(f"\nFour tenants are asking; in {SECONDS:g} seconds you get their bill.\n")
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(SECONDS)
            _story()
            if "--once" not in sys.argv:
                _say(f"\nhttp://127.0.0.1:{PORT} serves on. Look: `cd {FOLDER}`, then")
                _say("`meterline report chargeback --by tenant,model`. Ctrl-C ends it.")
                threading.Event().wait()
        stop.set()


@contextlib.contextmanager
def _serving() -> Iterator[None]:
    with (FOLDER / "log").open("wb") as sink:
        process = subprocess.Popen(
            [*COMMAND, "serve"], cwd=FOLDER, env=_environment(), stdout=sink, stderr=sink
        )
    try:
        _say("Starting: gateway, ledger, engine (its first start compiles for some seconds).")
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{PORT}/readyz", timeout=5).status_code == 200:
                    break
            if process.poll() is not None:
                sys.exit((FOLDER / "log").read_text()[-2000:])
            time.sleep(0.2)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(40)


def _tenant(name: str) -> str:
    _run("tenant", "create", name)
    found = re.search(r"sk-ml-[\w-]+", _run("key", "create", name, "--name", "demo"))
    assert found is not None
    _say(f"  {name:8} {found[0]}")
    return found[0]


def _ask(habit: Habit, key: str, stop: threading.Event) -> None:
    dice = random.Random(habit.tenant)
    with httpx.Client(
        base_url=f"http://127.0.0.1:{PORT}/v1",
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    ) as client:
        for question in itertools.cycle(QUESTIONS):
            if stop.wait(habit.pause_s * dice.uniform(0.5, 1.5)):
                return
            body = {
                "model": habit.model,
                "stream": habit.stream,
                "max_tokens": 40,
                "messages": [{"role": "user", "content": question}],
            }
            with contextlib.suppress(httpx.HTTPError):
                client.post("/chat/completions", json=body)


def _story() -> None:
    """The bill, and one request that fell back."""
    _say(_run("report", "chargeback", "--by", "tenant,model"))
    fell_back = None
    for line in (FOLDER / "log").read_text().splitlines():
        if '"event":"request"' in line and '"attempts":2' in line:
            fell_back = json.loads(line)["request_id"]
    if fell_back is not None:
        time.sleep(1)  # it is shipped within one
        _say("A request whose first backend failed:\n")
        _say(_run("explain", fell_back))


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=FOLDER,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"meterline {' '.join(arguments)}: {done.stderr}")
    return done.stdout


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, "PYTHONUNBUFFERED": "1"}


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
