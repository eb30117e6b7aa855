"""Methods of C++ classes of which programs derive classes of their own: the objects of those have the bare methods.

For each virtual function C++ asks such an object for its method. A function of Python there is taken for the class's
own one and called; ours would call C++, which would ask again, without end. Its class's own methods may be in the
place of others as well (an old name for a new one), so nothing but the bare method will do.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from otel_dltrace.instrument._sites import Uncalled


class Method(Uncalled):
    """A method of the class *holder*, *traced* for its own objects, *bare* for those of derived classes."""

    __slots__ = ("_bare", "_holder")

    def __init__(self, holder: type, traced: Callable[..., Any], bare: Any) -> None:
        super().__init__(traced)
        self._holder = holder
        self._bare: Any = bare._bare if isinstance(bare, Method) else bare

    def __get__(self, one: Any, kind: Any = None) -> Any:
        """Return the method of *one*."""
        if type(one) is self._holder:
            return MethodType(self.traced, one)
        return self.traced if one is None else self._bare.__get__(one, kind)


def _method(name: str, traced: Callable[..., Any], bare: Any) -> Method:
    return Method(getattr(sys.modules["torch._C._distributed_c10d"], name), traced, bare)


OF_GROUPS, OF_WORKS = (partial(_method, name) for name in ("ProcessGroup", "Work"))
"""What puts a method of process groups, or of works, in place (`_sites.Site.around`)."""
