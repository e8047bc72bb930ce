"""How the actions of `overspill checkpoint` end; checkpoints that are damaged, and those that are whole."""

import json

from overspill.cli import main


def ran(capsys, *arguments) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def ok(capsys, *arguments) -> str:
    code, out, err = ran(capsys, *arguments)
    assert code == 0, err
    return out


def fails(capsys, *arguments) -> str:
    code, _, err = ran(capsys, *arguments)
    assert code == 1 and "Traceback" not in err, err
    return err


def damage(checkpoint) -> None:
    """Flips a byte of what lies on the host, which every load reads."""
    victim = max((p for p in checkpoint.glob("*.bin")), key=lambda p: p.stat().st_size)
    pieces = [
        p for u in json.loads((checkpoint / "manifest.json").read_bytes())["units"] for p in u["pieces"]
    ]
    at = next(p["offset"] for p in pieces if p["file"] == victim.name)
    with victim.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def whole(path) -> bool:
    from overspill import CheckpointError, _core

    try:
        _core.verify(str(path), None)
    except CheckpointError:
        return False
    return True
