"""How good an explanation is: every metric of the four papers, defined once."""

from typing import TYPE_CHECKING

from vitrail.metrics.base import Case as Case
from vitrail.metrics.base import MapMetric as MapMetric
from vitrail.metrics.base import MethodMetric as MethodMetric
from vitrail.metrics.base import Metric as Metric
from vitrail.metrics.base import MetricInfo as MetricInfo
from vitrail.metrics.base import Scored as Scored
from vitrail.metrics.base import build_metric as build_metric
from vitrail.metrics.base import list_metrics as list_metrics
from vitrail.metrics.base import metric as metric
from vitrail.metrics.measuring import measure as measure
from vitrail.metrics.statistics import interval as interval
from vitrail.metrics.statistics import summarise as summarise

if TYPE_CHECKING:
    from vitrail.metrics.streaming import Running as Running


def __getattr__(name: str) -> type:
    """``Running`` is found when it is asked for: torchmetrics takes seconds to import."""
    if name == "Running":
        from vitrail.metrics.streaming import Running

        return Running
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
