"""open_clip: models of images and texts whose image tower is its own Vision Transformer, or one of timm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import families
from tests.helpers import assert_same_state, state_of
from torch import Tensor

import vitrail
from vitrail.engine.trace import trace
from vitrail.errors import VitrailError

pytestmark = pytest.mark.full
DOUBLE = torch.float64
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
OWN = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
TOWERS: dict[str, dict[str, Any]] = {
    "own": OWN,
    "own, mean of patches": {**OWN, "pool_type": "avg", "final_ln_after_pool": True, "no_ln_pre": True},
    "own, layer scale": {**OWN, "ls_init_value": 0.1},
    "timm, linear projection": {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear"},
    "timm, own head": {"timm_model_name": "test_vit", "timm_pool": "avg", "timm_proj": ""},
    "timm, attention pool": {"timm_model_name": "test_vit4", "timm_pool": "map", "timm_proj": "none"},
}
PROMPTS = ["a cat", "a photo of a dog", "the red star"]


def built(tower: str, custom: bool = False, **options: Any) -> Any:
    open_clip = pytest.importorskip("open_clip")
    kind = open_clip.model.CustomTextCLIP if custom else open_clip.model.CLIP
    vision = {"image_size": 160, **TOWERS[tower]}
    width = 96 if tower == "timm, attention pool" else 24
    with torch.random.fork_rng(devices=[]):
        module = kind(width, open_clip.CLIPVisionCfg(**vision), open_clip.CLIPTextCfg(**TEXT), **options)
    families.randomize(module, seed=0)
    return module.eval().double()


def tokenizer() -> Any:
    return pytest.importorskip("open_clip").tokenizer.SimpleTokenizer(context_length=16)


def images(module: Any, count: int = 2) -> Tensor:
    return torch.randn(count, 3, *module.visual.image_size, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)


@pytest.mark.parametrize("custom", [False, True], ids=["CLIP", "CustomTextCLIP"])
@pytest.mark.parametrize("tower", TOWERS)
def test_logits_are_those_of_the_module(tower: str, custom: bool) -> None:
    module = built(tower, custom, init_logit_bias=-1.0 if custom else None)
    pixels, before = images(module), state_of(module)
    with torch.no_grad():
        expected, _ = module.get_logits(pixels, tokenizer()(PROMPTS))
    view = vitrail.wrap(module, prompts=PROMPTS, tokenizer=tokenizer())
    scale = max(1.0, float(expected.abs().max()))
    assert (view.logits(pixels) - expected).abs().max() <= 1e-9 * scale
    assert view.output == ("sigmoid" if custom else "softmax")
    made = trace(view, pixels, rule="frozen", keep=("x", "gx", "bias"), layers=[0])
    assert ((made["x"][0] * made["gx"][0]).sum((1, 2)) + made.bias_from(0) - made.y).abs().max() <= 1e-9 * scale
    assert vitrail.explain(view, pixels[0], target="a cup").label == "a cup"
    with torch.no_grad():
        embeddings = module.encode_image(pixels)
    alike = vitrail.similar(view, *pixels, pairs=False)
    assert alike.score == pytest.approx(float(torch.cosine_similarity(*embeddings, dim=0)), abs=1e-6)
    assert_same_state(before, state_of(module))


def test_images_become_inputs_as_the_model_says() -> None:
    module = built("own")
    module.visual.preprocess_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25), "resize_mode": "squash"}
    view = vitrail.wrap(module, prompts=PROMPTS, tokenizer=tokenizer())
    assert (view.preprocessing.mean, view.preprocessing.fit) == ((0.5, 0.5, 0.5), "squash")
    assert view.preprocessing.interpolation == "bicubic"


def test_what_cannot_be_asked_gets_one_sentence() -> None:
    module = built("own")
    with pytest.raises(VitrailError, match="CLIP has no classes of its own: give prompts="):
        vitrail.wrap(module)
    with pytest.raises(VitrailError, match="needs the tokenizer of CLIP"):
        vitrail.wrap(module, prompts=PROMPTS)
    with pytest.raises(VitrailError, match="has 17 tokens, but the model takes at most 16"):
        vitrail.wrap(module, prompts=["a cat", " ".join(["cat"] * 15)], tokenizer=tokenizer())
    open_clip = pytest.importorskip("open_clip")
    vision = open_clip.CLIPVisionCfg(layers=(1, 1, 1, 1), width=8, head_width=8, image_size=32)  # a ResNet
    with torch.random.fork_rng(devices=[]):
        convolutions = open_clip.model.CLIP(24, vision, open_clip.CLIPTextCfg(**TEXT))
    with pytest.raises(VitrailError, match="image tower of an open_clip model must be a plain Vision Transformer"):
        vitrail.wrap(convolutions, prompts=PROMPTS, tokenizer=tokenizer())
