"""Answer requests over HTTP in OpenAI's form, and a page to talk to the model.

/v1/chat/completions, /v1/completions and /v1/models take what OpenAI's clients send (docs/serving.md has what is known,
what is ignored, and what is refused); / is a page, /health says whether the model answers. It listens on this machine
alone unless --host names another address. SIGTERM or Ctrl-C ends it when the answers that are being written have ended.

examples:
  overspill serve --model ./tuned
  overspill serve --model ./large --budget 1200MiB --texts 2 --positions 4096
  overspill serve --model ./tuned --host 0.0.0.0 --api-key-file key.txt
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from overspill.cli.common import CliError, natural, nonnegative, path_of, positive, size
from overspill.cli.output import warn
from overspill.cli.running import add_form, add_model, foretell, open_model
from overspill.extras import need

KEY = "OVERSPILL_API_KEY"
POSITIONS_A_TEXT = 2048
BUDGET_POSITIONS = 4096  # a budget keeps room for their cache from the start
SPARE_CONNECTIONS = 32  # for pages, health, and requests that are refused in words


def options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_form(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=natural, default=8080, metavar="N", help="0 is one that is free (default 8080)"
    )
    parser.add_argument(
        "--name", metavar="TEXT", help="what clients call the model (default: the folder's name)"
    )
    parser.add_argument(
        "--api-key-file",
        type=path_of,
        metavar="FILE",
        help=f"file with the key that clients have to send (default: the variable {KEY}; none is asked for where "
        "neither is set)",
    )
    parser.add_argument(
        "--texts", type=positive, default=8, metavar="N", help="answers written at once (default 8)"
    )
    parser.add_argument(
        "--waiting", type=natural, default=64, metavar="N", help="that wait beside them (default 64)"
    )
    parser.add_argument(
        "--positions",
        type=positive,
        metavar="N",
        help=f"tokens that all texts have together (default: {POSITIONS_A_TEXT} for each; with --budget "
        f"{BUDGET_POSITIONS} in all)",
    )
    parser.add_argument(
        "--max-tokens", type=positive, metavar="N", help="of an answer (default: as there is room)"
    )
    parser.add_argument(
        "--max-body", type=size, default=1 << 20, metavar="SIZE", help="of a request (default 1MiB)"
    )
    parser.add_argument(
        "--grace",
        type=nonnegative,
        default=30.0,
        metavar="SECONDS",
        help="how long answers may go on after SIGTERM (default 30)",
    )


def run(args: argparse.Namespace) -> int:
    need("uvicorn")
    need("starlette")
    from overspill import inference, sampling
    from overspill.serving import server
    from overspill.serving.app import App, Limits

    if args.port > 65535:
        raise CliError(f"--port {args.port}: a port is at most 65535")
    key = _key(args.api_key_file)
    listening = _listen(args.host, args.port)
    positions = args.positions or (args.texts * POSITIONS_A_TEXT if args.budget is None else BUDGET_POSITIONS)
    model = open_model(args.model, args, positions)
    foretell(model, args)
    if not getattr(model.tokenizer, "chat_template", None):
        warn(f"overspill: {args.model} has no chat template: /v1/completions alone will answer")
    limits = Limits(
        positions=min(model.context, positions),
        tokens=args.max_tokens or model.context,
        texts=args.texts,
        waiting=args.waiting,
        body_bytes=args.max_body,
    )
    local = server.is_loopback(args.host)
    with inference.Batch(model, texts=args.texts, positions=positions, waiting=args.waiting) as batch:
        app = App(
            model,
            batch,
            args.name or Path(args.model).resolve().name,
            limits,
            key=key,
            hosts=frozenset({"localhost", "127.0.0.1", "[::1]", _in_url(args.host)}) if local else None,
            sampling=sampling.of_folder(args.model),
        )
        if not local and key is None:
            warn(
                f"overspill: WARNING: everybody who reaches {args.host} can use this model: no API key is set "
                f"(--api-key-file, or the variable {KEY})"
            )
        port = listening.getsockname()[1]

        def ready() -> None:
            print(f"{args.model}: http://{_in_url(args.host)}:{port}", file=sys.stderr, flush=True)

        connections = args.texts + args.waiting + SPARE_CONNECTIONS
        received = server.serve(app, listening, connections, args.grace, ready)
    app.close()
    return 130 if received == signal.SIGINT else 0


def _key(file: Path | None) -> str | None:
    if file is None:
        key, place = os.environ.get(KEY), f"the variable {KEY}"
        if not key:
            return None
    else:
        key, place = file.read_text(encoding="utf-8").strip(), f"--api-key-file {file}"
    if not key or not key.isascii() or not key.isprintable() or " " in key:  # else no header can hold it
        raise CliError(f"{place}: a key is one line of ASCII without spaces")
    return key


def _listen(host: str, port: int) -> Any:
    """Before the model is read: a port that is taken is not worth the wait."""
    from overspill.serving import server

    try:
        return server.listen(host, port)
    except UnicodeError as error:  # of a name
        raise CliError(f"--host {host!a} is no name of this machine: {error}") from None
    except OSError as error:
        reason = os.strerror(error.errno) if (error.errno or 0) > 0 else error.strerror
        raise CliError(f"--host {host} --port {port}: {reason}; name others") from None


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
