"""Targets beyond one class: groups, texts, similarity to another image, functions; and what is refused."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tests import families
from tests.common import LABELS, noise
from tests.families import PROMPTS, expected_embedding, expected_logits, tokenizer
from tests.helpers import (
    DOUBLE,
    assert_same_state,
    batch,
    close,
    refusals,
    relative,
    required_parameters,
    state_of,
    viewed,
)
from torch import Tensor, nn

import vitrail
from vitrail import VitrailError
from vitrail.explanation import Explanation
from vitrail.methods.registry import list_methods
from vitrail.metrics.sanity import randomised
from vitrail.models.questions import answering, compared, grouped
from vitrail.models.view import View
from vitrail.show.plots import curve_picture
from vitrail.targets import Callable, Class, Contrast, Group, Region, Similarity, Text, read_groups

VIT, SWIN = "timm_vit", "timm_swin"
QUICK = {"steps": 3, "samples": 8, "masks": 12, "permutations": 4, "window": 16, "stride": 8}
CLASS_SPECIFIC = [name for name, info in list_methods().items() if info.class_specific]
# What targets do to a sum over layers is what they do to its layers: two of the sums, or all for `make test-all`.
ASKED = [m for m in CLASS_SPECIFIC if families.FULL or "." not in m or m in ("decompx.skipplus", "full_grad_plus.plus")]
ON_SWIN = [name for name in CLASS_SPECIFIC if (name, "hierarchical") not in refusals()]
SIMILAR = [
    "timm_vit_not_square",
    "timm_vit_avg",
    "timm_vit_max",
    "timm_siglip",
    "timm_deit3",
    "timm_dinov2_giant",
    "timm_dinov2_reg4",
    "timm_headless_token",
    "torchvision_vit",
    "hf_vit",
    "hf_dinov2",
    "hf_clip",
    "hf_clip_text",
    "hf_siglip_text",
]


def quick(method: str, view: View) -> dict[str, Any]:
    params = list_methods()[method].params
    return {key: value for key, value in QUICK.items() if key in params} | required_parameters(method, view)


def explained(method: str, target: Any, name: str = VIT, against: Any = None) -> Explanation:
    _, _, view = viewed(name)
    return vitrail.explain(view, batch(name, 2)[0], method, target, against=against, **quick(method, view))


def maps(method: str, target: Any, name: str = VIT, against: Any = None, count: int = 2) -> Tensor:
    """Of several images: those of methods that drop what is negative may be zero for some."""
    _, _, view = viewed(name)
    explanations = vitrail.explain(view, batch(name, count), method, target, against=against, **quick(method, view))
    return torch.stack([ex.map for ex in explanations])


@functools.cache
def maps_of_class(method: str, name: str, target: int) -> Tensor:
    return maps(method, target, name)


@functools.cache
def labelled() -> View:
    return vitrail.wrap(families.build(VIT, DOUBLE), labels=LABELS)


def logits_of(name: str = VIT, count: int = 2) -> Tensor:
    """By the library itself."""
    family, module, _ = viewed(name)
    return expected_logits(family, module, batch(name, count))


def one_output(classes: int = 1) -> nn.Module:
    module = families.build(VIT, DOUBLE)
    head = nn.Linear(families.WIDTH, classes, dtype=DOUBLE)
    families.randomize(head, 3)
    module.head = head
    return module


# Groups


def test_the_logit_of_a_group_is_the_log_of_a_sum_and_its_probability_the_sum() -> None:
    view, logits = viewed(VIT)[2], logits_of()
    asked = grouped(view, {"some": [1, 3], "other": [4]})
    assert asked.num_classes == 4
    assert asked.labels == ("some", "other", "class 0", "class 2")
    expected = torch.stack([logits[:, [1, 3]].logsumexp(1), logits[:, 4], logits[:, 0], logits[:, 2]], 1)
    torch.testing.assert_close(asked.class_scores(asked.logits(batch(VIT, 2))), expected)
    p = logits.softmax(1)
    sums = torch.stack([p[:, 1] + p[:, 3], p[:, 4], p[:, 0], p[:, 2]], 1)
    torch.testing.assert_close(asked.probabilities(logits), sums)
    torch.testing.assert_close(asked.log_probabilities(logits), sums.log())
    ex = explained("decompx", Group([1, 3]))
    assert ex.probability == pytest.approx(float(p[0, 1] + p[0, 3]), abs=1e-12)
    assert ex.extras["score"] == pytest.approx(float(logits[0, [1, 3]].logsumexp(0)), abs=1e-9)
    ranked = sorted([float(p[0, 1] + p[0, 3]), *p[0, [0, 2, 4]].tolist()], reverse=True)
    assert [value for _, _, value in ex.top] == pytest.approx(ranked, abs=1e-12)


def test_where_classes_do_not_exclude_each_other_any_member_may_apply() -> None:
    view = vitrail.wrap(families.build(VIT, DOUBLE), output="sigmoid")
    logits = logits_of()
    p = logits.sigmoid()
    any_of = 1 - (1 - p[:, 0]) * (1 - p[:, 2]) * (1 - p[:, 3])
    asked = grouped(view, {"any": [0, 2, 3]})
    torch.testing.assert_close(asked.probabilities(logits), torch.cat([any_of[:, None], p[:, [1, 4]]], 1))
    torch.testing.assert_close(asked.class_scores(logits)[:, 0], torch.logit(any_of))
    ex = vitrail.explain(view, batch(VIT, 1)[0], "decompx", Group([0, 2, 3]))
    assert ex.probability == pytest.approx(float(any_of[0]), abs=1e-12)
    assert ex.extras["completeness_gap"] < 1e-9


@pytest.mark.parametrize("size", [1, 30, 120, 3000])
def test_extreme_logits_of_independent_classes_stay_finite(size: float) -> None:
    view = grouped(vitrail.wrap(families.build(VIT), output="sigmoid"), {"any": [0, 1, 2]})
    for signs in ([-1, -1, -1], [1, 1, 1], [-1, 1, -1], [0, -1, -1]):
        logits = (size * torch.tensor([[*signs, 0, 0]]).float()).requires_grad_()
        scores = view.class_scores(logits)
        (gradient,) = torch.autograd.grad(scores[:, 0].sum(), logits)
        assert scores.isfinite().all(), signs
        assert gradient.isfinite().all(), signs
        exact = torch.logit(1 - (1 - logits[0, :3].double().sigmoid()).prod()) if size == 1 else None
        assert exact is None or torch.allclose(scores[0, 0].double(), exact, atol=1e-5)
        assert float(scores[0, 0]) >= float(logits[0, :3].max()) - 1e-4


def test_a_head_with_one_output_has_two_classes_to_group() -> None:
    module = one_output()
    view, pixels = vitrail.wrap(module, labels=["no", "yes"]), batch(VIT, 1)
    with torch.no_grad():
        z = module(pixels)[0, 0]
    for name, sign in (("no", -1), ("yes", 1)):
        ex = vitrail.explain(view, pixels[0], "decompx", Group([name]))
        assert ex.label == name
        assert ex.probability == pytest.approx(float((sign * z).sigmoid()), abs=1e-9)
        assert ex.extras["score"] == pytest.approx(float(sign * z), abs=1e-9)
        assert relative(ex.map, vitrail.explain(view, pixels[0], "decompx", name).map) < 1e-6
    with pytest.raises(VitrailError, match="all 2 classes"):
        vitrail.explain(view, pixels[0], target=Group(["no", "yes"]))


@pytest.mark.parametrize(
    ("classes", "members"),
    [
        ([1, 3], [1, 3]),
        ((3, 1, 1), [1, 3]),
        ({3, 1}, [1, 3]),
        (range(2), [0, 1]),
        (np.array([1, 3]), [1, 3]),
        (torch.tensor([1, 3]), [1, 3]),
        (["bee", "DOG"], [1, 3]),
        ("bee, dog", [1, 3]),
        ("bee", [1]),
        ("*e*", [1, 4]),
        (["?nt", "d*", 4], [0, 3, 4]),
        ("[ab]*", [0, 1]),
        ("B?E,3", [1, 3]),
    ],
)
def test_classes_by_index_name_and_pattern(classes: Any, members: list[int]) -> None:
    assert Group(classes).members(labelled()) == members


def test_patterns_know_synonyms() -> None:
    labels = [
        "Tibetan terrier, chrysanthemum dog",
        "Boston bull, Boston_terrier",
        "tabby, tabby cat",
        "terrapin",
        "pug",
    ]
    view = vitrail.wrap(families.build(VIT), labels=labels)
    assert Group("*terrier").members(view) == [0, 1]
    assert Group("*terr*").members(view) == [0, 1, 3]
    assert Group(["boston-*", "* cat"]).members(view) == [1, 2]
    assert Group("tabby, tabby cat").members(view) == [2]


def test_groups_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "groups.txt"
    path.write_text("\ufeff# animals\n\ninsects: ant, bee  # six legs\nlarge : d*, elk\n", encoding="utf-8")
    groups = read_groups(path)
    assert {name: group.members(labelled()) for name, group in groups.items()} == {"insects": [0, 1], "large": [3, 4]}
    ex = vitrail.explain(labelled(), batch(VIT, 1)[0], target=groups["insects"], against=groups["large"])
    assert (ex.label, ex.against_label) == ("insects", "large")
    for text, message in (
        ("insects ant", "line 1 of .* is 'insects ant': expected `name: class, class, …`"),
        ("\nx:", "line 2 of"),
        (": ant", "line 1 of"),
        ("a: ant\na: bee", "holds the group 'a' twice"),
    ):
        path.write_text(text)
        with pytest.raises(VitrailError, match=message):
            read_groups(path)
    for wrong, reason in ((tmp_path / "none.txt", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(VitrailError, match=rf"^cannot read the groups of {re.escape(str(wrong))}: {reason}\.$"):
            read_groups(wrong)
    path.write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(VitrailError, match=r"^cannot read the groups of .*: it is not text in UTF-8\.$"):
        read_groups(path)


@pytest.mark.parametrize(
    ("group", "label"),
    [
        (Group([1]), "bee"),
        (Group([2, 1]), "bee or cat"),
        (Group([0, 1, 2]), "ant or 2 other classes"),
        (Group("b*"), "b*"),
        (Group([1, 2], "flying"), "flying"),
    ],
)
def test_the_name_of_a_group(group: Group, label: str) -> None:
    assert vitrail.explain(labelled(), batch(VIT, 1)[0], target=group).label == label


def difference(first: list[int], second: list[int]) -> float:
    z = logits_of(VIT, 1)[0]
    return float(z[first].logsumexp(0) - z[second].logsumexp(0))


@pytest.mark.parametrize(
    ("target", "against", "score"),
    [
        (Group([0, 1]), Group([2, 4]), lambda: difference([0, 1], [2, 4])),
        (Group([0, 1]), 4, lambda: difference([0, 1], [4])),
        (3, Group([0, 1]), lambda: difference([3], [0, 1])),
        ("dog", Group([0, "bee"]), lambda: difference([3], [0, 1])),
        (Class("dog"), Group("[ab]*"), lambda: difference([3], [0, 1])),
        (Contrast(Group([0, 1]), Class(4)), None, lambda: difference([0, 1], [4])),
        (Contrast(3, "elk"), None, lambda: difference([3], [4])),
    ],
)
def test_rivals_of_groups(target: Any, against: Any, score: Any) -> None:
    view, image = labelled(), batch(VIT, 1)[0]
    ex = vitrail.explain(view, image, "decompx", target, against=against)
    assert ex.extras["score"] == pytest.approx(score(), abs=1e-9)
    assert ex.extras["completeness_gap"] < 1e-9
    assert ex.against_label is not None
    assert ex.against_probability is not None


def test_a_contrast_of_groups_is_the_difference_of_their_explanations() -> None:
    for method in ("decompx.skipplus", "full_grad", "shapley", "rise"):
        first, second, both = (
            explained(method, target).map
            for target in (Group([0, 1]), Group([2, 3]), Contrast(Group([0, 1]), Group([2, 3])))
        )
        assert relative(both, first - second) < 1e-5, method


def test_a_list_has_a_target_for_each_image() -> None:
    _, _, view = viewed(VIT)
    images, targets = batch(VIT, 3), [Group([0, 1]), Group([2, 3]), 1]
    together = vitrail.explain(view, images, "decompx", targets)
    for image, target, explanation in zip(images, targets, together, strict=True):
        alone = vitrail.explain(view, image, "decompx", target)
        assert (explanation.label, explanation.probability) == (alone.label, pytest.approx(alone.probability))
        assert close(explanation.map, alone.map, 1e-5)
    with pytest.raises(VitrailError, match="there are 2 targets for 3 images"):
        vitrail.explain(view, images, "decompx", targets[:2])


def test_the_predicted_class_rather_than_a_group_is_the_prediction_of_the_model() -> None:
    """Not the group, even where the group is more probable than the predicted class."""
    module = families.build(VIT, DOUBLE)
    with torch.no_grad():
        module.head.weight.mul_(0.01)
        module.head.bias.copy_(torch.tensor([0.5, 0.5, 0.0, 1.0, -1.0]))
    view, image = vitrail.wrap(module, labels=LABELS), batch(VIT, 1)[0]
    with torch.no_grad():
        z = module(image[None])[0]
    assert int(z.argmax()) == 3
    assert float(z[[0, 1]].logsumexp(0)) > float(z[3]), "the group comes first"
    for method in ("decompx", "rise"):
        ex = vitrail.explain(
            view, image, method, against=Group([0, 1], "small"), **({"masks": 8} if method == "rise" else {})
        )
        assert (ex.label, ex.against_label) == ("dog", "small")
    direct = vitrail.explain(view, image, "decompx", 3, against=Group([0, 1], "small"))
    ex = vitrail.explain(view, image, "decompx", against=Group([0, 1], "small"))
    assert torch.equal(ex.map, direct.map)
    with pytest.raises(VitrailError, match="target and against are both large"):
        vitrail.explain(view, image, "decompx", against=Group(["dog", "elk"], "large"))


@pytest.mark.parametrize(
    "name", ["timm_vit_not_square", "timm_vit_avg", "timm_siglip", "hf_dinov2_swiglu", "hf_clip_text"]
)
@pytest.mark.parametrize(
    ("method", "params"), [("decompx", {}), ("decompx.plus", {}), ("full_grad", {"rule": "frozen"})]
)
def test_contributions_and_biases_add_up_to_the_logit_of_a_group(
    name: str, method: str, params: dict[str, Any]
) -> None:
    """The entropy of the members' weights belongs to no patch: it is a bias."""
    _, _, view = viewed(name)
    logits = logits_of(name, 1)[0]
    for target, score in (
        (Group([0, 2, 3]), logits[[0, 2, 3]].logsumexp(0)),
        (Contrast(Group([0, 1]), Group([2, 4])), logits[:2].logsumexp(0) - logits[[2, 4]].logsumexp(0)),
    ):
        ex = vitrail.explain(view, batch(name, 1)[0], method, target, **params)
        assert ex.extras["completeness_gap"] < 1e-9
        assert ex.split is not None
        parts = sum(value for part, value in ex.split.items() if part != "score")
        assert ex.split["score"] == pytest.approx(float(score), abs=1e-9)
        assert parts == pytest.approx(float(score), abs=1e-9)
        assert ex.split["patches"] * ex.extras.get("score_layers", 1) == pytest.approx(float(ex.map.sum()), abs=1e-4)


# One of each family of methods.
RIVALS = ("decompx", "full_grad", "trans_att", "vtranm", "bt_t", "hires_cam", "rise", "shapley", "posterior", "atman")
RIVALS += ("vit_shapley", "integrated_gradients")


@pytest.mark.parametrize("method", ASKED)
def test_a_group_of_one_class_is_this_class(method: str) -> None:
    assert relative(maps(method, Group([3])), maps_of_class(method, VIT, 3)) < 1e-6
    if method in RIVALS:
        rivals = maps(method, Group([3]), against=Group([1]))
        assert relative(rivals, maps(method, 3, against=1)) < 1e-6


def test_values_of_a_trained_explainer_add_up_over_a_group() -> None:
    expected = sum(explained("vit_shapley", target).map for target in (1, 3))
    ex = explained("vit_shapley", Group([1, 3]))
    assert relative(ex.map, expected) < 1e-5
    assert ex.split is not None
    assert ex.split["patches"] + ex.split["baseline"] == pytest.approx(ex.probability, abs=1e-6)
    for target in (Similarity(batch(VIT, 2)[1]), Callable(lambda tokens, pooled, logits: logits[:, 0])):
        with pytest.raises(VitrailError, match="explainers are trained for the classes of a model alone"):
            explained("vit_shapley", target)


# Similarity


@pytest.mark.parametrize("name", SIMILAR)
def test_similarity_is_that_of_the_embeddings_of_the_library(name: str) -> None:
    family, module, view = viewed(name)
    images = batch(name, 2)
    first, second = expected_embedding(family, module, images)
    for measure, expected in (("cosine", F.cosine_similarity(first, second, dim=0)), ("dot", first @ second)):
        ex = vitrail.explain(view, images[0], "input_x_gradient", Similarity(images[1], measure))
        assert ex.probability == pytest.approx(float(expected), rel=1e-9, abs=1e-9)
        assert (ex.measure, ex.label) == (measure, "similarity to the other image")
    itself = vitrail.explain(view, images[0], "input_x_gradient", Similarity(images[0]))
    assert itself.probability == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", ["timm_vit_not_square", "timm_vit_avg", "timm_dinov2_reg4"])
def test_similarity_to_a_patch(name: str) -> None:
    family, module, view = viewed(name)
    images = batch(name, 2)
    with torch.no_grad():
        tokens = module.fc_norm(module.forward_features(images[1:])[0])
    first = expected_embedding(family, module, images[:1])[0]
    rows, columns = family.grid
    for row, column in ((0, 0), (rows - 1, columns - 1), (1, 2)):
        ex = vitrail.explain(view, images[0], "input_x_gradient", Similarity(images[1], patch=(row, column)))
        expected = F.cosine_similarity(first, tokens[family.prefix + row * columns + column], dim=0)
        assert ex.probability == pytest.approx(float(expected), abs=1e-9)
        assert ex.label == f"similarity to patch ({row}, {column}) of the other image"


def test_a_contrast_of_two_similarities() -> None:
    _, _, view = viewed(VIT)
    image, *others = batch(VIT, 3)
    singles = [vitrail.explain(view, image, "decompx", Similarity(other)) for other in others]
    ex = vitrail.explain(view, image, "decompx", Similarity(others[0]), against=Similarity(others[1]))
    assert relative(ex.map, singles[0].map - singles[1].map) < 1e-5
    assert ex.extras["score"] == pytest.approx(singles[0].probability - singles[1].probability, abs=1e-9)
    assert (ex.probability, ex.against_probability) == pytest.approx(
        [single.probability for single in singles], abs=1e-9
    )
    assert (ex.label, ex.against_label) == ("similarity to image 1", "similarity to image 2")
    assert torch.equal(vitrail.explain(view, image, "decompx", Contrast(*map(Similarity, others))).map, ex.map)


def test_the_other_image_in_any_form(photo: Image.Image, tmp_path: Path) -> None:
    view, image = labelled(), batch(VIT, 1)[0]
    photo.save(tmp_path / "other.png")
    forms = [tmp_path / "other.png", str(tmp_path / "other.png"), photo, np.asarray(photo), view.preprocess(photo)]
    explanations = [vitrail.explain(view, image, target=Similarity(form)) for form in forms]
    for ex in explanations[1:]:
        assert ex.probability == pytest.approx(explanations[0].probability, abs=1e-6)
    assert explanations[0].label == "similarity to other.png"
    assert vitrail.explain(view, image, target=Similarity(photo, name="mine")).label == "similarity to mine"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_blur_the_other_embedding(dtype: torch.dtype) -> None:
    module = families.build("timm_vit_not_square").to(dtype)
    image = batch("timm_vit_not_square", 1, torch.float32)[0]
    ex = vitrail.explain(vitrail.wrap(module), image, "decompx", Similarity(image))
    assert ex.probability == pytest.approx(1, abs=1e-5)
    assert ex.extras["score_pairs"] + ex.extras["score_pairs_rest"] == pytest.approx(ex.probability, abs=1e-5)


# Functions


def logit(tokens: Any, pooled: Any, logits: Tensor) -> Tensor:
    return logits[:, 3]


def probability(tokens: Any, pooled: Any, logits: Tensor) -> Tensor:
    return logits.softmax(1)[:, 3]


def log_probability(tokens: Any, pooled: Any, logits: Tensor) -> Tensor:
    return logits.log_softmax(1)[:, 3]


# What a method explains of a class where it is not the logit.
EXPLAINED = {"atman": log_probability}
EXPLAINED |= dict.fromkeys(
    ("greedy", "kernel_shap", "occlusion", "pami", "rise", "shapley", "tis", "vit_cx"), probability
)


@pytest.mark.parametrize("method", [name for name in ASKED if name not in ("vit_shapley", "posterior")])
def test_a_function_that_is_a_class_gives_its_map(method: str) -> None:
    function = EXPLAINED.get(method, logit)
    assert relative(maps(method, Callable(function)), maps_of_class(method, VIT, 3)) < 1e-6


def test_the_posterior_of_a_function_is_that_of_the_log_odds() -> None:
    """They are the logit where classes do not exclude each other."""
    view, image = vitrail.wrap(families.build(VIT, DOUBLE), output="sigmoid"), batch(VIT, 1)[0]
    expected, ex = (vitrail.explain(view, image, "posterior", target, masks=40) for target in (3, Callable(logit)))
    assert relative(ex.map, expected.map) < 1e-6
    assert ex.error is not None
    assert expected.error is not None
    assert relative(ex.error, expected.error) < 1e-6


def test_the_score_of_a_function_is_its_value() -> None:
    for function in (logit, probability, log_probability):
        ex = explained("gradient", Callable(function))
        assert ex.probability == pytest.approx(float(function(None, None, logits_of(VIT, 1))[0]), abs=1e-9)
        assert (ex.label, ex.measure) == (function.__name__, "score")


@pytest.mark.parametrize("method", [name for name in ON_SWIN if name != "pami"])
def test_a_function_of_the_logits_of_a_hierarchical_model(method: str) -> None:
    def function(tokens: Any, pooled: Any, logits: Tensor) -> Tensor:
        assert tokens is None
        assert pooled is None
        return EXPLAINED.get(method, logit)(tokens, pooled, logits)

    expected = explained(method, 3, SWIN).map
    assert relative(explained(method, Callable(function), SWIN).map, expected) < 1e-6
    assert relative(explained(method, Group([3]), SWIN).map, expected) < 1e-6


def test_a_function_gets_tokens_pooled_vectors_and_logits() -> None:
    for name in ("timm_dinov2_reg4", "timm_vit_avg", "timm_siglip", "hf_clip", "timm_deit_distilled"):
        family, module, view = viewed(name)
        images, seen = batch(name, 2), {}

        def function(tokens: Tensor, pooled: Tensor, logits: Tensor, seen: dict[str, Tensor] = seen) -> Tensor:
            seen.update(tokens=tokens.detach(), pooled=pooled.detach(), logits=logits.detach())
            return pooled[:, 0]

        vitrail.explain(view, images, "gradient", Callable(function))
        torch.testing.assert_close(seen["logits"], expected_logits(family, module, images))
        assert seen["tokens"].shape == (2, family.tokens, families.WIDTH)
        if name == "timm_deit_distilled":
            with torch.no_grad():
                expected = module.forward_features(images)[:, :2].mean(1)
        else:
            expected = expected_embedding(family, module, images)
        torch.testing.assert_close(seen["pooled"], expected)
        if family.library == "timm":
            with torch.no_grad():
                torch.testing.assert_close(seen["tokens"], module.forward_features(images))


@pytest.mark.parametrize(
    "function",
    [
        lambda tokens, pooled, logits: pooled.square().sum(1) / 7 - 3,
        lambda tokens, pooled, logits: tokens[:, 1:, 5].mean(1) - logits[:, 2],
        lambda tokens, pooled, logits: tokens[:, 1:].amax(1).sum(1),
        lambda tokens, pooled, logits: -(logits.softmax(1) * logits.log_softmax(1)).sum(1),
    ],
    ids=["norm", "patches", "largest", "entropy"],
)
@pytest.mark.parametrize(
    "method", ["gradient", "decompx", "integrated_gradients", "rise", "shapley", "posterior", "tis"]
)
def test_any_number_of_the_network_can_be_explained(function: Any, method: str) -> None:
    ex = explained(method, Callable(function))
    assert ex.map.isfinite().all()
    assert float(ex.map.std()) > 0
    family, module, _ = viewed(VIT)
    with torch.no_grad():
        tokens = module.forward_features(batch(VIT, 1))
    expected = function(tokens, expected_embedding(family, module, batch(VIT, 1)), logits_of(VIT, 1))
    assert ex.probability == pytest.approx(float(expected[0]), abs=1e-9)


def test_the_gradient_of_a_function_is_that_of_autograd() -> None:
    _, module, _ = viewed(VIT)
    pixels = batch(VIT, 1).requires_grad_()

    def function(tokens: Tensor, pooled: Tensor, logits: Tensor) -> Tensor:
        return (tokens[:, 2] * pooled).sum(1).tanh() + logits[:, 1].square()

    tokens = module.forward_features(pixels)
    pooled = module.forward_head(tokens, pre_logits=True)
    (gradient,) = torch.autograd.grad(function(tokens, pooled, module.head(pooled)).sum(), pixels)
    ex = vitrail.explain(viewed(VIT)[2], pixels.detach()[0], "smooth_grad", Callable(function), samples=1, sigma=0.0)
    assert relative(ex.map, gradient[0].abs().sum(0).float()) < 1e-5


# Every method with every kind of target


def other() -> Tensor:
    return batch(VIT, 2)[1]


KINDS: dict[str, Any] = {
    "class": lambda: Class(3),
    "contrast": lambda: Contrast(3, Class(0)),
    "group": lambda: Group([0, 2, 3]),
    "groups": lambda: Contrast(Group([0, 2]), Group([1, 4])),
    "similarity": lambda: Similarity(other()),
    "dot": lambda: Similarity(other(), "dot"),
    "patch": lambda: Similarity(other(), patch=(1, 2)),
    "similarities": lambda: Contrast(Similarity(other()), Similarity(other().flip(2))),
    "function": lambda: Callable(lambda tokens, pooled, logits: tokens[:, 1:, 0].mean(1) + pooled[:, 1] * logits[:, 0]),
}


@pytest.mark.parametrize("method", [name for name in ASKED if name != "vit_shapley"])
def test_every_method_takes_every_target(method: str) -> None:
    few = ("groups", "similarity", "function")  # for sums over layers, and pami, which is slow
    for kind in few if "." in method or method == "pami" else KINDS:
        values = maps(method, KINDS[kind](), count=6 if sum(list_methods()[method].cost) < 4 else 1)
        assert values.isfinite().all(), kind
        assert float(values.std()) > 1e-7 * float(values.abs().max()) > 0, kind


@pytest.mark.parametrize("method", [name for name in list_methods() if name not in CLASS_SPECIFIC])
def test_class_agnostic_methods_ignore_the_target_and_refuse_contrasts(method: str) -> None:
    expected = explained(method, 0).map
    for kind in ("group", "similarity", "function"):
        assert torch.equal(explained(method, KINDS[kind]()).map, expected), kind
    for kind in ("contrast", "groups", "similarities"):
        with pytest.raises(VitrailError, match="is the same for every class: against= has no meaning for it"):
            explained(method, KINDS[kind]())


# Texts


def texts() -> View:
    return vitrail.wrap(families.build("hf_clip_text", DOUBLE), prompts=list(PROMPTS), tokenizer=tokenizer())


def test_a_text_and_its_spellings() -> None:
    view, image = texts(), batch("hf_clip_text", 1)[0]
    expected = vitrail.explain(view, image, target="the blue cat", against="a dog")
    for target, against in (
        (Text("the blue cat"), Text("a dog")),
        (Contrast(Text("the blue cat"), "a dog"), None),
        (Text("the blue cat"), Class(4)),
    ):
        ex = vitrail.explain(view, image, target=target, against=against)
        assert (ex.label, ex.against_label) == ("the blue cat", "a dog")
        assert torch.equal(ex.map, expected.map)
    both = vitrail.explain(view, [image, image], target=[Text("a ring"), Class(2)])
    assert [ex.label for ex in both] == ["a ring", PROMPTS[2]]


def test_groups_of_texts() -> None:
    view, image = texts(), batch("hf_clip_text", 1)[0]
    logits = logits_of("hf_clip_text", 1)[0]
    ex = vitrail.explain(view, image, "decompx", Group("a photo*"), against="the red star")
    assert ex.extras["score"] == pytest.approx(float(logits[:2].logsumexp(0) - logits[2]), abs=1e-9)
    ex = vitrail.explain(view, image, "decompx", Text("a red cat"), against=Group(["a dog", "a blue ring"]))
    assert (ex.label, ex.against_label) == ("a red cat", "a blue ring or a dog")
    assert ex.extras["completeness_gap"] < 1e-9


# What is refused


def wrong_shape(tokens: Any, pooled: Any, logits: Tensor) -> Tensor:
    return logits


def unchecked(target: Any, against: Any = None, name: str = VIT, method: str | None = None) -> Any:
    view = labelled() if name == VIT else viewed(name)[2]
    return vitrail.explain(view, batch(name, 1)[0], method, target, against=against)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (Group([]), {}, "a group needs at least one class"),
        (Group(3), {}, "a group is a list of classes, or their names as a text, but got 3"),  # type: ignore[arg-type]
        (Group(iter([3])), {}, "a group is a list of classes"),  # type: ignore[arg-type]
        (Group(range(5)), {}, "the group holds all 5 classes of .*: nothing is left to ask"),
        (Group("*"), {}, "holds all 5 classes"),
        (Group("x*"), {}, r"no class of vit_base_patch16_224 matches 'x\*'"),
        (Group("cow"), {}, "has no class 'cow'"),
        (Group([5]), {}, "there is no class 5"),
        (Group([0.5]), {}, "a class is an integer or a name, but got 0.5"),  # type: ignore[list-item]
        (Group(""), {}, "the name of a class is empty: give a name or a number"),
        (Group("bee,"), {}, "the name of a class is empty"),
        (Class(" "), {}, "the name of a class is empty"),
        (True, {}, "a class is an integer or a name, but got True"),
        (np.array([True]), {}, "but got True"),
        (Group([False]), {}, "but got False"),
        (logit, {}, r"the function logit is no class: ask about a function as targets.Callable\(function\)"),
        (3, {"against": lambda tokens, pooled, logits: logits[:, 0]}, "the function <lambda> is no class"),
        (Region(np.ones((3, 7))), {}, "has no output per patch"),  # whatever the size of the mask
        (Group("b*"), {"name": "timm_vit_avg"}, r"has no class names that 'b\*' could match"),
        (Group([0, 1]), {"against": Group([1, 2])}, "'bee' is both in the target and in what it is opposed to"),
        (Group([0, 1]), {"against": 1}, "'bee' is both in the target"),
        (Group([0, 1], "x"), {"against": Group([2, 3], "x")}, "both groups are called 'x': give them names"),
        (Group([0]), {"against": "similar"}, "a Group cannot be opposed to a Similarity: both must be"),
        ("similar", {"against": Group([0])}, "a Similarity cannot be opposed to a Group"),
        ("similar", {"against": 3}, "a Similarity cannot be opposed to 3: both must be questions of one kind"),
        (3, {"against": "similar"}, "3 cannot be opposed to a Similarity"),
        (None, {"against": "similar"}, "the predicted class cannot be opposed to a Similarity"),
        (Callable(logit), {"against": "similar"}, "a Callable cannot be opposed to a Similarity"),
        (Callable(logit), {"against": Callable(logit)}, "explained by itself: let it return the difference"),
        (Contrast(0, 1), {"against": 2}, "a Contrast names what its target is opposed to"),
        (Contrast(Contrast(0, 1), 2), {}, "a class is an integer or a name"),
        ([Group([0]), Group([1])], {}, "there are 2 targets for 1 images: give one, or one per image"),
        (Text("a cat"), {}, "reads no texts: ask about one of its classes, or load a model of images and texts with"),
        (Text("bee"), {}, "reads no texts"),
        (Text(" "), {}, "a prompt is a text that is not empty, but got ' '"),
        (Text(None), {}, "a prompt is a text that is not empty, but got None"),  # type: ignore[arg-type]
        (Text("a cat"), {"name": SWIN}, "reads no texts"),
        (Text(" "), {"name": "hf_clip_text"}, "a prompt is a text that is not empty"),
        (Text("3"), {"name": "hf_clip_text"}, "the prompt '3' would be the number of a class"),
        ("similar", {"name": SWIN}, "has no embedding that can be compared: expected a plain Vision Transformer"),
        ("patch", {"name": SWIN}, "has no embedding that can be compared"),
        ("similar", {"name": "timm_deit_distilled"}, "two tokens with two heads and has no single embedding"),
        ("similar", {"name": "hf_deit_teacher"}, "has no single embedding"),
        ("patch", {"name": "timm_siglip"}, "its head pools by 'attention', so that a patch has no embedding"),
        ("patch", {"name": "hf_dinov2"}, "so that a patch has no embedding"),
        (Similarity("cat.png", patch=(4, 0)), {}, r"has 4 × 4 patches, so there is no patch \(4, 0\)"),
        (Similarity("cat.png", patch=(0, -1)), {}, r"so there is no patch \(0, -1\)"),
        (Similarity("cat.png", patch=(0, 1, 2)), {}, r"patch must be .* but got \(0, 1, 2\)"),  # type: ignore[arg-type]
        (Similarity("cat.png", patch=3), {}, "patch must be two integers"),  # type: ignore[arg-type]
        (Similarity("cat.png", patch=(0.5, 1)), {}, "patch must be two integers"),  # type: ignore[arg-type]
        (Similarity("none.png"), {}, "none.png"),
        (Similarity(torch.zeros(3, 8, 8)), {}, r"a tensor must be a normalised image of shape \(3, 32, 32\)"),
        (Similarity(torch.full((3, 32, 32), torch.nan)), {}, "NaN or infinite"),
        (Similarity("cat.png", "euclid"), {}, "measure must be \"cosine\" or \"dot\", .* but got 'euclid'"),  # type: ignore[arg-type]
        ("similar", {"against": Similarity("cat.png", "dot")}, "but got 'cosine' and 'dot'"),
        (Similarity("cat.png", name="x"), {"against": Similarity("cat.png", name="x")}, "images have the same name"),
        (Callable(3), {}, r"a function of \(tokens, pooled, logits\) was expected, but got 3"),  # type: ignore[arg-type]
        (Callable(wrong_shape), {}, r"wrong_shape must return .* of shape \(1,\), not .* \(1, 5\)"),
        (Callable(wrong_shape), {"name": SWIN}, r"floats of shape \(\d+,\), not"),
        (Callable(lambda tokens, pooled, logits: 3.0), {}, "must return a number for each image, .* not float"),  # type: ignore[arg-type, return-value]
        (Callable(lambda tokens, pooled, logits: logits.argmax(1)), {}, r"not torch.int64 \(1,\)"),
        (Callable(lambda tokens, pooled, logits: logits[0, 3]), {}, r"not torch.float64 \(\)"),
        (Callable(lambda tokens: tokens), {}, r"function failed \(TypeError: "),  # type: ignore[arg-type]
        (Callable(lambda tokens, pooled, logits: logits[:, 9]), {}, r"function failed \(IndexError: "),
        (Callable(lambda tokens, pooled, logits: pooled[:, 0]), {"name": SWIN}, "of a model that gives it no tokens"),
        (Callable(lambda tokens, pooled, logits: logits[:, 3].detach()), {}, "cannot be differentiated"),
        (Callable(lambda tokens, pooled, logits: torch.ones(len(logits))), {"method": "full_grad"}, "cannot be differ"),
        (Callable(lambda tokens, pooled, logits: logits.detach()[:, 1]), {"name": SWIN, "method": "grad_cam"}, "dif"),
    ],
)  # fmt: skip
def test_wrong_questions_are_refused_in_one_sentence(
    target: Any, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    noise(64, 64, 0).save("cat.png")
    forms = {"similar": Similarity(noise(40, 40, 1)), "patch": Similarity("cat.png", patch=(0, 1))}
    target = forms.get(target, target) if isinstance(target, str) else target
    against = options.get("against")
    options = {**options, "against": forms.get(against, against) if isinstance(against, str) else against}
    with pytest.raises(VitrailError, match=message) as refused:
        unchecked(target, **options)
    text = str(refused.value)
    assert "\n" not in text
    assert "tensor(" not in text
    assert len(text) < 400


def test_a_question_about_a_question_is_refused() -> None:
    view = labelled()
    for asked in (
        grouped(view, {"some": [0, 1]}),
        compared(view, {"other": [0.1] * families.WIDTH}, "dot"),
        answering(view, logit, "logit"),
    ):
        for target in (Group([0]), Callable(logit), Similarity(other())):
            with pytest.raises(VitrailError, match=r"a view for a question already|holds all"):
                vitrail.explain(asked, other(), target=target)


# What is left alone


@pytest.mark.parametrize("kind", [*KINDS])
def test_the_model_is_left_as_it_was(kind: str) -> None:
    module = families.build(VIT, DOUBLE).train()
    module.blocks[0].register_forward_hook(lambda *_: None)
    module.head.requires_grad_(False)
    before, modes = state_of(module), [part.training for part in module.modules()]
    view = vitrail.wrap(module)
    fingerprint, logits = view.fingerprint(), view.logits(batch(VIT, 1))
    for method in ("decompx", "rise", "full_grad"):
        ex = vitrail.explain(view, batch(VIT, 1)[0], method, KINDS[kind](), **quick(method, view))
        assert ex.model is not None
        assert (ex.model.fingerprint() == fingerprint) == (kind in ("class", "contrast"))
        assert ex.model.module is module
    assert (view.fingerprint(), view.question, view.groups, view.output) == (fingerprint, None, (), "softmax")
    assert torch.equal(view.logits(batch(VIT, 1)), logits)
    assert_same_state(before, state_of(module))
    assert [part.training for part in module.modules()] == modes
    assert not module.head.weight.requires_grad


def raising(error: BaseException) -> Any:
    """A function that fails."""

    def failing(tokens: Any, pooled: Any, logits: Tensor) -> Tensor:
        raise error

    return failing


@pytest.mark.parametrize("name", [VIT, SWIN])
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("no such probe"), r"\(ValueError: no such probe\)\."),
        (ZeroDivisionError("division by zero."), r"\(ZeroDivisionError: division by zero\)\."),
        (RuntimeError("shapes differ\nsee above"), r"\(RuntimeError: shapes differ\)\."),
        (AssertionError(), r"\(AssertionError\)\."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_function_that_fails_leaves_the_model_alone(name: str, error: Exception, shown: str) -> None:
    module = families.build(name)
    before, view = state_of(module), vitrail.wrap(module)

    with pytest.raises(VitrailError, match=rf"^failing failed.*{shown}$") as refused:
        vitrail.explain(view, batch(name, 1, torch.float32)[0], "grad_cam", Callable(raising(error)))
    assert refused.value.__cause__ is error
    assert_same_state(before, state_of(module))


def test_a_function_can_be_interrupted_and_run_out_of_memory() -> None:
    for error, raised, message in (
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
        (MemoryError(), VitrailError, "one image at a time does not fit in memory"),
    ):
        with pytest.raises(raised, match=message):
            vitrail.explain(labelled(), batch(VIT, 1)[0], target=Callable(raising(error)))


def test_embeddings_of_other_images_are_no_weights_of_the_model() -> None:
    """Randomising a copy of the model from the head down keeps what it is compared with."""
    for dtype in (torch.float32, DOUBLE):
        _, _, view = viewed(VIT, dtype)
        weights = torch.linspace(-1, 1, families.WIDTH, dtype=DOUBLE).tolist()
        asked = compared(view, {"other": weights}, "dot")
        for twin in randomised(asked, "cascading", 0):
            kept = twin.architecture().head.linears[0].weight[0]
            assert torch.equal(kept, torch.tensor(weights, dtype=DOUBLE).to(dtype))


@pytest.mark.parametrize("kind", ["group", "similarity", "patch", "function"])
def test_a_batch_is_its_images_one_by_one(kind: str) -> None:
    _, _, view = viewed(VIT)
    images = batch(VIT, 3)
    for method in ("decompx.skipplus", "rise", "shapley"):
        together = vitrail.explain(view, images, method, KINDS[kind](), batch_size=2, **quick(method, view))
        for image, ex in zip(images, together, strict=True):
            alone = vitrail.explain(view, image, method, KINDS[kind](), **quick(method, view))
            assert ex.probability == pytest.approx(alone.probability, abs=1e-9)
            assert relative(ex.map, alone.map) < 1e-5


# Captions, files


Kept = Literal["group", "groups", "similarity", "patch", "similarities"]


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    noise(48, 40, 5).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.mark.parametrize("kind", ["group", "groups", "similarity", "dot", "patch", "similarities"])
def test_a_saved_explanation_asks_its_question_again(kind: Kept, picture: Path, tmp_path: Path) -> None:
    view = vitrail.wrap(families.build(VIT), labels=LABELS)
    ex = vitrail.explain(view, picture, "decompx", KINDS[kind]())
    scores, trust = ex.score(), ex.trust()
    ex.save(tmp_path / "map.png")
    again = vitrail.open(tmp_path / "map.json", model=vitrail.wrap(families.build(VIT), labels=LABELS))
    assert again.model is not None
    assert ex.model is not None
    assert again.model.question == ex.model.question is not None
    assert again.model.fingerprint() == ex.model.fingerprint() != view.fingerprint()
    assert (again.title, again.detail, again.trust_line) == (ex.title, ex.detail, ex.trust_line)
    assert (again.score_line, again.measure, again.label) == (ex.score_line, ex.measure, ex.label)
    assert torch.equal(again.map, ex.map)
    assert (again.pairs is None) == (ex.pairs is None) == (kind not in ("similarity", "dot", "patch"))
    assert ex.pairs is None or torch.equal(again.pairs, ex.pairs)
    assert again.score() == pytest.approx(scores, abs=1e-6)
    assert again.trust().score == pytest.approx(trust.score, abs=1e-6)
    other_weights = vitrail.wrap(families.build(VIT, seed=1), labels=LABELS)
    with pytest.raises(VitrailError, match="its weights changed"):
        vitrail.open(tmp_path / "map.json", model=other_weights)
    posed = vitrail.open(tmp_path / "map.json", model=ex.model)
    assert posed.model is ex.model
    assert vitrail.open(tmp_path / "map.json", check=False).model is None


def test_scores_that_are_scaled_say_so(picture: Path, tmp_path: Path) -> None:
    """The empty and the full image are 0 and 1 of their curves; what they are is told, and kept in the file."""
    view = vitrail.wrap(families.build(VIT), labels=LABELS)
    names = ["insertion(steps=4)", "deletion(steps=4)", "insertion_minus_deletion(steps=4)"]
    ex = vitrail.explain(view, picture, "gradient", Similarity(noise(40, 40, 1)))
    values = ex.score([*names, "sparseness"])
    assert ex.model is not None
    pixels = view.preprocess(ex.image)[None]
    mean = pixels.mean((2, 3), keepdim=True).expand_as(pixels)
    empty, full = (float(ex.model.logits(each)[0, 0]) for each in (mean, pixels))
    assert ex.scale == {name: pytest.approx([empty, full], abs=1e-5) for name in names}
    assert all(ex.curves[name][place] == pytest.approx(0) for name, place in zip(names[:2], (0, -1), strict=True))
    assert values[names[2]] == pytest.approx(values[names[0]] - values[names[1]], abs=1e-5)
    assert ex.detail.endswith(" · scaled: empty image 0, full image 1")
    assert vitrail.open(ex.save(tmp_path / "map.png"), model=view).scale == ex.scale
    of_class = vitrail.explain(view, picture, "gradient", Group([0, 1]))
    of_class.score(names)
    assert (of_class.scale, of_class.scale_line, "scaled" in of_class.detail) == ({}, None, False)


def test_a_plot_of_scores_shows_all_of_their_curves() -> None:
    far = {"insertion": [0.0, -3.0, 1.0]}
    cut, whole = (curve_picture(far, {"insertion": -1.0}, "a score", scaled) for scaled in (None, "scaled"))
    colour = np.array([0x0B, 0x7A, 0x75])

    def drawn(plot: Image.Image) -> int:
        """The number of columns of pixels with the line."""
        return int((np.abs(np.asarray(plot).astype(int) - colour).sum(2) < 40).any(0).sum())

    assert drawn(whole) > 2 * drawn(cut)


def test_rows_of_scores_have_their_scale() -> None:
    view, photos = vitrail.wrap(families.build(VIT), labels=LABELS), [noise(48, 40, seed) for seed in range(2)]
    arguments = (view, photos, ["gradient"], ["insertion(steps=2)", "sparseness"])
    rows = vitrail.evaluate(*arguments, target=Similarity(photos[0]))
    assert list(rows.columns)[-1] == "scale"
    assert rows["scale"].notna().tolist() == [True, False, True, False]
    assert rows["scale"][0][1] == pytest.approx(1, abs=1e-5), "the photograph itself"
    assert "scale" not in vitrail.evaluate(*arguments, target=Group([0, 1]))


def test_two_questions_to_one_model_have_two_fingerprints() -> None:
    view, image = viewed(VIT, torch.float32)[2], batch(VIT, 1, torch.float32)[0]
    targets = [Group([0]), Group([0, 1]), Similarity(image), Similarity(image, "dot"), Similarity(image, patch=(0, 0))]
    prints = {vitrail.explain(view, image, "gradient", target).model.fingerprint() for target in targets}  # type: ignore[union-attr]
    assert len(prints | {view.fingerprint()}) == 6


def test_a_function_is_not_stored(picture: Path, tmp_path: Path) -> None:
    view = vitrail.wrap(families.build(VIT))
    ex = vitrail.explain(view, picture, "gradient", Callable(logit, name="class three"))
    ex.save(tmp_path / "map.png")
    with pytest.raises(
        VitrailError, match="the function 'class three' was explained, which is not stored: give its view"
    ):
        vitrail.open(tmp_path / "map.json", model=view)
    again = vitrail.open(tmp_path / "map.json", model=ex.model)
    assert again.title == ex.title
    assert again.score() == pytest.approx(ex.score(), abs=1e-6)


def test_captions_of_scores_have_no_percent(picture: Path) -> None:
    view = vitrail.wrap(families.build(VIT), labels=LABELS)
    ex = vitrail.explain(view, picture, "decompx", Similarity(noise(40, 40, 1), name="the map"))
    assert ex.title == f"similarity to the map (cosine {ex.probability:.3f})".replace("-", "−")
    assert ex.score_line is not None
    assert ex.score_line.startswith("cosine ")
    ex.trust()
    assert ex.trust_line is not None
    removed = ex.trust_line.partition("takes")[2].partition(";")[0]
    assert "%" not in removed.replace("a random 10%", "")
    assert "-" not in ex.trust_line
    assert ex.picture().size[0] > 0
    dot = vitrail.explain(
        view, picture, "decompx", Similarity(noise(40, 40, 1), "dot"), against=Similarity(picture, "dot")
    )
    assert dot.title.count("dot ") == 2
    assert dot.score_line is not None
    assert dot.score_line.startswith("dot difference ")
    below = vitrail.explain(
        view,
        picture,
        "gradient",
        Callable(lambda tokens, pooled, logits: logits[:, 0] * 0 - 2.5 + logits[:, 1] * 0, "depth"),
    )
    assert below.title == "depth (score −2.500)"
    group = vitrail.explain(view, picture, "decompx", Group([1, 2], "small ones"))
    assert group.title == f"small ones ({group.probability:.1%})"
    assert group.score_line is not None
    assert group.score_line.startswith("logit ")


@pytest.mark.parametrize("kind", ["similarities", "groups"])
def test_trust_in_a_contrast_is_about_the_difference(kind: str, picture: Path) -> None:
    view = vitrail.wrap(families.build(VIT))
    ex = vitrail.explain(view, picture, "decompx", KINDS[kind]())
    score = torch.tensor(ex.extras["score"])
    expected = score if kind == "similarities" else score.sigmoid()
    assert ex.trust().probability == pytest.approx(float(expected), abs=1e-5)


def test_trust_in_a_score_does_not_depend_on_its_sign() -> None:
    """Patches whose removal lowers the score are evidence, also where the score is below zero."""
    view, image = viewed(VIT, torch.float32)[2], batch(VIT, 1, torch.float32)[0]
    falls = []
    for offset in (0.0, -100.0):
        ex = vitrail.explain(
            view, image, "occlusion", Callable(lambda tokens, pooled, logits, offset=offset: 10 * logits[:, 3] + offset)
        )
        falls.append(ex.trust())
    assert falls[1].probability < 0
    assert falls[0].drop == pytest.approx(falls[1].drop, abs=1e-3)
    assert falls[1].drop > falls[1].random_drop
    assert falls[1].score > max(0.0, falls[1].agreement) / 2
