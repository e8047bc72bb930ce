"""How the actions of `overspill checkpoint` end."""

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
