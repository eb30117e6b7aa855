"""FSDP2 (``fully_shard``): its all-gathers and reduce-scatters say which module they are for.

They pass through `torch.distributed` and are recorded there; here is only said whose they are.
A group of parameters gathers in `unshard`, also when another one's backward prefetches it, and
reduces in `post_backward`, on whatever thread runs the backward.
"""

from contextvars import Token
from typing import Any

from otel_dltrace.instrument._sites import Args, Kwargs, Row, Site
from otel_dltrace.instrument._torch.naming import tensor_name
from otel_dltrace.model.semconv import Level


def name_of(group: Any) -> str:
    """Return the name of the module that owns *group* of parameters; the root has none, its class says it.

    Where a module has several groups, their numbers tell them apart.
    """
    modules = group.modules if hasattr(group, "modules") else [group.module]  # in 2.4 it has one
    name = group._module_fqn or type(modules[0]).__name__
    several = getattr(group, "_num_param_groups", 1) > 1  # no version before 2.13 has it
    return f"{name} [{group._param_group_index}]" if several else str(name)


def _communication_begins(args: Args, _kwargs: Kwargs) -> "Token[str]":
    return tensor_name.set(name_of(args[0]))


def _communication_ended(token: "Token[str]", _result: object) -> None:
    tensor_name.reset(token)


_MODULES = (
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "2.6", ""),
    ("torch.distributed._composable.fsdp._fsdp_param_group", "", "2.6"),
)

ROWS: tuple[Row, ...] = tuple(
    Site(
        module,
        f"FSDPParamGroup.{name}",
        begin=_communication_begins,
        finish=_communication_ended,
        fail=_communication_ended,
        level=Level.COLLECTIVE,
        since=since,
        until=until,
    )
    for module, since, until in _MODULES
    for name in ("unshard", "post_backward")
)
