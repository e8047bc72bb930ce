"""Errors of Overspill have one base, and are still what they were before they had it."""

import importlib
import pkgutil
import sys

import pytest

import overspill
from overspill import data
from overspill.cli.common import CliError

ERRORS = {
    overspill.BudgetError: RuntimeError,
    overspill.CheckpointError: RuntimeError,
    overspill.CommunicatorError: RuntimeError,
    overspill.EngineFailed: RuntimeError,
    overspill.FolderError: RuntimeError,
    overspill.StoreError: RuntimeError,
    overspill.ThreadError: RuntimeError,
    overspill.NonFiniteError: FloatingPointError,
    overspill.RankError: RuntimeError,
    overspill.ConfigError: ValueError,
    data.DataError: ValueError,
    CliError: Exception,
}


@pytest.mark.parametrize("error", ERRORS)
def test_one_base(error):
    assert issubclass(error, overspill.OverspillError) and issubclass(error, ERRORS[error])
    with pytest.raises(overspill.OverspillError, match="said"):
        raise error("said")


def test_every_error_of_the_package_is_in_the_hierarchy():
    """A class of errors that a script may meet, and `except overspill.OverspillError` misses, is a mistake."""
    for module in pkgutil.walk_packages(overspill.__path__, "overspill."):
        if not module.name.endswith(("._core", ".__main__")):
            importlib.import_module(module.name)
    found = set()
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "overspill"]:
        found |= {
            kind
            for kind in vars(module).values()
            if isinstance(kind, type)
            and issubclass(kind, BaseException)
            and kind.__name__[0] != "_"
            and kind.__module__.split(".")[0] == "overspill"
        }
    assert len(found) > 10
    assert not [kind for kind in found if not issubclass(kind, overspill.OverspillError)]


def test_a_configuration_that_is_wrong_is_caught_by_it(config):
    with pytest.raises(overspill.OverspillError, match="optimizer"):
        overspill.Config.read({**config(), "optimizer": {"type": "Nothing"}})
