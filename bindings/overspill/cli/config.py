"""The keys of a configuration file: their reference, their JSON schema, or whether a file is right.

Without an argument it prints the reference (docs/configuration.md). With FILE it names what is wrong in it: each key
with its value and what would be right; the exit status is 1 then.
"""

import argparse
import json

from overspill.cli.common import path_of


def options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("file", nargs="?", type=path_of, metavar="FILE", help="a configuration file to check")
    what.add_argument("--schema", action="store_true", help="print the JSON schema, for editors")


def run(args: argparse.Namespace) -> int:
    from overspill import schema
    from overspill.config import Config

    if args.file is not None:
        Config.read(args.file)
        print(f"{args.file}: right")
    elif args.schema:
        print(json.dumps(schema.json_schema(), indent=2))
    else:
        print(schema.reference(), end="")
    return 0
