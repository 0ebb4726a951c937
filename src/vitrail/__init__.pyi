from . import data as data
from . import metrics as metrics
from . import targets as targets
from .api import evaluate as evaluate
from .api import explain as explain
from .errors import VitrailError as VitrailError
from .explanation import Explanation as Explanation
from .explanation import open as open
from .integrations.exports import export as export
from .methods.base import Method as Method
from .methods.registry import list_methods as list_methods
from .methods.registry import method as method
from .metrics.base import list_metrics as list_metrics
from .models.loading import load as load
from .models.registry import model as model
from .models.wrapping import wrap as wrap
from .similarity import SimilarImages as SimilarImages
from .similarity import similar as similar
from .version import __version__ as __version__

__all__: list[str]
