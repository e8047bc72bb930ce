"""How the actions of `overspill checkpoint` end; checkpoints that are damaged, and those that are whole. Reads and
changes the index of a checkpoint by itself (its form: engine/checkpoint/index_file.h)."""

import json
import struct
from pathlib import Path

from overspill import tensor_file
from overspill.cli import main

_HEAD, _PIECE = struct.Struct("<8sQQQQ"), struct.Struct("<IIQqqqq")
_FIELDS = ("unit", "component", "file", "begin", "elements", "offset", "bytes")


def manifest_of(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "manifest.json").read_bytes())


def pieces_of(checkpoint: Path) -> list[dict]:
    """Of all ranks; `file` is a name."""
    found = []
    for index in manifest_of(checkpoint)["indexes"]:
        names, pieces, _ = _taken_apart((checkpoint / index["file"]).read_bytes())
        found += [piece | {"file": names[piece["file"]]} for piece in pieces]
    return found


def change_manifest(checkpoint: Path, change) -> None:
    """A manifest with a checksum that is right, by whoever wants to harm."""
    path = checkpoint / "manifest.json"
    values = json.loads(path.read_bytes())
    change(values)
    values["checksum"] = "0" * 16
    memory = bytearray(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())
    begin = memory.index(b"0" * 16)
    memory[begin : begin + 16] = tensor_file._checksum(memoryview(memory)).encode()
    path.unlink()
    path.write_bytes(memory)


def change_piece(checkpoint: Path, change) -> None:
    """The same of the first piece of the only index, a dict with the file's name."""
    path = checkpoint / "index.bin"
    names, pieces, checksums = _taken_apart(path.read_bytes())
    first = pieces[0] | {"file": names[pieces[0]["file"]]}
    change(first)
    pieces[0] = first | {"file": len(names)}
    names.append(first["file"])
    text = b"".join(struct.pack("<H", len(name)) + name.encode() for name in names)
    text += bytes(-len(text) % 8)
    head = _HEAD.pack(b"OVSPIDX1", len(names), len(text), len(pieces), len(checksums) // 8)
    data = head + text + b"".join(_PIECE.pack(*(p[f] for f in _FIELDS)) for p in pieces) + checksums
    path.unlink()
    path.write_bytes(data)
    digest = tensor_file._checksum(memoryview(bytearray(data)))
    change_manifest(checkpoint, lambda values: values["indexes"][0].update(bytes=len(data), checksum=digest))


def _taken_apart(data: bytes) -> tuple[list[str], list[dict], bytes]:
    _, files, text, count, _ = _HEAD.unpack_from(data)
    names, at = [], _HEAD.size
    for _ in range(files):
        (length,) = struct.unpack_from("<H", data, at)
        names.append(data[at + 2 : at + 2 + length].decode())
        at += 2 + length
    begin = _HEAD.size + text
    end = begin + count * _PIECE.size
    pieces = [dict(zip(_FIELDS, values, strict=True)) for values in _PIECE.iter_unpack(data[begin:end])]
    return names, pieces, data[end:]


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
    victim = max(
        (p for p in checkpoint.glob("*.bin") if "index" not in p.name), key=lambda p: p.stat().st_size
    )
    at = next(p["offset"] for p in pieces_of(checkpoint) if p["file"] == victim.name)
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
