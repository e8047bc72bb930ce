"""Python programs in processes of their own, without the seconds that importing torch takes.

`Popen` and `run` are as those of `subprocess`, for commands that begin with sys.executable: a process that has imported
what most programs import, and has one thread, forks a child for each. The child is its caller's own, to wait for and to
kill. What differs from a new interpreter: modules are imported already, /proc/<pid>/environ and cmdline are the forking
process's, and memory is shared with it. Where a test is about these, it uses `subprocess`."""

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMPORTED = (
    "torch.distributed.run",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.encoder_decoder.configuration_encoder_decoder",
    "transformers.tokenization_utils_fast",
    "matplotlib.pyplot",
    "overspill.cli.generate",
    "overspill.cli.loop",
    "overspill.cli.merge",
    "overspill.cli.plot",
    "overspill.cli.recorder",
    "overspill.cli.saving",
    "overspill.cli.session",
    "overspill.data",
)
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_LENGTH = 8  # bytes of a message's length, which goes before it


class Popen(subprocess.Popen):
    """The command: [sys.executable, [-u,] SCRIPT | -m MODULE | -c CODE, arguments ...]."""

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group,
    ):  # fmt: skip
        assert args[0] == sys.executable, args
        assert (executable, preexec_fn, uid, gid, gids, umask, process_group) == (None,) * 5 + (-1, -1)
        assert close_fds and not pass_fds and not shell
        program = {
            "arguments": [os.fsdecode(argument) for argument in args[1:]],
            "folder": os.fspath(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "session": start_new_session,
        }
        files = [given if given != -1 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        self.pid = _server().start(program, files)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def run(command, *, input=None, capture_output=False, timeout=None, check=False, **options):
    """As subprocess.run."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    ended = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        ended.check_returncode()
    return ended


class _Server:
    """The process that forks, as its caller sees it."""

    def __init__(self, end: socket.socket):
        self._end, self._lock = end, threading.Lock()

    def start(self, program: dict, files: list[int]) -> int:
        """The child's process id."""
        text = json.dumps(program).encode()
        with self._lock, _Adopting():
            socket.send_fds(self._end, [len(text).to_bytes(_LENGTH, "little")], files)
            self._end.sendall(text)
            answer = self._end.recv(_LENGTH)
        assert answer, "the process that forks has ended"
        return int.from_bytes(answer, "little")


class _Adopting:
    """While it is entered, this process becomes the parent of its descendants that lose theirs."""

    def __enter__(self):
        self._set(1)

    def __exit__(self, *_):
        self._set(0)

    def _set(self, value: int) -> None:
        assert ctypes.CDLL(None).prctl(_SUBREAPER, value, 0, 0, 0) == 0


@functools.cache
def _server() -> _Server:
    own, its = socket.socketpair()
    paths = os.pathsep.join((str(HERE.parents[1] / "bindings"), str(HERE)))
    subprocess.Popen(
        [sys.executable, "-c", f"import warm; warm.serve({its.fileno()})"],
        env=os.environ
        | ONE_THREAD
        | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
    )
    its.close()
    return _Server(own)


# --- in the process that forks, and in its children -------------------------------------------------------------------


_paths: list[str] = []  # where modules are looked for, last


def serve(end: int) -> None:
    """Ends with the caller. A child ends as its program does."""
    _paths.extend(sys.path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("overspill.cli").parser()
    gc.freeze()  # else a child's collector writes to all memory that it shares
    _fork_for(socket.socket(fileno=end))


def _fork_for(end: socket.socket) -> None:
    while True:
        head, files, _, _ = socket.recv_fds(end, _LENGTH, 3)
        if not head:
            os._exit(0)
        text = _received(end, int.from_bytes(head, "little"))
        _assert_one_thread()
        told, tells = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child != 0:  # it ends, so that the caller becomes the child's parent
                os._exit(0)
            program = json.loads(text)
            if program["session"]:  # before its id is told: the caller may kill its group at once
                os.setsid()
            os.write(tells, os.getpid().to_bytes(_LENGTH, "little"))
            for handle in (told, tells):
                os.close(handle)
            end.close()
            _end(functools.partial(_become, program, files))
        os.waitpid(between, 0)
        end.sendall(os.read(told, _LENGTH))
        for handle in (told, tells, *files):
            os.close(handle)


def _assert_one_thread() -> None:
    assert len(os.listdir("/proc/self/task")) == 1, "a child of a process with threads may hang"


def _received(end: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = end.recv(count - len(found))
        if not part:
            os._exit(0)
        found += part
    return bytes(found)


def _end(program) -> None:
    """Runs it and ends as an interpreter does, but for the modules: to clear them costs more than most programs do.
    What it raises goes on to the interpreter itself."""
    code = 0
    try:
        program()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # of a reader that is gone
            stream.flush()
    os._exit(code & 0xFF)


def _become(program: dict, files: list[int]) -> None:
    import torch

    from overspill import fate

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for place, handle in enumerate(files):
        os.dup2(handle, place)
        os.close(handle)
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    arguments = list(program["arguments"])
    unbuffered = arguments[0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    del arguments[: arguments[0] == "-u"]
    sys.stdin, sys.stdout, sys.stderr = (_text(place, unbuffered) for place in range(3))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if ignored := os.environ.get("PYTHONWARNINGS"):
        warnings.simplefilter(ignored)
    ours = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [_first_path(arguments), *filter(None, ours.split(os.pathsep)), *filter(None, _paths)]
    fate._process = os.getpid()  # that of the import was another
    if arguments[:2] == ["-m", "torch.distributed.run"]:
        _fork_workers()
    _run(arguments)


def _text(place: int, unbuffered: bool) -> io.TextIOWrapper:
    errors = "backslashreplace" if place == 2 else "strict"
    stream = open(place, "wb" if place else "rb", closefd=False)  # noqa: SIM115
    lines = place == 2 or (place == 1 and (unbuffered or os.isatty(place)))
    return io.TextIOWrapper(stream, "utf-8", errors, line_buffering=lines)


def _first_path(arguments: list[str]) -> str:
    if arguments[0] == "-m":
        return str(Path.cwd())
    return "" if arguments[0] == "-c" else str(Path(arguments[0]).resolve().parent)


def _run(arguments: list[str]) -> None:
    """In the namespace of __main__, which stays, as that of an interpreter does."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        return runpy._run_module_as_main(arguments[1])
    main = sys.modules["__main__"].__dict__
    main.clear()
    main.update(__name__="__main__", __builtins__=builtins, __doc__=None, __package__=None, __spec__=None)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        return exec(compile(arguments[1], "<string>", "exec"), main)
    sys.argv = arguments
    main["__file__"] = arguments[0]
    return exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), main)


def _fork_workers() -> None:
    """torchrun's workers come from a process that forks, too: this one's child."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    own, its = socket.socketpair()
    _assert_one_thread()
    if os.fork() == 0:
        own.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _fork_for(its)
    its.close()
    server = _Server(own)
    globals()["_server"] = lambda: server
    subprocess_handler.Popen = Popen
