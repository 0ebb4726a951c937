"""The models inside the package: they load offline, say what they are, and point where they should."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import vitrail
from vitrail import VitrailError
from vitrail.data import Scenes
from vitrail.data.scenes import Scene
from vitrail.methods.registry import build_method
from vitrail.models.embedded import FOLDER, card, names
from vitrail.models.view import View

SCENES = 80


def test_the_embedded_models() -> None:
    assert names() == ("photo", "scenes", "scenes-text")
    assert vitrail.load().name == "photo"


@pytest.mark.parametrize("name", ["photo", "scenes"])
def test_cards_tell_what_a_user_must_know(name: str) -> None:
    about = card(name)
    assert {"data", "recipe", "accuracy", "limits", "licence", "summary", "architecture", "output"} <= about.keys()
    view = vitrail.load(name)
    parameters = sum(p.numel() for p in view.module.parameters())
    assert parameters == about["parameters"]
    assert len(view.labels) == len(set(view.labels)) == about["architecture"]["num_classes"]
    assert str(len(view.labels)) in view.note
    assert "--model" in view.note


def test_loading_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    vitrail.load()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_package_stays_small() -> None:
    megabytes = sum(path.stat().st_size for path in FOLDER.parent.rglob("*") if path.suffix != ".pyc") / 1e6
    assert (FOLDER / "photo.safetensors").stat().st_size < 12e6
    assert (FOLDER / "scenes.safetensors").stat().st_size < 3e6
    assert megabytes < 20


def test_embedded_models_take_no_weights_of_others() -> None:
    with pytest.raises(VitrailError, match="embedded model takes no"):
        vitrail.load("photo", num_classes=3)


def test_scenes_recognises_its_shapes() -> None:
    view = vitrail.load("scenes")
    one, two = Scenes(100, seed=901, objects=1), Scenes(100, seed=902, objects=2)
    assert view.labels == tuple(Scenes.labels)
    with torch.no_grad():
        first = view.logits(pixels(view, one)).argmax(1).tolist()
        best = view.logits(pixels(view, two)).topk(2).indices.tolist()
    assert np.mean([found == scene.objects[0].label for found, scene in zip(first, one, strict=True)]) > 0.94
    assert np.mean([set(found) == {o.label for o in s.objects} for found, s in zip(best, two, strict=True)]) > 0.88


def pixels(view: View, scenes: Iterable[Scene]) -> torch.Tensor:
    return torch.stack([view.preprocess(Image.fromarray(scene.image)) for scene in scenes])


@lru_cache(maxsize=1)
def two_objects() -> list[Scene]:
    return list(Scenes(SCENES, seed=77, objects=2))


def pointing(method: str, scenes: list[Scene] | None = None, **params: object) -> float:
    """How often the top patch for a class overlaps the mask of that class's object, over two-object scenes."""
    view, scenes, hits = vitrail.load("scenes"), scenes or two_objects(), []
    chosen = build_method(method, view, **params)
    images = pixels(view, scenes)
    for which in (0, 1):
        targets = [scene.objects[which].label for scene in scenes]
        maps = torch.cat([chosen.attribute(images[i : i + 50], targets[i : i + 50]) for i in range(0, len(scenes), 50)])
        hits += [overlaps(m, scene.objects[which].mask) for m, scene in zip(maps, scenes, strict=True)]
    return float(np.mean(hits))


def overlaps(values: torch.Tensor, mask: np.ndarray) -> float:
    touched = F.max_pool2d(torch.from_numpy(mask)[None].float(), 8)[0]
    return float(touched.flatten()[values.argmax()])


def test_decompx_skipplus_points_into_the_object_of_its_class() -> None:
    assert pointing("decompx.skipplus") > 0.9


def test_tis_points_into_the_object_of_its_class() -> None:
    assert pointing("tis", two_objects()[:30], masks=64) > 0.85


def test_what_ignores_the_class_cannot_point() -> None:
    masks = [o.mask for scene in two_objects() for o in scene.objects]
    chance = float(np.mean([F.max_pool2d(torch.from_numpy(m)[None].float(), 8).mean() for m in masks]))
    assert abs(pointing("random") - chance) < 0.07
    assert pointing("raw_attention") < 0.55, "one map cannot point at two objects"


def test_explains_offline_without_cache_or_home(tmp_path: Path) -> None:
    Image.fromarray(Scenes(1, seed=3)[0].image).resize((300, 200)).save(tmp_path / "photo.jpg")
    empty = tmp_path / "home"
    empty.mkdir()
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HOME": str(empty),
        "HF_HOME": str(empty),
        "TORCH_HOME": str(empty),
    }
    command = [
        sys.executable,
        "-c",
        "from vitrail.cli.program import main; main()",
        "explain",
        "photo.jpg",
        "--no-trust",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Model photo" in done.stdout
    assert "--model" in done.stdout
    assert (tmp_path / "vitrail-out" / "photo.decompx.skipplus.png").is_file()


def test_importing_loads_no_weights() -> None:
    code = (
        "import vitrail.models.embedded, sys, gc, torch; "
        "print(sum(t.numel() for t in gc.get_objects() if torch.is_tensor(t)) > 1e6)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", names())
def test_their_network_is_that_of_timm(name: str) -> None:
    """They were trained as timm's, and its weights fit ours under the same names."""
    from timm.models.vision_transformer import VisionTransformer

    module = vitrail.load(name).module
    ours = getattr(getattr(module, "model", module), "vision", module)
    theirs = VisionTransformer(**card(name)["architecture"]).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.randn(2, 3, *ours.patch_embed.img_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours.double()(images.double()), theirs.double()(images.double()), rtol=0, atol=1e-12)


def test_a_module_of_ours_is_wrapped_like_any_other() -> None:
    module = vitrail.load("photo").module
    view = vitrail.wrap(module, mean=(0.5, 0.5, 0.5))
    assert (view.has_tokens, view.size, view.num_classes, view.name) == (True, (64, 64), 200, "VisionTransformer")


def test_their_heads_can_be_replaced_as_those_of_timm() -> None:
    module = copy.deepcopy(vitrail.load("scenes").module)
    module.reset_classifier(num_classes=2)
    view = vitrail.wrap(module, labels=["one object", "two objects"], mean=(0.5,) * 3, std=(0.5,) * 3)
    images = torch.randn(2, 3, *view.size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(view.logits(images), module(images).detach(), rtol=0, atol=1e-5)
    assert module.num_classes == view.num_classes == 2
    module.reset_classifier(num_classes=4)
    assert view.num_outputs == 4, "a view follows its module"
    module.reset_classifier(num_classes=2)
    for target in (3, [0, 3]):
        with pytest.raises(vitrail.VitrailError, match="there is no class 3"):
            vitrail.explain(view, images, target=target)


def test_explaining_with_one_imports_no_other_library_of_models() -> None:
    """timm and torchvision take longer to import than the explanation."""
    code = (
        "import sys, vitrail; from vitrail.samples import open_sample;"
        "explanation = vitrail.explain('photo', open_sample('coffee.jpg')); explanation.trust(); explanation.picture();"
        "print(explanation.label, sorted({'timm', 'torchvision', 'transformers', 'pandas', 'captum', 'scipy.stats',"
        "'torch._dynamo'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "espresso []"
