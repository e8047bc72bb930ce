"""Runs a script that was written for DeepSpeed, unchanged, with Overspill.

    python -m overspill.deepspeed train.py --deepspeed_config ds_config.json
    torchrun --nproc-per-node 2 -m overspill.deepspeed train.py
    python -m overspill.deepspeed -m package.train --its-options

Inside the script, and in transformers and accelerate, `import deepspeed` gives Overspill.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from .finder import install


def main(arguments: list[str]) -> int:
    """The script's exit status is its own."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    is_module = arguments[0] == "-m"
    if is_module and len(arguments) < 2:
        print("overspill.deepspeed: -m needs the name of a module", file=sys.stderr)
        return 2
    script, *rest = arguments[is_module:]
    if not is_module and not Path(script).is_file():
        print(f"overspill.deepspeed: {script} is no file: give the script to run", file=sys.stderr)
        return 2
    install()
    sys.argv = [script, *rest]
    if is_module:
        sys.path[0] = ""
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
