"""KV blocks that go to other rings, and come from them."""

from services.executor.scheduler.features.base import Feature, FeatureContext, PlannedStep, StepFeature


def _make(context: FeatureContext) -> StepFeature:
    exchange = context.tables.exchange

    def fields(step: PlannedStep) -> dict[str, bytes] | None:
        return exchange.take_fields() if step.ahead is None and exchange.ready else None

    return StepFeature(fields)


HAND_OVER = Feature(_make)
