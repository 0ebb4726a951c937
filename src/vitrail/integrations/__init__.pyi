from .fiftyone import add_to_fiftyone as add_to_fiftyone
from .huggingface import TrainerExplanations as TrainerExplanations
from .lightning import LightningExplanations as LightningExplanations
from .loggers import log_panel as log_panel
from .panels import Panel as Panel
from .panels import explained_panel as explained_panel

__all__: list[str]
