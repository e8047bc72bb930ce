"""Errors of Overspill have one base, and are still what they were before they had it."""

import pytest

import overspill
from overspill import data
from overspill.cli.common import CliError

ERRORS = {
    overspill.BudgetError: RuntimeError,
    overspill.CheckpointError: RuntimeError,
    overspill.CommunicatorError: RuntimeError,
    overspill.EngineFailed: RuntimeError,
    overspill.StoreError: RuntimeError,
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


def test_a_configuration_that_is_wrong_is_caught_by_it(config):
    with pytest.raises(overspill.OverspillError, match="optimizer"):
        overspill.Config.read({**config(), "optimizer": {"type": "Nothing"}})
