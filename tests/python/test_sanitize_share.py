"""tools/sanitize_share.py: every test runs within a few turns, and those without parameters always."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

import sanitize_share

LISTED = """Test project build/asan
  Test    #2: Plain.Test
  Test    #3: All/Suite.Test/one
  Test    #4: All/Suite.Test/two
  Test    #5: All/Suite.Test/three
  Test    #6: All/Suite.Other/one
  Test    #9: All/Suite.Test/four

Total Tests: 6
"""


def test_all_run_within_as_many_turns_as_the_share():
    parts = [set(sanitize_share.chosen(LISTED, 3, turn)[0]) for turn in (7, 8, 9)]
    assert set.union(*parts) == {2, 3, 4, 5, 6, 9}
    assert all(2 in part for part in parts)
    assert sum(map(len, parts)) == 3 + 5, "no instance runs twice"


def test_a_share_of_one_is_all_of_them():
    assert sanitize_share.chosen(LISTED, 1, 12) == ([2, 3, 4, 5, 6, 9], 6)


def test_the_list_is_one_that_ctest_takes(tmp_path, monkeypatch, capsys):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(LISTED))
    monkeypatch.setattr(sys, "argv", ["sanitize_share", "3", "0", str(tmp_path / "chosen")])
    assert sanitize_share.main() == 0
    assert (tmp_path / "chosen").read_text() == "2,2,1,2,3,6,9\n"
    assert "left out, 2 of 6 tests" in capsys.readouterr().out
