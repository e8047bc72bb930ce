"""Measure how well a model predicts texts: perplexity, and bits a byte.

Perplexity is exp of the mean of -log p over the tokens; lower is better. A text is cut into windows; each is read by
itself, and its first token is not counted. With --against, a second model reads the same texts after the first, for
instance the one before training: both, and how far one is from the other, are printed. Perplexities of models with
different tokenizers are no measures of one thing; bits a byte can be compared.

examples:
  overspill evaluate --model ./tuned --text heldout.txt
  overspill evaluate --model ./tuned --against ./smollm2 --text heldout.txt other.txt --window 1024
  overspill evaluate --model ./large --budget 1200MiB --text heldout.txt --json
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overspill.cli.common import CliError, add_json, model_folder, path_of, two_or_more
from overspill.cli.running import add_form, add_model, foretell, naming, open_model

if TYPE_CHECKING:
    from overspill.perplexity import Measure


def options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--text", type=path_of, required=True, nargs="+", metavar="FILE", help="texts in UTF-8, each a file"
    )
    add_form(parser)
    parser.add_argument(
        "--against", type=path_of, metavar="DIR", help="a second model, e.g. the one before training"
    )
    parser.add_argument(
        "--window",
        type=two_or_more,
        metavar="N",
        help="tokens read together (default: 2048, or the model's context where that is less)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from overspill.data import whole_text

    texts = {str(path): whole_text(path) for path in args.text}
    folders = [model_folder(folder) for folder in (args.model, args.against) if folder is not None]
    tokenizers, found = [], []
    for folder in folders:
        vocabulary, of_model = _evaluate(folder, texts, args)
        tokenizers.append(vocabulary)
        found.append(of_model)
    same = all(vocabulary == tokenizers[0] for vocabulary in tokenizers)
    if args.json:
        print(json.dumps({"models": found, "same_tokenizer": same}))
    else:
        _print(found, list(texts), same)
    return 0


def _evaluate(
    folder: Path, texts: dict[str, str], args: argparse.Namespace
) -> tuple[dict[str, int], dict[str, Any]]:
    """The tokenizer's vocabulary, and what is printed of one model, which is let go at the end."""
    from overspill import perplexity

    model = open_model(folder, args, args.window or perplexity.WINDOW)
    window = args.window or min(model.context, perplexity.WINDOW)
    if model.has_position_table and window > model.context:
        raise CliError(
            f"--window {window} is more than the {model.context} positions of --model {folder}, which has a table "
            "of them"
        )
    foretell(model, args, min(window, perplexity.PASS))
    encoded = {}
    for name, text in texts.items():
        with naming(name):
            encoded[name] = perplexity.Text(model, text)
    total = sum(len(text.ids) for text in encoded.values())
    each = []
    with _Progress(str(folder), total) as progress:
        for name, text in encoded.items():
            measured = perplexity.Measure()
            with naming(f"--model {folder}, {name}"):
                for more in perplexity.measure(model, text, window):
                    measured += more
                    progress(more.tokens)
            each.append(measured)
    figures = {
        "model": str(folder),
        "window": window,
        "seconds": progress.seconds,
        "texts": [{"text": name, **_figures(m)} for name, m in zip(encoded, each)],
        "all": _figures(sum(each[1:], each[0])),
    }
    return model.tokenizer.get_vocab(), figures


def _figures(measured: "Measure") -> dict[str, Any]:
    return {
        "tokens": measured.tokens,
        "bytes": measured.bytes,
        "loss": measured.nats / measured.tokens,
        "perplexity": measured.perplexity,
        "bits_a_byte": measured.bits_a_byte,
    }


def _print(found: list[dict[str, Any]], names: list[str], same_tokenizer: bool) -> None:
    for one in found:
        print(f"{one['model']}: windows of {one['window']} tokens, {one['seconds']:.1f} s")
        for text in one["texts"]:
            print(f"  {_line(text)}  {text['text']}")
        if len(names) > 1:
            print(f"  {_line(one['all'])}  all {len(names)} texts")
    if len(found) == 2:
        ours, theirs = (one["all"] for one in found)
        print(f"{found[0]['model']} beside {found[1]['model']}: {_beside(ours, theirs, same_tokenizer)}")


def _line(figures: dict[str, Any]) -> str:
    bits = figures["bits_a_byte"]
    return (
        f"perplexity {figures['perplexity']:.4f}  loss {figures['loss']:.4f}  "
        f"{'bits a byte unknown' if bits is None else f'{bits:.4f} bits a byte'}  {figures['tokens']} tokens"
    )


def _beside(ours: dict[str, Any], theirs: dict[str, Any], same_tokenizer: bool) -> str:
    parts = []
    if same_tokenizer:
        difference = ours["loss"] - theirs["loss"]
        parts.append(f"perplexity {math.exp(difference):.4f} times, loss {difference:+.4f}")
    else:
        parts.append("the tokenizers differ, so that perplexities say nothing of each other")
    if ours["bits_a_byte"] is not None and theirs["bits_a_byte"] is not None:
        parts.append(f"bits a byte {ours['bits_a_byte'] - theirs['bits_a_byte']:+.4f}")
    return ", ".join(parts)


class _Progress:
    """A line on stderr that is written over, where that is a terminal. Call it with the tokens that were read."""

    def __init__(self, name: str, total: int):
        self._name, self._total, self._done = name, total, 0
        self._shown, self._started = 0.0, time.monotonic()
        self._print: Callable[[str], None] = (lambda text: None) if not sys.stderr.isatty() else _overwrite
        self.seconds = 0.0

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._print("")

    def __call__(self, tokens: int) -> None:
        now = time.monotonic()
        self._done, self.seconds = self._done + tokens, now - self._started
        if now - self._shown > 0.1:
            self._shown = now
            speed = self._done / self.seconds if self.seconds else 0.0
            left = f", {(self._total - self._done) / speed:.0f} s left" if speed else ""
            self._print(f"{self._name}: {self._done} of {self._total} tokens, {speed:.0f} tokens/s{left}")


def _overwrite(text: str) -> None:
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
