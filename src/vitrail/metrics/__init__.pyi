from .base import Case as Case
from .base import MapMetric as MapMetric
from .base import MethodMetric as MethodMetric
from .base import Metric as Metric
from .base import MetricInfo as MetricInfo
from .base import Scored as Scored
from .base import build_metric as build_metric
from .base import list_metrics as list_metrics
from .base import metric as metric
from .measuring import measure as measure
from .statistics import interval as interval
from .statistics import summarise as summarise
from .streaming import Running as Running
from .trust import Trust as Trust

__all__: list[str]
