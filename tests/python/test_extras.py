"""Packages that are not required: without one, what does not use it works, and what does says how to install it."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tiny

from overspill import extras
from overspill.cli import display

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = ("transformers", "tokenizers", "rich", "shtab", "matplotlib", "uvicorn", "starlette")
IN_TREE = {"overspill", "overspill_command", "bindings"}


def without(packages, program, *arguments, cwd):
    """Runs a program in a process that has none of the packages."""
    bindings = str(ROOT / "bindings")
    blocked = (
        f"import sys; sys.modules.update(dict.fromkeys({packages!r})); sys.path.insert(0, {bindings!r})\n"
    )
    command = [sys.executable, "-c", blocked + program, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


COMMAND = "from overspill.cli import main; sys.exit(main(sys.argv[1:]))"


def test_a_script_trains_and_saves_without_any_of_them(tmp_path):
    program = """
import torch, overspill
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16()
engine = overspill.initialize(model, {"budget": {"host": "16MiB"}})[0]
for _ in range(2):
    engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
    engine.step()
engine.save_checkpoint("saved")
print(engine.last_step.skipped, [name for name in sys.argv[1:] if sys.modules.get(name)])
"""
    done = without(OPTIONAL, program, *OPTIONAL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False []\n"
    # Nor does it need them where they are there: whoever imports overspill does not wait for transformers.
    done = without((), program, *OPTIONAL, cwd=tmp_path / "saved")
    assert done.stdout == "False []\n", done.stderr


def test_doctor_and_verify_need_none_of_them(on_disk, tmp_path, capsys):
    on_disk.ok(capsys, *on_disk.run(tmp_path / "run", steps=1))
    for arguments in (["doctor"], ["verify", tmp_path / "run/checkpoints/step-000001"]):
        done = without(OPTIONAL, COMMAND, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["plan", "train", "generate", "chat", "evaluate", "serve"])
def test_a_command_that_needs_transformers_says_how_to_install_it(on_disk, tmp_path, command):
    arguments = {
        "plan": ["plan", "--model", on_disk.model, "--host-budget", "64MiB"],
        "train": on_disk.run(tmp_path / "run"),
        "generate": ["generate", "--model", on_disk.model, "--prompt", "a"],
        "chat": ["chat", "--model", on_disk.model],
        "evaluate": ["evaluate", "--model", on_disk.model, "--text", on_disk.texts / "0.txt"],
        "serve": ["serve", "--model", on_disk.model, "--port", 0],
    }[command]
    done = without(("transformers",), COMMAND, *arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'overspill[hf]'" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "run").exists()


def test_serve_says_how_to_install_what_it_needs(on_disk, tmp_path):
    for package in ("uvicorn", "starlette"):
        done = without((package,), COMMAND, "serve", "--model", on_disk.model, "--port", 0, cwd=tmp_path)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
        assert f"needs the package {package}" in done.stderr and "'overspill[serve]'" in done.stderr


@pytest.mark.parametrize("module, extra", [("transformers", "hf"), ("lightning", "lightning")])
def test_a_framework_that_is_missing_is_named(tmp_path, module, extra):
    done = without((module,), f"import overspill\nimport overspill.{module}", cwd=tmp_path)
    assert done.returncode == 1
    assert f"MissingExtra: overspill: this needs the package {module}" in done.stderr
    assert f"pip install 'overspill[{extra}]'" in done.stderr


def test_a_run_without_matplotlib_is_whole_but_for_its_picture(on_disk, tmp_path):
    done = without(("matplotlib",), COMMAND, *on_disk.run(tmp_path / "run", steps=2), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "plot.png was not written" in done.stderr and "pip install 'overspill[plot]'" in done.stderr
    assert "\nplot " not in done.stdout and "checkpoint " in done.stdout
    assert len(tiny.log(tmp_path / "run")) == 2


def test_a_terminal_without_rich_gets_lines(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with display.Display(0, 2) as shown:
        shown.say("a line")
    said, line = capsys.readouterr().out.splitlines()
    assert "pip install 'overspill[cli]'" in said and line == "a line"


def test_an_error_of_the_package_itself_is_not_hidden(monkeypatch, tmp_path):
    (tmp_path / "matplotlib.py").write_text("import something_that_is_missing\n")
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_that_is_missing") as error:
        extras.need("matplotlib")
    assert not isinstance(error.value, extras.MissingExtra)


def named(requirement):
    return requirement.split("[")[0].split(">")[0].split("=")[0].split("<")[0].strip().lower()


def test_the_extras_of_the_project_bring_the_packages():
    for package, extra in extras.EXTRAS.items():
        assert package in map(named, PROJECT["optional-dependencies"][extra])


def test_a_package_that_is_not_required_is_imported_inside_functions_alone():
    """But for modules that a command imports when it has looked for what they need: the server's, and top's picture."""
    required = set(map(named, PROJECT["dependencies"])) | IN_TREE | sys.stdlib_module_names
    looked_for = (ROOT / "bindings/overspill/serving", ROOT / "bindings/overspill/cli/top_frame.py")
    for path in sorted((ROOT / "bindings").rglob("*.py")):
        if path in looked_for or path.parent in looked_for:
            continue
        tree = ast.parse(path.read_text())
        for node in tree.body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            strangers = {name.partition(".")[0] for name in names} - required
            assert not strangers, f"{path.relative_to(ROOT)}: {strangers}"
