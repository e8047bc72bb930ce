"""Write text with a Hugging Face model on the CPU.

The text is printed as it is made. Temperature 0 takes the likeliest token each time. A model of a family that
overspill.inference does not know is run by transformers, which a line on stderr says.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from overspill.cli import fits
from overspill.cli.common import (
    CliError,
    load_tokenizer,
    model_folder,
    nonnegative,
    positive,
    quiet_transformers,
    seed,
)
from overspill.cli.output import harmless, warn
from overspill.cli.running import add_form, add_model, foretell, load


def options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    add_form(parser)
    parser.add_argument(
        "--max-new-tokens", type=positive, default=64, metavar="N", help="at most so many tokens (default 64)"
    )
    parser.add_argument(
        "--temperature", type=nonnegative, default=0.0, metavar="T",
        help="0 takes the likeliest token each time (default 0)",
    )  # fmt: skip
    parser.add_argument("--seed", type=seed, default=0, help="of the tokens that are drawn (default 0)")


def run(args: argparse.Namespace) -> int:
    folder = model_folder(args.model)
    quiet_transformers()
    from overspill import inference

    tokenizer = load_tokenizer(folder)
    ids = _ids(tokenizer, args.prompt)
    try:
        # The last token is drawn and never read.
        model = load(folder, args, len(ids) + args.max_new_tokens - 1)
    except inference.UnknownModel as reason:
        for name in ("budget", "weights", "cache"):
            if getattr(args, name) is not None:
                raise CliError(f"--{name} is for the models of overspill.inference, and {reason}") from None
        warn(f"overspill: --model {folder} is run by transformers, because {reason}")
        return _by_transformers(folder, tokenizer, ids, args)
    foretell(model, args)
    count = model.context if model.has_position_table else None
    fits.check_ids(tokenizer, ids, model.vocabulary, count, args.max_new_tokens, str(folder))
    written = model.tokens(
        ids, max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed
    )
    for piece in inference.Text(tokenizer).pieces(itertools.chain(ids, written)):
        print(harmless(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    print(flush=True)
    return 0


def _by_transformers(folder: Path, tokenizer: Any, ids: list[int], args: argparse.Namespace) -> int:
    import torch
    from transformers import AutoModelForCausalLM, TextStreamer

    inputs = torch.tensor([ids])
    model = _model(AutoModelForCausalLM, folder)
    fits.check_prompt(model, tokenizer, inputs, args.max_new_tokens, str(folder))
    torch.manual_seed(args.seed)
    sampling = (
        {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    )
    model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        **sampling,
        max_new_tokens=args.max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
    )
    sys.stdout.flush()
    return 0


def _ids(tokenizer: Any, prompt: str) -> list[int]:
    """The prompt's tokens. Raises CliError where it has none."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise CliError(f"--prompt {prompt!r} is not UTF-8; give it in UTF-8") from None
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not ids:
        begin = f", e.g. {tokenizer.bos_token!r}, with which its texts begin" if tokenizer.bos_token else ""
        raise CliError(f"--prompt {prompt!r} has no tokens to go on from; give a text that has some{begin}")
    return ids


def _model(kind, folder: Path):
    """Raises CliError for weights that are missing: transformers would draw them at random; CheckpointError for those
    that it would leave out, and for damaged files."""
    from overspill.pretrained import Folder, refuse_strangers, some

    stored = Folder(folder)
    stored.check_counts()
    try:
        with stored.bounded_modules():
            model, found = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    except Exception as error:  # whatever transformers raises for a folder that is wrong
        raise CliError(f"--model {folder} cannot be opened: {' '.join(str(error).split())[:300]}") from error
    if found["missing_keys"]:
        raise CliError(
            f"--model {folder} lacks {some(sorted(found['missing_keys']))}, wanted by {type(model).__name__}, and "
            "random values would stand in for them; merge or fetch it again"
        )
    refuse_strangers(f"--model {folder}", model, sorted(found["unexpected_keys"]), [])
    return model.eval()
