"""Starting the packaged command: whatever is wrong is a clear line on stderr and exit code 2, with
no traceback, nothing left half-written and nothing left listening; then config changes while it
runs, and what each command says of itself."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gateway.__main__ import COMMANDS
from tests.e2e.served import COMMAND, Served, run, serve
from tests.services import free_port

ROUTED = """
[[backends]]
name = "s"
kind = "scripted"
script = { output_tokens = 2 }
[[routes]]
model = "m"
targets = [{ backend = "s" }]
"""


def start(
    folder: Path, config: str | None = None, *arguments: str, port: int | None = None, **env: str
) -> "subprocess.CompletedProcess[str]":
    """`meterline serve`, which is expected to give up."""
    if config is not None:
        (folder / "meterline.toml").write_text(config)
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [*COMMAND, "serve", "--port", str(port or free_port()), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def refused(done: "subprocess.CompletedProcess[str]", *parts: str, lines: int = 1) -> None:
    """Exit code 2, and so many lines on stderr that say this."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == lines, done.stderr
    assert done.stdout == ""
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_three_mistakes(tmp_path: Path) -> None:
    """Three mistakes in the config are three lines, each with its path."""
    config = ROUTED.replace("output_tokens = 2", "output_tokns = 2") + (
        '[server]\nport = "high"\n[[routes]]\nmodel = "n"\ntargets = [{ backend = "t" }]\n'
    )
    done = start(tmp_path, config)
    refused(done, lines=3)
    assert [line.split(":")[0] for line in sorted(done.stderr.splitlines())] == [
        "backends[0].script.output_tokns",
        "routes[1].targets[0].backend",
        "server.port",
    ]
    assert "did you mean `output_tokens`?" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meterline.toml"]


def test_missing_file(tmp_path: Path) -> None:
    """A config file that was named must be there."""
    refused(start(tmp_path, None, "--config", "other.toml"), "other.toml", "No such file")
    assert list(tmp_path.iterdir()) == []


def test_port_in_use(tmp_path: Path) -> None:
    """A port in use is found before anything is written."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(start(tmp_path, ROUTED, port=port), f"127.0.0.1:{port}", "in use", "--port")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meterline.toml"]


def test_unreachable_database(tmp_path: Path) -> None:
    """A database that does not answer is one line without its password, and nothing listens."""
    port = free_port()
    url = f"postgresql+asyncpg://me:canary-password@127.0.0.1:{free_port()}/db"
    done = start(tmp_path, f'[store]\ndatabase = "{url}"\n{ROUTED}', port=port)
    refused(done, "database")
    assert "canary-password" not in done.stderr
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_database_without_tables(tmp_path: Path, postgres_url: str) -> None:
    """A shared database is not migrated by a start: the operator is told how. Then it starts."""
    config = f'[store]\ndatabase = "{postgres_url}"\n{ROUTED}'
    refused(start(tmp_path, config), "meterline migrate")
    done = run(tmp_path, "migrate")
    assert done.returncode == 0, done.stderr
    with serve(tmp_path, config=config) as served:
        assert ask(served).status_code == 200


@pytest.mark.parametrize("folder", ["in place of a file", "/proc/meterline"])
def test_data_folder_that_cannot_be_written(tmp_path: Path, folder: str) -> None:
    """A data folder that takes no files is found at start, not at the first request."""
    if not folder.startswith("/"):
        (tmp_path / "file").write_text("")
        folder = str(tmp_path / "file")
    done = start(tmp_path, f'[store]\ndata_dir = "{folder}"\n{ROUTED}')
    refused(done, folder, "data_dir")


def test_wrong_pepper(tmp_path: Path) -> None:
    """Keys made under another pepper would all be refused: say so at start."""
    with serve(tmp_path, config=ROUTED):
        pass
    pepper = tmp_path / "meterline-data" / "key-pepper"
    pepper.write_bytes(bytes(len(pepper.read_bytes())))
    refused(start(tmp_path, ROUTED), "pepper")


@pytest.mark.parametrize("where", ["backend", "admin key", "database"])
def test_missing_secret(tmp_path: Path, where: str) -> None:
    """A secret that is not in the environment is one line that names the variable."""
    config = {
        "backend": ROUTED
        + '[[backends]]\nname = "o"\nkind = "openai"\nbase_url = "https://x.example/v1"\n'
        'api_key = "env:NOT_THERE"\n',
        "admin key": f'[server]\nadmin_key = "env:NOT_THERE"\n{ROUTED}',
        "database": f'[store]\ndatabase = "env:NOT_THERE"\n{ROUTED}',
    }[where]
    refused(start(tmp_path, config), "NOT_THERE", "not set")


def test_two_gateways_share_a_folder(tmp_path: Path) -> None:
    """A second gateway on the same data folder takes a log of its own."""
    with serve(tmp_path, config=ROUTED) as first, serve(tmp_path, config=ROUTED) as second:
        for served in (first, second):
            answer = ask(served, key=first.key)
            assert answer.status_code == 200
    logs = sorted(path.name for path in (tmp_path / "meterline-data" / "wal").glob("gateway-*"))
    assert logs == ["gateway-0", "gateway-1"]


def ask(served: Served, model: str = "m", key: str | None = None) -> httpx.Response:
    """One small request."""
    return httpx.post(
        f"{served.base_url}/chat/completions",
        json={"model": model, "messages": [{"role": "user", "content": "hi"}]},
        headers={"authorization": f"Bearer {key or served.key}"},
        timeout=20,
    )


# --- while it runs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One gateway for the tests of reloading."""
    with serve(tmp_path_factory.mktemp("served"), config=ROUTED) as running:
        yield running


def write(served: Served, config: str) -> None:
    """Replace the file at once, as editors and config management do."""
    draft = served.folder / "draft"
    draft.write_text(config)
    draft.replace(served.folder / "meterline.toml")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def another(model: str) -> str:
    return f'[[routes]]\nmodel = "{model}"\ntargets = [{{ backend = "s" }}]\n'


def test_reload_by_file_change(served: Served) -> None:
    """A changed file is taken up without a restart."""
    assert ask(served, "by-change").status_code == 404
    write(served, ROUTED + another("by-change"))
    wait_for(lambda: ask(served, "by-change").status_code == 200)


def test_reload_by_signal(served: Served) -> None:
    """SIGHUP reads the file at once."""
    before = served.output.count("config_reloaded")
    write(served, ROUTED + another("by-signal"))
    served.process.send_signal(signal.SIGHUP)
    wait_for(lambda: served.output.count("config_reloaded") > before)
    assert ask(served, "by-signal").status_code == 200


def test_bad_file_keeps_the_old_one(served: Served) -> None:
    """A bad file changes nothing, and each of its problems is a line in the log."""
    write(served, ROUTED + another("kept"))
    wait_for(lambda: ask(served, "kept").status_code == 200)
    write(
        served, ROUTED + '[server]\nprt = 1\n[telemetry]\nsampling = 7\n[[backends]]\nname = "x"\n'
    )
    wait_for(lambda: served.output.count("config_rejected") >= 3)
    for path in ("server.prt", "telemetry.sampling", "backends[1].kind"):
        assert path in served.output
    assert ask(served, "kept").status_code == 200
    metrics = httpx.get(served.base_url.removesuffix("/v1") + "/metrics").text
    assert re.search(r'meterline_config_reloads_total\{result="rejected"\} [1-9]', metrics)


def test_what_needs_a_restart_is_refused(served: Served) -> None:
    """A table that only a restart can change is refused by name, and the rest of the file too."""
    write(served, "[server]\nmax_body_mb = 2\n" + ROUTED + another("cold"))
    wait_for(lambda: "server: a change here needs a restart" in served.output)
    assert ask(served, "cold").status_code == 404
    assert ask(served, "m").status_code == 200


# --- what commands say ------------------------------------------------------------------------


def test_check(tmp_path: Path) -> None:
    """`check` prints the effective config, or every problem, and no secret."""
    url = "postgresql+asyncpg://me:canary-password@db/x"
    (tmp_path / "good.toml").write_text(f'[store]\ndatabase = "{url}"\n{ROUTED}')
    good = run(tmp_path, "check", "good.toml")
    assert good.returncode == 0, good.stderr
    assert 'routes[0].model = "m"' in good.stdout.splitlines()
    assert "canary-password" not in good.stdout
    (tmp_path / "bad.toml").write_text(ROUTED + "[server]\nport = 70000\nhots = 1\n")
    bad = run(tmp_path, "check", "bad.toml")
    assert bad.returncode == 2
    assert sorted(line.split(":")[0] for line in bad.stderr.splitlines()) == [
        "server.hots",
        "server.port",
    ]
    missing = run(tmp_path, "check", "none.toml")
    assert missing.returncode == 2
    assert len(missing.stderr.splitlines()) == 1


# `engine serve` is another program's help: tested there.
SUBCOMMANDS = {
    "tenant": ("create", "list", "show", "suspend", "delete"),
    "key": ("create", "list", "rotate", "revoke"),
    "report": ("chargeback",),
}


def test_every_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` of each command and subcommand shows a line that can be typed."""
    from gateway.__main__ import run as command

    calls = [[]] + [[name] for name in COMMANDS]
    calls += [[name, sub] for name, subs in SUBCOMMANDS.items() for sub in subs]
    for call in calls:
        with pytest.raises(SystemExit) as ended:
            command([*call, "--help"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert "Example:" in shown, call
        assert " ".join(["meterline", *call]) in shown, call


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_model_that_cannot_be_loaded(tmp_path: Path, fault: str) -> None:
    """A missing or truncated model file is one line that names it, before there is a database."""
    model = tmp_path / "model.gguf"
    if fault == "damaged":
        model.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    config = (
        f'[[engines]]\nname = "own"\nmodel = "{model}"\n'
        '[[routes]]\nmodel = "m"\ntargets = [{ backend = "own" }]\n'
    )
    refused(start(tmp_path, config), "engine own", "model.gguf")
    assert not (tmp_path / "meterline-data" / "meterline.db").exists()
