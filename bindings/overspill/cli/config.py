"""The keys of a configuration file: their reference, their JSON schema, or what a file says.

Without an argument it prints the reference (docs/configuration.md). With FILE, which may be DeepSpeed's JSON, it prints
the configuration that the file becomes. If something in it is wrong, it names each key with its value and what would be
right; the exit status is 1 then.
"""

import argparse
import json
import sys
import warnings

from overspill.cli.common import path_of


def options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("file", nargs="?", type=path_of, metavar="FILE", help="a configuration file to check")
    what.add_argument("--schema", action="store_true", help="print the JSON schema, for editors")
    what.add_argument(
        "--deepspeed", action="store_true", help="print what each key of DeepSpeed's JSON is here, as a table"
    )


def run(args: argparse.Namespace) -> int:
    from overspill import schema
    from overspill.config import Config
    from overspill.deepspeed import keys

    if args.file is not None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            config = Config.read(args.file)
        for each in said:
            print(each.message, file=sys.stderr)
        made = config.model_dump(mode="json", exclude_unset=True)
        made["budget"] = made.get("budget", {}) | {"host": config.budget.host}
        print(json.dumps(made, indent=2))
    elif args.deepspeed:
        print(keys.reference(), end="")
    elif args.schema:
        print(json.dumps(schema.json_schema(), indent=2))
    else:
        print(schema.reference(), end="")
    return 0
