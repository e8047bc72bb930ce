"""`overspill plan` for a machine that is not here: what a step would take there, and what to buy next.

The rates are given, or measured here (--measure). The plan is the one that a run would make; the step is simulated by
the engine's own schedule (engine/plan/simulate.h).
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overspill.cli.common import OPTIMIZERS, CliError, parsed, path_of, positive, quiet_transformers, size
from overspill.cli.wear import DAY_SECONDS, TB
from overspill.estimate import Estimate, Gain, Load, Machine, Model
from overspill.memory import human

_MACHINE = ("host", "link", "disk", "tflops", "memory_speed", "network")
_OTHERS = (
    "parameters",
    "ranks",
    "per_machine",
    "sequences",
    "seq_len",
    "keep_layers",
    "measure",
    "table",
    "plot",
)
_NOT_HERE = (
    "nvme",
    "config",
    "device_budget",
    "host_budget",
    "vertical",
    "compile",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_targets",
    "frozen",
    "keep",
    "out",
    "dtype",
)


def rate(text: str) -> float:
    """argparse type of a speed."""
    from overspill.estimate import parse_rate

    return parsed(parse_rate, text)


def count(text: str) -> int:
    """argparse type of a number of parameters."""
    from overspill.estimate.models import parse_count

    return parsed(parse_count, text)


def above_zero(text: str) -> float:
    """argparse type of TFLOP/s."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0, such as 300")
    return number


def options(parser: argparse.ArgumentParser) -> None:
    """Of a machine that is not here."""
    group = parser.add_argument_group(
        "a machine that is not here",
        "Any of these options makes plan simulate a step; it then needs no weights. --device takes the memory of the "
        "GPU (24GiB); without it the model computes on the CPU. Speeds are in bytes a second (25GB/s), or in bits as "
        "networks are sold (200Gb/s).",
    )
    add = group.add_argument
    add("--parameters", type=count, metavar="N", help="in place of --model: 7B, 350M, 1.5T")
    add("--host", type=size, metavar="SIZE", help="memory of the machine, e.g. 128GiB")
    add(
        "--tflops",
        type=above_zero,
        metavar="X",
        help="that forward and backward reach on one GPU, or on the CPU; about half of what a data sheet says",
    )
    add("--link", type=rate, metavar="SPEED", help="between host and GPU, each way (default 25GB/s)")
    add(
        "--disk",
        type=rate,
        metavar="SPEED",
        help="of all disks, reads and writes together; without it states stay in memory",
    )
    add(
        "--memory-speed",
        type=rate,
        metavar="SPEED",
        help="of host memory, which bounds the update (default 100GB/s)",
    )
    add("--ranks", type=positive, metavar="N", help="GPUs, or processes on CPUs (default 1)")
    add(
        "--per-machine",
        type=positive,
        metavar="N",
        help="ranks that share a machine's memory, disks and network (default 1)",
    )
    add("--network", type=rate, metavar="SPEED", help="of a machine, each way")
    add("--sequences", type=positive, metavar="N", help="of a micro-batch on one rank (default 1)")
    add("--seq-len", type=positive, metavar="N", help="tokens of a sequence (default 2048)")
    add(
        "--keep-layers",
        action="store_true",
        help="forward keeps all that backward needs; by default each layer is computed again from its input",
    )
    add(
        "--measure",
        action="store_true",
        help="take what this machine does for what is not given; some seconds of training, and of the disk at --nvme",
    )
    add("--table", action="store_true", help="other budgets and numbers of ranks beside it")
    add("--plot", type=path_of, metavar="FILE", help="the same as a picture, .png or .svg")


def wanted(args: argparse.Namespace) -> bool:
    """Whether the options speak of a machine or a model that is not here."""
    return _typed(args) is not None


def run(args: argparse.Namespace) -> int:
    _check(args)
    quiet_transformers()
    machine = _machine(args)
    model = _model(args)
    load = Load(
        args.sequences or 1,
        args.seq_len or 2048,
        args.accumulate or 1,
        not args.keep_layers,
    )
    config = _config(args)
    ranks = args.ranks or 1
    try:
        found, better, rows = _estimates(args, model, machine, load, config, ranks)
    except ValueError as error:
        raise CliError(_as_options(str(error))) from None
    if args.plot:
        from overspill.estimate import picture

        picture.draw(rows, ranks, args.plot)
    if args.json:
        print(json.dumps(_as_json(model, machine, load, found, better, rows)))
    else:
        print("\n".join(_lines(args, model, machine, load, found, better)))
        if args.table:
            print("\n".join(_table(rows)))
        if args.plot:
            print(f"drawn: {args.plot}")
    return 0 if found.plan is not None else 1


Rows = dict[int, list[tuple[int, Estimate]]]  # by number of ranks: host memory of a rank, and the step


def _estimates(
    args: argparse.Namespace, model: Model, machine: Machine, load: Load, config: dict[str, Any], ranks: int
) -> tuple[Estimate, list[Gain], Rows]:
    from overspill.estimate import budgets, estimate, gains, rank_counts

    found = estimate(model, machine, load, config, ranks)
    better = gains(model, machine, load, config, ranks, found)
    rows: Rows = {}
    if args.table or args.plot:
        sizes = [machine.host_bytes * k // 4 for k in (1, 2, 4, 8, 16)]
        for number in rank_counts(ranks):
            print(f"\rsimulating {_count(number, 'rank')} ...", end="", file=sys.stderr, flush=True)
            rows[number] = budgets(model, machine, load, config, number, sizes)
        print("\r" + " " * 30 + "\r", end="", file=sys.stderr, flush=True)
    return found, better, rows


# ---- what was asked


def _check(args: argparse.Namespace) -> None:
    """Raises CliError for options that are of a machine that is here, and for what is missing."""
    typed = _typed(args) or "model"
    for name in _NOT_HERE:
        if getattr(args, name, None) is not None and not (name == "nvme" and args.measure):
            raise CliError(
                f"{_option(name)}: not together with {_option(typed)}, which is of a machine or a model that is "
                "not here: that one has --host, --device SIZE and --disk"
            )
    if (args.parameters is None) == (args.model is None):
        raise CliError(
            "give the model by --parameters 7B, or by --model with a config.json or a folder that has one"
        )
    if args.measure and len(args.nvme or []) > 1:
        raise CliError(
            "--nvme: --measure looks at one disk; name one folder, or give the speed of all by --disk"
        )
    if args.device not in (None, "host", "auto") and _device_bytes(args) is None:
        raise CliError(
            f"--device {args.device}: give the memory of the GPU that is not here, such as --device 24GiB"
        )
    if (args.ranks or 1) % (args.per_machine or 1):
        raise CliError(f"--ranks {args.ranks or 1} is no multiple of --per-machine {args.per_machine}")
    if args.plot and Path(args.plot).suffix not in (".png", ".svg"):
        raise CliError(f"--plot {args.plot}: give a name that ends in .png or .svg")
    ways = {
        "host": "the memory of the machine, such as 128GiB",
        "tflops": "what forward and backward reach, such as 300",
    }
    for name, way in ways.items():
        if getattr(args, name) is None and not args.measure:
            raise CliError(
                f"--{name} is missing: give {way}, or --measure, which takes what this machine does"
            )
    if args.tflops is None and _device_bytes(args):
        raise CliError(
            "--tflops is missing: --measure measures the CPU of this machine, not the GPU of --device"
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _typed(args: argparse.Namespace) -> str | None:
    """The first option that makes this a plan for a machine or a model that is not here; None: there is none."""
    for name in (*_MACHINE, *_OTHERS):
        if getattr(args, name, None) not in (None, False):
            return name
    if _device_bytes(args) is not None:
        return "device"
    return "model" if args.model is not None and Path(args.model).is_file() else None


def _device_bytes(args: argparse.Namespace) -> int | None:
    """Where --device is a size."""
    from overspill.config.values import parse_size

    try:
        return parse_size(args.device) if args.device and args.device[0].isdigit() else None
    except ValueError as error:
        raise CliError(f"--device {args.device}: {error}") from None


def _machine(args: argparse.Namespace) -> Machine:
    device = _device_bytes(args) or 0
    given = {
        "host_bytes": args.host,
        "flops_per_s": args.tflops and args.tflops * 1e12,
        "memory_bytes_per_s": args.memory_speed,
        "disk_bytes_per_s": args.disk,
    }
    values: dict[str, Any] = {"memory_bytes_per_s": 100e9}
    if args.measure:
        from overspill.estimate import measured

        print("measuring this machine ...", file=sys.stderr, flush=True)
        here = measured.machine((args.nvme or [Path.cwd()])[0])
        values = {
            name: getattr(here, name) for name in (*given, "disk_processor", "update_s", "intake_s", "use_s")
        }
        if args.memory_speed:
            values |= {"update_s": None, "intake_s": None}
    values |= {name: value for name, value in given.items() if value is not None}
    whole = Machine(
        **values,
        device_bytes=device,
        link_bytes_per_s=(args.link or 25e9) if device else 0,
        network_bytes_per_s=args.network or 0,
    )
    return whole.shared_by(args.per_machine or 1)


def _model(args: argparse.Namespace) -> Model:
    from overspill.estimate import of_config, of_count

    return of_count(args.parameters) if args.parameters else of_config(args.model)


def _config(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if args.optimizer:
        config["optimizer"] = dict(OPTIMIZERS[args.optimizer])
    if args.format:
        config["format"] = args.format
    return config


def _as_options(error: str) -> str:
    """What the core says, in words of these options."""
    lanes = {"read": "--disk", "write": "--disk", "network": "--network", "up": "--link", "down": "--link"}
    for lane, option in lanes.items():
        error = error.replace(
            f"the lane {lane}, which has no speed",
            f"{option}, which is missing: give its speed, such as 10GB/s",
        )
    error = error.replace("give a folder on NVMe (budget.nvme, --nvme)", "give a disk (--disk 6GB/s)")
    return error.replace("raise budget.device", "give a larger --device, or fewer --sequences")


# ---- what came out


def _lines(
    args: argparse.Namespace,
    model: Model,
    machine: Machine,
    load: Load,
    found: Estimate,
    better: list[Gain],
) -> list[str]:
    ranks = f"{_count(found.ranks, 'rank')}, " if found.ranks > 1 else ""
    lines = [
        f"{model.parameters / 1e9:.3g} billion parameters: {model.name}",
        f"a step: {ranks}{_count(load.micros, 'micro-batch')} of {load.tokens:,} tokens, layers "
        f"{'recomputed' if load.recomputed else 'kept'}; activations about {human(found.activations)}",
        f"a rank has {human(machine.host_bytes)} of host memory"
        + (
            f", {human(machine.device_bytes)} on the GPU, a link of {machine.link_bytes_per_s / 1e9:.3g} GB/s"
            if machine.device_bytes
            else ""
        )
        + (f", disks of {machine.disk_bytes_per_s / 1e9:.3g} GB/s" if machine.disk_bytes_per_s else "")
        + f", {machine.flops_per_s / 1e12:.3g} TFLOP/s",
    ]
    if found.plan is None:
        lines.append(f"it does not fit: {_as_options(found.why)}")
    else:
        lines += _of_step(args, found)
    lines.append(
        "what to buy next:" if better else "what to buy next: nothing that is twice as large or fast helps"
    )
    for gain in better:
        times = f", {found.step_s / gain.step.step_s:.2f} times as fast" if found.plan else ": it fits"
        lines.append(f"  {gain.what}{times}: {gain.step.step_s:.3g} s a step")
    return lines


def _of_step(args: argparse.Namespace, found: Estimate) -> list[str]:
    plan = found.plan
    assert plan is not None
    on_nvme = sum(plan.as_dict()[f"{kind}_nvme_bytes"] for kind in ("weights", "states", "gradients"))
    held = f"a rank holds {human(plan.host_bytes)} in host memory, {human(on_nvme)} on NVMe"
    if plan.device_bytes:
        held += f", {human(plan.device_bytes)} on the GPU"
    lines = [
        held
        + (
            f"; it reserves {human(plan.nvme_reserve_bytes)} of the disks, checkpoints included"
            if on_nvme
            else ""
        ),
        f"a step takes about {found.step_s:.3g} s: {_speed(found.tokens_per_s)} tokens/s; waits are "
        f"{found.waited_s / found.step_s:.0%} of it",
    ]
    busy = {lane: seconds for lane, seconds in (found.busy_s or {}).items() if seconds > 0}
    for lane, seconds in sorted(busy.items(), key=lambda item: -item[1]):
        share = min(1.0, seconds / found.step_s)
        lines.append(f"  {lane:8} {seconds:9.3g} s  {'#' * round(40 * share)}")
    written = (found.moved or {}).get("write", 0.0)
    if written:
        written *= args.per_machine or 1
        a_day = written / found.step_s * DAY_SECONDS
        said = f"the disks of a machine are written {written / TB:.3g} TB a step, {a_day / TB:.3g} TB a day"
        if args.endurance_tbw:
            said += f": {args.endurance_tbw * TB / a_day:.3g} days until {args.endurance_tbw:.4g} TB"
        lines.append(said)
    return lines


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('h') else 's'}"


def _table(rows: Rows) -> list[str]:
    sizes = [host for host, _ in next(iter(rows.values()))]
    lines = ["tokens/s of all ranks, by host memory of a rank:"]
    lines.append(f"  {'ranks':>6} " + "".join(f"{human(host):>14}" for host in sizes))
    for number, found in rows.items():
        cells = (_speed(step.tokens_per_s) if step.plan else "does not fit" for _, step in found)
        lines.append(f"  {number:>6} " + "".join(f"{cell:>14}" for cell in cells))
    return lines


def _as_json(
    model: Model, machine: Machine, load: Load, found: Estimate, better: list[Gain], rows: Rows
) -> Mapping[str, Any]:
    from dataclasses import asdict

    return {
        "parameters": model.parameters,
        "model": model.name,
        "machine": asdict(machine),
        "load": asdict(load),
        **found.as_dict(),
        "buy": [{"what": gain.what, "step_seconds": gain.step.step_s} for gain in better],
        "table": [
            {
                "ranks": number,
                "host_bytes": host,
                "fits": step.plan is not None,
                "tokens_per_second": step.tokens_per_s,
            }
            for number, found in rows.items()
            for host, step in found
        ],
    }
