from .base import DataSet as DataSet
from .base import Example as Example
from .base import Object as Object
from .base import Subset as Subset
from .base import read_indices as read_indices
from .cifar import Cifar as Cifar
from .coco import Coco as Coco
from .folder import ImageFolder as ImageFolder
from .imagenet import ImageNet as ImageNet
from .imagenet import Imagenette as Imagenette
from .imagenet_s import ImageNetS as ImageNetS
from .imagenet_segmentation import ImageNetSegmentation as ImageNetSegmentation
from .memory import InMemory as InMemory
from .mura import Mura as Mura
from .names import DATA_NAMES as DATA_NAMES
from .names import DATA_SETS as DATA_SETS
from .names import data_set as data_set
from .names import open_data as open_data
from .pets import OxfordPets as OxfordPets
from .scenes import Scene as Scene
from .scenes import SceneData as SceneData
from .scenes import SceneObject as SceneObject
from .scenes import Scenes as Scenes
from .tiny_imagenet import TinyImageNet as TinyImageNet
from .voc import PascalVoc as PascalVoc

__all__: list[str]
