"""How much memory an engine may use where nobody says it."""

import warnings

import pytest

from overspill import Config, memory

GIB = 1 << 30


@pytest.fixture
def cgroups(tmp_path):
    """Makes memory cgroups: a folder's files of version 1 or 2."""

    def make(version, path, limit, used, droppable):
        folder = (tmp_path / "memory" if version == 1 else tmp_path) / path
        folder.mkdir(parents=True, exist_ok=True)
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 2:
            names = ("memory.max", "memory.current", "inactive_file")
        (folder / names[0]).write_text(f"{limit}\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"cache 5\n{names[2]} {droppable}\n")
        own = tmp_path / "own"
        own.write_text(f"3:cpu,cpuacct:/elsewhere\n7:memory:/{path}\n" if version == 1 else f"0::/{path}\n")
        return tmp_path, own

    return make


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_limits_what_is_free(cgroups, monkeypatch, version):
    monkeypatch.setattr(memory, "available_bytes", lambda: 10 * GIB)
    place = cgroups(version, "job/step", 4 * GIB, 3 * GIB, GIB)
    assert memory.free_bytes(*place) == 2 * GIB
    cgroups(version, "job", 9 * GIB, 8 * GIB + 5, 0)  # the one above has less left
    cgroups(version, "job/step", 4 * GIB, 3 * GIB, GIB)
    assert memory.free_bytes(*place) == GIB - 5
    cgroups(version, "job", GIB, 2 * GIB, 0)
    cgroups(version, "job/step", 4 * GIB, 3 * GIB, GIB)
    assert memory.free_bytes(*place) == 0


def test_a_cgroup_without_a_limit_limits_nothing(cgroups, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "available_bytes", lambda: 10 * GIB)
    assert memory.free_bytes(*cgroups(2, "job", "max", GIB, 0)) == 10 * GIB
    own = tmp_path / "own"
    own.write_text("0::/\n")
    assert memory.free_bytes(tmp_path, own) == 10 * GIB
    assert 0 < memory.free_bytes() <= 10 * GIB


@pytest.mark.parametrize("data", [{}, {"budget": {}}, {"budget": {"nvme": ["/tmp"]}}])
def test_without_a_budget_half_of_what_is_free_is_taken_and_said(monkeypatch, data):
    monkeypatch.setattr(memory, "free_bytes", lambda: 10 * GIB)
    with pytest.warns(
        UserWarning, match=r"may use 5\.0 GiB of host memory, half of the 10\.0 GiB that are free$"
    ):
        assert Config.read(data).budget.host == 5 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match=r"may use 1\.2 GiB of .* free, divided by 4 ranks$"):
        assert Config.read(data).budget.host == 10 * GIB // 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Config.read({"budget": {"host": "1GiB"}}).budget.host == GIB
