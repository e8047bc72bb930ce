"""base/mutex.h and tools/locks.py: what breaks the rules of a lock is found, in every file that the build compiles."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    shutil.which("clang++") is None, reason="no clang++: tools/setup --lint installs it"
)

ACCOUNT = """
#include <algorithm>

#include "base/mutex.h"
using namespace overspill;

class Account {
 public:
  void add(int value) EXCLUDES(mutex_);
  void look() EXCLUDES(mutex_);
  void order() EXCLUDES(before_, mutex_);
  void read() EXCLUDES(table_mutex_);

 private:
  void put(int value) REQUIRES(mutex_) { sum_ += value; }

  Mutex before_ ACQUIRED_BEFORE(mutex_);
  Mutex mutex_;
  Condition changed_;
  int sum_ GUARDED_BY(mutex_) = 0;
  SharedMutex table_mutex_;
  int table_ GUARDED_BY(table_mutex_) = 0;
};

void use(int);
"""

RIGHT = {
    "a block": "void Account::add(int value) { const MutexLock lock(mutex_); put(value); }",
    "given up and taken again": """void Account::look() {
      MutexLock lock(mutex_);
      const int sum = sum_;
      lock.unlock();
      use(sum);
      lock.lock();
      while (sum_ == sum) changed_.wait(mutex_);
    }""",
    "in order": """void Account::order() {
      const MutexLock first(before_);
      const MutexLock second(mutex_);
    }""",
    "many readers, one writer": """void Account::read() {
      { const ReaderLock lock(table_mutex_); use(table_); }
      const MutexLock lock(table_mutex_);
      ++table_;
    }""",
    "a lambda under the lock": """void Account::look() {
      const MutexLock lock(mutex_);
      std::for_each_n(&sum_, 1, [&](int) { mutex_.assume_held(); use(sum_); });
    }""",
}

# What Clang says, of a body that is wrong.
WRONG = {
    "reading variable 'sum_' requires holding mutex 'mutex_'": "void Account::look() { use(sum_); }",
    "calling function 'put' requires holding mutex 'mutex_'": "void Account::add(int value) { put(value); }",
    "mutex 'before_' must be acquired before 'mutex_'": """void Account::order() {
      const MutexLock second(mutex_);
      const MutexLock first(before_);
    }""",
    "cannot call function 'add' while mutex 'mutex_' is held": """void Account::look() {
      const MutexLock lock(mutex_);
      add(1);
    }""",
    "calling function 'wait' requires holding mutex 'mutex_'": """void Account::look() {
      changed_.wait(mutex_);
    }""",
    "writing variable 'table_' requires holding mutex 'table_mutex_' exclusively": """void Account::read() {
      const ReaderLock lock(table_mutex_);
      ++table_;
    }""",
    "writing variable 'sum_' requires holding mutex 'mutex_' exclusively": """void Account::look() {
      MutexLock lock(mutex_);
      lock.unlock();
      ++sum_;
    }""",
    "acquiring mutex 'mutex_' that is already held": """void Account::look() {
      const MutexLock lock(mutex_);
      const MutexLock again(mutex_);
    }""",
}

# Two parts of an engine that reach its one mutex by ways of their own.
PARTS = """
#include "engine/core/engine_mutex.h"
using namespace overspill;
using namespace overspill::engine;

struct Shared {
  Mutex& mutex() RETURN_CAPABILITY(engine_mutex) { return mutex_; }
  int sum GUARDED_BY(engine_mutex) = 0;
  Mutex mutex_;
};
struct Part {
  void wait() MAY_RELEASE(engine_mutex);
  Shared& shared;
};
struct Caller {
  void call() EXCLUDES(engine_mutex);
  Shared& of_its_own;
  Part& part;
};

void use(int);
"""

RIGHT_PARTS = {
    "one mutex, whichever way": """void Caller::call() {
      const MutexLock lock(of_its_own.mutex());
      part.wait();
    }""",
    "given up for a while": """void Part::wait() {
      ++shared.sum;
      { const Unlocked unlocked(shared.mutex()); use(0); }
      ++shared.sum;
    }""",
}
WRONG_PARTS = {
    "reading variable 'sum' requires holding mutex 'engine_mutex'": """void Part::wait() {
      const Unlocked unlocked(shared.mutex());
      use(shared.sum);
    }""",
    "calling function 'wait' requires holding mutex 'engine_mutex'": "void Caller::call() { part.wait(); }",
    "releasing mutex 'engine_mutex' that was not held": """void Caller::call() {
      const Unlocked unlocked(of_its_own.mutex());
    }""",
    "cannot call function 'call' while mutex 'engine_mutex' is held": """void Caller::call() {
      const MutexLock lock(of_its_own.mutex());
      call();
    }""",
}


@pytest.fixture
def locks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    module = importlib.import_module("locks")
    yield module
    for name in ("locks", "tidy"):
        sys.modules.pop(name, None)


def compiled(locks, folder, body):
    source = folder / "account.cc"
    source.write_text(body)
    command = ["clang++", "-std=c++20", "-fsyntax-only", f"-I{ROOT}", *locks.ANALYSIS, str(source)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    "body",
    [*(ACCOUNT + body for body in RIGHT.values()), *(PARTS + body for body in RIGHT_PARTS.values())],
    ids=[*RIGHT, *RIGHT_PARTS],
)
def test_what_keeps_the_rules_passes(locks, tmp_path, body):
    done = compiled(locks, tmp_path, body)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("said", "body"),
    [
        *((said, ACCOUNT + body) for said, body in WRONG.items()),
        *((said, PARTS + body) for said, body in WRONG_PARTS.items()),
    ],
    ids=[*WRONG, *WRONG_PARTS],
)
def test_what_breaks_them_is_found(locks, tmp_path, said, body):
    done = compiled(locks, tmp_path, body)
    assert done.returncode == 1 and f"error: {said}" in done.stderr, done.stderr


@pytest.fixture
def project(locks, monkeypatch, tmp_path):
    """Two sources that are compiled together by a g++, with flags of its own, and one that is not compiled."""
    build = tmp_path / "build"
    shutil.copytree(ROOT / "base", tmp_path / "base")
    for folder in ("io", "build"):
        (tmp_path / folder).mkdir()
    for name, text in {"one": RIGHT["a block"], "two": RIGHT["in order"], "left": "int left;"}.items():
        (tmp_path / f"io/{name}.cc").write_text(
            ACCOUNT.replace("Account", name) + text.replace("Account", name)
        )
    unity = build / "unity_0_cxx.cxx"
    both = "".join(f'#include "{tmp_path}/io/{name}.cc"\n' for name in ("one", "two"))
    unity.write_text(both)
    flags = "-std=c++20 -Wall -Wno-no-such-warning -fpch-preprocess -mtune-ctrl=^inter_unit_moves_to_vec"
    command = f"/usr/bin/c++ -I{tmp_path} {flags} -o one.o -c {unity}"
    entry = {"directory": str(build), "file": str(unity), "command": command}
    (build / "compile_commands.json").write_text(json.dumps([entry]))
    for call in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *call], cwd=tmp_path, check=True)
    monkeypatch.setattr(locks, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["locks.py", "--build", str(build)])
    return tmp_path


def test_every_file_that_is_compiled_is_checked_and_others_are_named(locks, project, capsys):
    assert locks.main() == 0
    said = capsys.readouterr().out
    assert "2 files checked, no findings" in said
    assert "were not checked: io/left.cc" in said


def test_a_finding_in_any_of_them_fails(locks, project, capsys):
    second = project / "io/two.cc"
    second.write_text(second.read_text() + "void two::look() { use(sum_); }\n")
    assert locks.main() == 1
    said = capsys.readouterr().out
    assert "io/two.cc" in said and "reading variable 'sum_' requires holding mutex 'mutex_'" in said


def test_a_plain_lock_fails_which_clang_could_not_follow(locks, project, capsys):
    second = project / "io/two.cc"
    second.write_text(second.read_text() + "#include <mutex>\nstd::mutex plain;\n")
    assert locks.main() == 1
    assert "std::mutex: take base/mutex.h's" in capsys.readouterr().out


def test_a_build_that_compiles_none_of_ours_fails(locks, project, capsys):
    (project / "build/compile_commands.json").write_text("[]")
    assert locks.main() == 1
    assert "0 files checked" in capsys.readouterr().out
