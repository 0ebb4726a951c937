"""Regions of EoMT, a plain Vision Transformer whose last blocks have queries that say a class and a mask each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.common import noise
from tests.families import CLASSES, OBJECTS, eomt
from tests.helpers import assert_same_state, relative, state_of
from torch import Tensor, nn

import vitrail
from vitrail.engine.trace import trace
from vitrail.errors import VitrailError
from vitrail.models.questions import in_mask, within
from vitrail.targets import Box, Contrast, Region

DOUBLE, SINGLE = torch.float64, torch.float32
QUERIES, PREFIX, CELLS, DEPTH = 5, 8, (16, 16), 4
kinds = pytest.mark.parametrize("kind", ["Eomt", "EomtDinov3"])


def images(count: int = 2, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(5)).to(dtype)


def weights() -> Tensor:
    """Of the cells of a region, many of them 0."""
    values = torch.rand(CELLS, generator=torch.Generator().manual_seed(6), dtype=DOUBLE)
    values[:5] = 0
    return values.flatten()


def scores(out: Any) -> Tensor:
    """(B, C, cells): the sum over queries of the probability of a class times that of a mask."""
    return torch.einsum("bqc,bqhw->bchw", out.class_queries_logits.softmax(-1)[..., :-1],
                        out.masks_queries_logits.sigmoid()).flatten(2)  # fmt: skip


@torch.no_grad()
def own(module: nn.Module, pixels: Tensor, region: Tensor | None = None) -> Tensor:
    """(B, C): the logarithm of the module's own mean scores in a region."""
    shares = torch.full((CELLS[0] * CELLS[1],), 1.0) if region is None else region
    return (scores(module(pixels)) @ (shares / shares.sum()).to(pixels)).log()


# Logits


@kinds
@pytest.mark.parametrize(("dtype", "tolerance"), [(DOUBLE, 1e-10), (SINGLE, 1e-5)])
def test_logits_are_those_of_the_module(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    module, pixels = eomt(kind, dtype), images(3, dtype)
    before = state_of(module)
    view = vitrail.wrap(module)
    assert (view.num_classes, view.num_prefix, view.grid) == (CLASSES, PREFIX, (4, 4))
    assert view.labels == OBJECTS
    one_cell = torch.zeros(CELLS[0] * CELLS[1])
    one_cell[77] = 1
    for region in (None, weights(), one_cell):
        expected = own(module, pixels, region)
        asked = view if region is None else within(view, region.tolist())
        assert (asked.logits(pixels) - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))
    assert_same_state(before, state_of(module))


def test_a_gated_mlp_is_seen_through() -> None:
    for module in (eomt(use_swiglu_ffn=True), eomt("EomtDinov3", use_gated_mlp=True, hidden_act="silu")):
        assert relative(vitrail.wrap(module).logits(images()), own(module, images())) < 1e-10


def test_the_prediction_is_that_of_semantic_segmentation() -> None:
    """The class of each single cell is the one that the processor's own post-processing says, at that resolution."""
    module, pixels = eomt(), images(1)
    view = vitrail.wrap(module)
    processor = transformers.EomtImageProcessor(size={"shortest_edge": 16, "longest_edge": 16})
    (expected,) = processor.post_process_semantic_segmentation(module(pixels), target_sizes=[CELLS])
    for cell in range(0, 256, 15):
        only = [float(i == cell) for i in range(256)]
        assert int(within(view, only).logits(pixels).argmax()) == int(expected.flatten()[cell])


def test_removed_patches_are_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the module itself with removed patches masked in every attention, and zero where neighbours are mixed."""
    module, pixels = eomt(), images(1)
    view, keep, region = vitrail.wrap(module), torch.tensor([[0, 3, 9, 14]]), weights()
    answer = within(view, region.tolist()).encode(view.embed(pixels), keep)
    present = torch.zeros(16, dtype=torch.bool)
    present[keep[0]] = True

    def masked(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **rest: Any) -> tuple[Tensor, None]:
        leading = torch.ones(k.shape[2] - 16, dtype=torch.bool)
        seen = torch.cat([leading, present])
        weights = (scaling * q @ k.transpose(2, 3)).masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ v).transpose(1, 2), None

    monkeypatch.setattr("transformers.models.eomt.modeling_eomt.ALL_ATTENTION_FUNCTIONS.get_interface",
                        lambda *_: masked)  # fmt: skip
    with torch.no_grad():
        tokens = module(pixels).last_hidden_state
        cells = tokens[:, PREFIX:].transpose(1, 2).unflatten(2, (4, 4))
        shown = present.to(DOUBLE).view(1, 1, 4, 4)
        for block in module.upscale_block.block:
            shown = shown.repeat_interleave(2, 2).repeat_interleave(2, 3)
            cells = block.layernorm2d(block.conv2(block.activation(block.conv1(cells)) * shown))
        masks = torch.einsum("bqc,bchw->bqhw", module.mask_head(tokens[:, :QUERIES]), cells)
        classes = module.class_predictor(tokens[:, :QUERIES]).softmax(-1)[..., :-1]
    shares = shown.flatten() * region
    expected = (classes.transpose(1, 2) @ masks.sigmoid().flatten(2) @ (shares / shares.sum())).log()
    assert relative(answer, expected) < 1e-10


def test_where_nothing_is_left_of_the_region_nothing_is_known() -> None:
    view = vitrail.wrap(eomt())
    corner = torch.zeros(CELLS)
    corner[:4, :4] = 1
    asked = within(view, corner.flatten().tolist())
    assert asked.encode(view.embed(images(1)), torch.tensor([[5, 6]])).abs().max() == 0


# What is said by the frozen network


@kinds
def test_biases_and_tokens_add_up_to_the_logit_at_every_layer(kind: str) -> None:
    view, pixels = within(vitrail.wrap(eomt(kind)), weights().tolist()), images()
    for layer in range(DEPTH + 1):
        made = trace(view, pixels, torch.tensor([1, 3]), rule="frozen", keep=("x", "gx", "bias"), layers=[layer])
        total = (made["x"][layer] * made["gx"][layer]).sum((1, 2)) + made.bias_from(layer)
        assert relative(total, made.y) < 1e-10
    assert made.y.abs().min() > 1e-3


def test_queries_that_wait_stay_as_they_are_and_are_seen_by_no_other_token() -> None:
    module = eomt()
    made = trace(vitrail.wrap(module), images(), rule="plain", keep=("x", "A"))
    for layer in range(DEPTH - 1):
        queries = made["x"][layer][:, :QUERIES]
        assert torch.equal(queries, module.query.weight.expand_as(queries)) == (layer <= 2)
    for layer in range(2):
        assert made["A"][layer][:, :, QUERIES:, :QUERIES].max() == 0
        assert torch.equal(made["A"][layer][:, :, :QUERIES, :QUERIES], torch.eye(QUERIES).expand(2, 2, -1, -1).double())
    assert made["A"][2][:, :, QUERIES:, :QUERIES].min() > 0
    readout = vitrail.wrap(module).readout(images())
    assert torch.allclose(readout.sum(1), torch.ones(2, dtype=DOUBLE))
    assert torch.allclose(readout[:, PREFIX:].sum(1), torch.full((2,), 0.5, dtype=DOUBLE))


# Questions


def left_half() -> np.ndarray:
    mask = np.zeros((40, 60), bool)
    mask[:, :30] = True
    return mask


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("eomt")
    eomt(dtype=SINGLE).save_pretrained(place)
    transformers.EomtImageProcessor(do_pad=True).save_pretrained(place)
    return place


def test_a_region_of_a_saved_segmenter_is_explained(folder: Path, tmp_path: Path) -> None:
    view = vitrail.load(f"hf:{folder}")
    assert view.preprocessing.fit == "border"
    noise(60, 40, 0).save(tmp_path / "noise.png")
    made = vitrail.explain(view, tmp_path / "noise.png", "decompx", target=Region(left_half(), "dog"), against="cow")
    pixels = view.preprocess(noise(60, 40, 0))[None]
    module = transformers.EomtForUniversalSegmentation.from_pretrained(folder)
    region = F.avg_pool2d(view.preprocessing.mask(left_half())[None, None].double(), 2).flatten()
    expected = own(module, pixels, region)[0]  # cells and pixels differ at the border of the mask only
    assert made.split["score"] == pytest.approx(float(expected[1] - expected[4]), abs=0.1)
    exact = in_mask(view, view.preprocessing.mask(left_half())).logits(pixels)[0]
    assert made.split["score"] == pytest.approx(float(exact[1] - exact[4]), abs=1e-5)
    assert sum(made.split.values()) - made.split["score"] == pytest.approx(made.split["score"], abs=1e-5)
    again = vitrail.open(made.save(tmp_path / "out.png"))
    assert again.score(["insertion(steps=4)"]) == made.score(["insertion(steps=4)"])


def test_windows_of_a_semantic_segmenter_are_one_in_the_middle(tmp_path: Path) -> None:
    eomt(dtype=SINGLE).save_pretrained(tmp_path)
    transformers.EomtImageProcessor(do_split_image=True).save_pretrained(tmp_path)
    assert vitrail.load(f"hf:{tmp_path}").preprocessing.box((60, 40)) == (10, 0, 50, 40)


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("decompx.skipplus", {}),
        ("tis", {"masks": 16}),
        pytest.param("rise", {"masks": 8}, marks=pytest.mark.full),
        pytest.param("attn_lrp", {}, marks=pytest.mark.full),
        pytest.param("alti", {}, marks=pytest.mark.full),
        pytest.param("vtranm", {}, marks=pytest.mark.full),
        pytest.param("gen_att", {}, marks=pytest.mark.full),
        pytest.param("raw_attention", {}, marks=pytest.mark.full),
        pytest.param("full_grad", {}, marks=pytest.mark.full),
    ],
)
def test_methods_explain_regions(method: str, params: dict[str, Any]) -> None:
    made = vitrail.explain(vitrail.wrap(eomt()), images(1)[0], method, target=Region(np.eye(32) > 0, 2), **params)
    assert made.map.shape in ((4, 4), (32, 32))
    assert made.map.isfinite().all()
    assert made.map.abs().sum() > 0


def test_relevance_propagation_is_not_defined_for_queries() -> None:
    with pytest.raises(VitrailError, match="not defined for queries"):
        vitrail.explain(vitrail.wrap(eomt()), images(1)[0], "lrp")


def test_without_a_region_the_question_is_the_whole_image() -> None:
    module, pixels = eomt(), images(1)
    made = vitrail.explain(vitrail.wrap(module), pixels[0], "decompx")
    expected = own(module, pixels)[0]
    assert (made.target, made.probability) == (int(expected.argmax()), pytest.approx(float(expected.softmax(0).max())))
    with torch.no_grad():
        tokens = module(images(2)).last_hidden_state[:, PREFIX:].mean(1)
    alike = vitrail.similar(vitrail.wrap(module), *images(2))
    assert alike.score == pytest.approx(float(torch.cosine_similarity(*tokens, dim=0)), abs=1e-6)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Region(np.ones((5, 5), bool), 0), "the mask has 5 × 5 pixels"),
        (Region(np.zeros((32, 32), bool), 0), "the mask is empty"),
        (Region(np.ones((32, 32), bool), "unicorn"), "has no class 'unicorn'"),
        (Region(np.ones((32, 32), bool), 5), "there is no class 5 in"),
        (Contrast(Region(np.ones((32, 32), bool), 0), Region(np.eye(32) > 0, 0)), "at the same place"),
        (Box(0), "detects no boxes"),
    ],
)
def test_wrong_questions_get_one_sentence(target: Any, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.explain(vitrail.wrap(eomt()), images(1)[0], target=target)


def test_attention_masked_as_in_training_is_refused() -> None:
    module = eomt()
    module.attn_mask_probs[1] = 0.5
    with pytest.raises(VitrailError, match=r"masked by its own predictions.*attn_mask_probs\.zero_\(\)"):
        vitrail.wrap(module)
    with pytest.raises(VitrailError, match="has its own heads"):
        vitrail.wrap(eomt(), head=nn.Linear(32, 3), pool="patches")
