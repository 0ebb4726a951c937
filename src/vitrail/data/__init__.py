"""Data to explain and to measure on."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.data.base import DataSet as DataSet
    from vitrail.data.base import Example as Example
    from vitrail.data.base import Object as Object
    from vitrail.data.base import Subset as Subset
    from vitrail.data.base import read_indices as read_indices
    from vitrail.data.cifar import Cifar as Cifar
    from vitrail.data.coco import Coco as Coco
    from vitrail.data.folder import ImageFolder as ImageFolder
    from vitrail.data.imagenet import ImageNet as ImageNet
    from vitrail.data.imagenet import Imagenette as Imagenette
    from vitrail.data.imagenet_s import ImageNetS as ImageNetS
    from vitrail.data.imagenet_segmentation import ImageNetSegmentation as ImageNetSegmentation
    from vitrail.data.memory import InMemory as InMemory
    from vitrail.data.mura import Mura as Mura
    from vitrail.data.names import DATA_NAMES as DATA_NAMES
    from vitrail.data.names import open_data as open_data
    from vitrail.data.pets import OxfordPets as OxfordPets
    from vitrail.data.scene_data import SceneData as SceneData
    from vitrail.data.scenes import Scene as Scene
    from vitrail.data.scenes import SceneObject as SceneObject
    from vitrail.data.scenes import Scenes as Scenes
    from vitrail.data.tiny_imagenet import TinyImageNet as TinyImageNet
    from vitrail.data.voc import PascalVoc as PascalVoc

# Public name → its module here. Imported at first use, so that one data set does not load what all others need.
_PUBLIC = {
    "Cifar": "cifar",
    "Coco": "coco",
    "DATA_NAMES": "names",
    "DataSet": "base",
    "Example": "base",
    "ImageFolder": "folder",
    "ImageNet": "imagenet",
    "ImageNetS": "imagenet_s",
    "ImageNetSegmentation": "imagenet_segmentation",
    "Imagenette": "imagenet",
    "InMemory": "memory",
    "Mura": "mura",
    "Object": "base",
    "OxfordPets": "pets",
    "PascalVoc": "voc",
    "Scene": "scenes",
    "SceneData": "scene_data",
    "SceneObject": "scenes",
    "Scenes": "scenes",
    "Subset": "base",
    "TinyImageNet": "tiny_imagenet",
    "open_data": "names",
    "read_indices": "base",
}

__all__ = ["DATA_NAMES", "Cifar", "Coco", "DataSet", "Example", "ImageFolder", "ImageNet", "ImageNetS",
           "ImageNetSegmentation", "Imagenette", "InMemory", "Mura", "Object", "OxfordPets", "PascalVoc", "Scene",
           "SceneData", "SceneObject", "Scenes", "Subset", "TinyImageNet", "open_data", "read_indices"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'vitrail.data' has no attribute {name!r}")
    value = getattr(import_module(f"vitrail.data.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
