"""`python -m backends.engine`: argument parsing only, the work is in `serve.py`.

Also the command behind `meterline engine serve`, and what the gateway starts as its child.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from backends.engine.serve import Listen, Telemetry, serve
from backends.settings import EngineModel, EngineSettings
from telemetry.logs import LogFormat


@click.command(
    "serve",
    epilog="Example: meterline engine serve --model smollm2-135m-instruct --port 8090",
    context_settings={"show_default": True},
)
@click.option("--name", default="engine", help="Name of this engine, as routes know it.")
@click.option(
    "--model",
    default="smollm2-135m-instruct",
    help="The bundled model, a GGUF file, or a folder with safetensors.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=8090, type=click.IntRange(0, 65535), help="Port; 0: any free one.")
@click.option("--uds", type=click.Path(path_type=Path), help="Unix socket, instead of host, port.")
@click.option("--device", default="auto", type=click.Choice(["auto", "cpu", "cuda"]))
@click.option(
    "--dtype", default="auto", type=click.Choice(["auto", "float32", "float16", "bfloat16"])
)
@click.option(
    "--weights", default="file", type=click.Choice(["file", "int8", "int4"]),
    help="Keep weights as the file has them, or round them to fewer bits.",
)  # fmt: skip
@click.option("--kernels", default="auto", type=click.Choice(["auto", "native", "torch"]))
@click.option("--prefix-cache/--no-prefix-cache", default=True, help="Reuse computed prompts.")
@click.option(
    "--kv-memory-gb", default=0.5, type=click.FloatRange(min=0, min_open=True),
    help="Memory of the KV block pool, gigabytes.",
)  # fmt: skip
@click.option(
    "--swap-memory-gb", default=0.25, type=click.FloatRange(min=0),
    help="Memory for KV blocks of preempted sequences, gigabytes, taken when needed.",
)  # fmt: skip
@click.option(
    "--swap-file-gb", default=0.0, type=click.FloatRange(min=0),
    help="The same in a file, once that memory is full; 0: no file.",
)  # fmt: skip
@click.option("--swap-folder", help="Folder of that file, which has no name there.")
@click.option(
    "--max-batch-size", default=16, type=click.IntRange(1, 512), help="Sequences in a step."
)
@click.option(
    "--max-batch-tokens", default=512, type=click.IntRange(min=64), help="New tokens in a step."
)
@click.option(
    "--step-target-s", default=0.25, type=click.FloatRange(min=0, min_open=True),
    help="Seconds that a step should take while answers are being generated.",
)  # fmt: skip
@click.option(
    "--speculative", default="prompt_lookup",
    type=click.Choice(["off", "prompt_lookup", "draft_model"]),
    help="Guess tokens ahead and check them in one step; the text stays the same.",
)  # fmt: skip
@click.option(
    "--draft-tokens", default=6, type=click.IntRange(1, 16),
    help="Guesses in a step at most.",
)  # fmt: skip
@click.option("--draft-model", help="A second model with the same vocabulary, for draft_model.")
@click.option(
    "--draft-dtype", default="auto", type=click.Choice(["auto", "float32", "float16"]),
    help="As --dtype, of the draft model.",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; default: physical cores.")
@click.option(
    "--tool-calls", default="auto", help="How the model writes tool calls; auto: by its template.",
    type=click.Choice(["auto", "hermes", "llama3_json", "mistral", "pythonic"]),
)  # fmt: skip
@click.option(
    "--also", multiple=True, metavar="JSON",
    help='A further model: {"name": …, "model": …}, as a table [[engines.models]]. Repeatable.',
)  # fmt: skip
@click.option(
    "--when-asleep", default="refuse", type=click.Choice(["refuse", "wake"]),
    help="What a request for a sleeping model gets: 503, or the model.",
)  # fmt: skip
@click.option("--drain-s", default=30.0, help="Seconds that running requests get at SIGTERM.")
@click.option(
    "--exit-with-parent", is_flag=True, help="End when the process that started this one ends."
)
@click.option("--otlp-endpoint", help="Send spans to this OTLP/HTTP collector.")
@click.option(
    "--spans-file", type=click.Path(path_type=Path, dir_okay=False),
    help="Append spans to this file, if there is no collector.",
)  # fmt: skip
@click.option("--service-name", default="meterline-engine", help="OpenTelemetry service.name.")
@click.option(
    "--log-format", default="auto", type=click.Choice(["auto", "json", "console"]),
    help="auto: for people on a terminal, JSON elsewhere.",
)  # fmt: skip
@click.option("--vllm-metrics", is_flag=True, help="Add metrics under the names vLLM gives them.")
def main(
    host: str,
    port: int,
    uds: Path | None,
    drain_s: float,
    exit_with_parent: bool,
    otlp_endpoint: str | None,
    spans_file: Path | None,
    service_name: str,
    log_format: LogFormat,
    vllm_metrics: bool,
    **settings: object,
) -> None:
    """Serve one model, or several, over the OpenAI API."""
    try:
        given = settings_of(settings)
    except msgspec.DecodeError as error:
        sys.stderr.write(f"meterline engine: {error}\n")
        sys.exit(2)
    status = serve(
        given,
        Listen(host=host, port=port, uds=uds),
        telemetry=Telemetry(
            otlp_endpoint=otlp_endpoint,
            spans_file=spans_file,
            service_name=service_name,
            log_format=log_format,
            vllm_metrics=vllm_metrics,
        ),
        on_ready=partial(_say, given.name),
        drain_s=drain_s,
        exit_with_parent=exit_with_parent,
    )
    sys.exit(status)


def settings_of(options: Mapping[str, Any]) -> EngineSettings:
    """Of the options with the names of settings. Raises msgspec.DecodeError."""
    more = [msgspec.json.decode(text, type=EngineModel) for text in options.get("also", ())]
    guesses = {
        field: options[option]
        for option, field in (
            ("speculative", "method"), ("draft_tokens", "max_tokens"),
            ("draft_model", "draft_model"), ("draft_dtype", "draft_dtype"),
        )
    }  # fmt: skip
    names = set(EngineSettings.__struct_fields__) - {"speculative"}
    table = {name: value for name, value in options.items() if name in names}
    return msgspec.convert({**table, "models": more, "speculative": guesses}, EngineSettings)


def _say(name: str, address: str) -> None:
    sys.stderr.write(f"meterline engine: {name} is ready at {address}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
