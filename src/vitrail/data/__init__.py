"""Data to explain and to measure on."""

from vitrail.data.scenes import Scene, SceneObject, Scenes

__all__ = ["Scene", "SceneObject", "Scenes"]
