"""Scenes as a data set: each object of each scene is one example."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from PIL import Image

from vitrail.data.base import DataSet, Example, Object
from vitrail.data.captions import CaptionedScene, CaptionedScenes, Shared
from vitrail.data.scenes import Scene, Scenes


class SceneData(DataSet):
    """One example for each object of each scene; its label is that object's class, its objects are all of the scene.

    A scene of two objects gives two examples of the same image: an explanation of either class must find its own.
    Ids are the scene's number, the object's number and its class: "12-0-star".
    """

    name = "scenes"
    labels = Scenes.labels

    def __init__(self, scenes: int | Sequence[Scene], seed: int = 0, objects: int | None = None) -> None:
        """Uses the given scenes, or draws some.

        Args:
            scenes: scenes, or how many to draw.
            seed: of the scenes to draw.
            objects: number of objects in each scene to draw, 1 or 2; None = either.
        """
        self.scenes: Sequence[Scene] = Scenes(scenes, seed, objects) if isinstance(scenes, int) else scenes

    @cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        """(scene, object, label) of every example; scenes that are drawn are drawn once for this."""
        return [
            (number, place, item.label)
            for number, scene in enumerate(self.scenes)
            for place, item in enumerate(scene.objects)
        ]

    @property
    def ids(self) -> list[str]:
        return [self._id(*place) for place in self._places]

    def _id(self, number: int, place: int, label: int) -> str:
        return f"{number}-{place}-{self.labels[label].removeprefix('a ').replace(' ', '-')}"

    def __len__(self) -> int:
        return len(self._places)

    def load(self, position: int) -> Example:
        number, place, label = self._places[position]
        scene = self.scenes[number]
        objects = []
        for item in scene.objects:
            x0, y0, x1, y1 = item.box
            objects.append(Object(item.label, (float(x0), float(y0), float(x1), float(y1)), item.mask))
        return Example(self._id(number, place, label), Image.fromarray(scene.image), label, tuple(objects))


class CaptionedSceneData(SceneData):
    """One example for each object of each captioned scene; its label is the caption of that object.

    The other objects of a scene share a colour or a shape with it: an explanation of a caption must find the object
    that has both. Ids are the scene's number, the object's number and its look: "12-0-red-star".
    """

    name = "scenes_text"
    labels = CaptionedScenes.labels

    def __init__(
        self,
        scenes: int | Sequence[CaptionedScene],
        seed: int = 0,
        objects: int | None = None,
        shared: Shared | None = None,
    ) -> None:
        """Uses the given scenes, or draws some.

        Args:
            scenes: scenes, or how many to draw.
            seed: of the scenes to draw.
            objects: number of objects in each scene to draw, 2 or 3; None = either.
            shared: what the first two objects share, "colour" or "shape"; None = either or neither.
        """
        self.scenes = CaptionedScenes(scenes, seed, objects, shared) if isinstance(scenes, int) else scenes
