"""In every process of DeepSpeed's tests, those that the tests start too: where OVERSPILL_STANDS_IN is set, `import
deepspeed` gives Overspill's modules, as under python -m overspill.deepspeed.

The tests import parts of DeepSpeed that are not there. Such a name is a Missing, which raises where it is used: so a
test fails for what it uses, and not for what another test in its file imports.
"""

import os
import sys
import traceback


class NotThere(Exception):
    """A name of DeepSpeed's that Overspill does not have was used."""


class Missing:
    """Stands for what `name` would be: it can be imported, asked for attributes, and put into lists."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def _used(self, *_, **__):
        raise NotThere(self.__name__)

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __instancecheck__(self, value):
        return False  # nothing here is of a class that is not there

    def __reduce__(self):
        return Missing, (self.__name__,)

    def __repr__(self):
        return f"<{self.__name__}>"

    def __mro_entries__(self, bases):
        return (type(self.__name__.rpartition(".")[2], (), {"__init__": self._used}),)

    __call__ = __iter__ = __len__ = __bool__ = __lt__ = __contains__ = __getitem__ = _used
    __enter__ = __exit__ = __add__ = __int__ = __fspath__ = _used

    def __eq__(self, other):
        return self.__name__ == other.__name__ if type(other) is Missing else NotImplemented

    def __hash__(self):
        return hash(self.__name__)


def stand_in():
    from overspill.deepspeed import finder

    there = finder.Finder.find_spec, finder.Finder.exec_module

    def find_spec(self, fullname, path=None, target=None):
        try:
            return there[0](self, fullname, path, target)
        except ModuleNotFoundError:
            return finder.importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module):
        name = module.__name__
        try:
            there[1](self, module)
        except KeyError:  # a module that is not there
            pass

        def of_module(attribute):
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return Missing(f"{name}.{attribute}")

        module.__getattr__ = of_module

    finder.Finder.find_spec, finder.Finder.exec_module = find_spec, exec_module
    finder.install()


if os.environ.get("OVERSPILL_STANDS_IN") and "pip" not in sys.argv[0]:
    try:
        stand_in()
    except BaseException:  # Python would go on after it, and the tests would pass with DeepSpeed
        traceback.print_exc()
        os._exit(1)
