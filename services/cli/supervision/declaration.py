"""The models that a local stack is started with, in the registry of its NATS.

Each start writes its own, marked as such, and takes out those of an earlier start that it does not name; what somebody
has added with `ryzanstein models add` stays as it is.
"""

import time
from collections.abc import Callable
from typing import Final

from rich.console import Console

from services.cli.cluster_models import ClusterModels, ModelsSnapshot
from services.cli.declarations import apply, watch_adapters
from services.cli.supervision.stack import StackPlan
from services.cli.ui import ModelBars
from shared.errors import RyzansteinError
from shared.messages import ModelSpec

ORIGIN: Final = "up"


async def declare(models: ClusterModels, plan: StackPlan) -> float:
    """Writes the registry; returns when, in unix seconds. Raises `RyzansteinError`."""
    await models.open()
    now, since = await models.read(), time.time()
    own = plan.own_spec()
    wanted = [spec for spec in ([own] if own else []) + plan.further if _is_ours(now, spec)]
    adapters = [one for one in plan.adapters if (known := now.adapters.get(one.name)) is None or known.origin == ORIGIN]
    await apply(models, wanted, adapters, ORIGIN)
    return since


async def wait_further(
    models: ClusterModels, plan: StackPlan, since: float, console: Console, tell: Callable[[str], None]
) -> str:
    """Until each further model that is to be there at all times is loaded and its adapters are read, or have failed,
    which is told: it keeps no other from being served. Returns the first that takes requests; empty: none."""
    first = ""
    waited = [spec for spec in plan.further if spec.least]
    bases = {spec.name for spec in waited} | {plan.served_model_name}
    adapters = [one.name for one in plan.adapters if one.model in bases]
    if waited or adapters:
        await models.open()
    for spec in waited:
        try:
            await _wait(models, spec.name, since, console)
        except RyzansteinError as error:
            tell(error.message)
        else:
            first = first or spec.name
    for name in adapters:
        try:
            await watch_adapters(models, [name], 0, console)
        except RyzansteinError as error:
            tell(error.message)
    return first


def _is_ours(now: ModelsSnapshot, spec: ModelSpec) -> bool:
    known = now.specs.get(spec.name)
    return known is None or known.origin == ORIGIN


async def _wait(models: ClusterModels, model: str, since: float, console: Console) -> None:
    with ModelBars(console) as bars:

        def report(now: ModelsSnapshot) -> None:
            status = now.status(model)
            bars.update(model, f"{model}: {status.state}", status.progress, status.done, status.total)

        report(await models.wait_loaded([model], since, 0, report))
