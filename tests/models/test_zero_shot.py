"""CLIP and SigLIP of Hugging Face as classifiers whose classes are prompts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests import common, families
from tests.cli.common import noise
from tests.families import PROMPTS, WORDS, expected_logits, images, read_texts, text_embeddings, tokenizer
from tests.helpers import assert_same_state, state_of
from torch import Tensor, nn

import vitrail
from vitrail.engine.trace import trace
from vitrail.errors import VitrailError
from vitrail.metrics.sanity import randomised
from vitrail.models.view import View
from vitrail.models.zero_shot import ZeroShotViT

NAMES = ["hf_clip_text", "hf_siglip_text"]
DOUBLE, SINGLE = torch.float64, torch.float32
LONG = "a photo of the red star of a blue dog"
both = pytest.mark.parametrize("name", NAMES)


def view_of(module: nn.Module, prompts: Any = PROMPTS, **options: Any) -> ZeroShotViT:
    view = vitrail.wrap(module, prompts=prompts, tokenizer=tokenizer(), **options)
    assert isinstance(view, ZeroShotViT)
    return view


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both models as `save_pretrained` writes them, and a classifier."""
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        families.build(name).save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    families.build("hf_vit").save_pretrained(root / "hf_vit")
    families.build("hf_clip").save_pretrained(root / "hf_clip")
    return root


# Logits


@both
@pytest.mark.parametrize(("dtype", "tolerance"), [(DOUBLE, 1e-10), (SINGLE, 1e-5)])
def test_logits_are_those_of_the_module(name: str, dtype: torch.dtype, tolerance: float) -> None:
    family, module, pixels = families.find(name), families.build(name, dtype), images(name, 3, dtype=dtype)
    view, expected = view_of(module), expected_logits(family, module, pixels)
    assert view.labels == PROMPTS
    assert view.num_classes == 5
    size = max(1.0, float(expected.abs().max()))
    assert (view.logits(pixels) - expected).abs().max() <= tolerance * size
    assert (view.module(pixels) - expected).abs().max() <= tolerance * size


def test_clip_has_a_softmax_and_siglip_a_sigmoid() -> None:
    clip, siglip = (view_of(families.build(name)) for name in NAMES)
    assert (clip.output, siglip.output) == ("softmax", "sigmoid")
    pixels = images("hf_siglip_text", 2)
    expected = expected_logits(families.find("hf_siglip_text"), siglip.module.model, pixels).sigmoid()
    assert torch.allclose(siglip.probabilities(siglip.logits(pixels)), expected, atol=1e-6)
    assert view_of(families.build("hf_siglip_text"), output="softmax").output == "softmax"


@both
def test_another_input_size_is_that_of_the_module_with_interpolated_positions(name: str) -> None:
    module, pixels = families.build(name, DOUBLE), torch.randn(1, 3, 48, 48, dtype=DOUBLE)
    view = view_of(module, img_size=48)
    with torch.no_grad():
        expected = module(pixel_values=pixels, interpolate_pos_encoding=True, **read_texts(module)).logits_per_image
    assert view.grid == (6, 6)
    assert torch.allclose(view.logits(pixels), expected, atol=1e-10)
    assert torch.allclose(view.asked_about("a cat").logits(pixels)[:, :5], expected, atol=1e-10)


@both
def test_the_prompts_of_a_class_are_averaged(name: str) -> None:
    module = families.build(name, DOUBLE)
    view = view_of(module, {"dog": ["a photo of a dog", "a dog", "the dog"], "cat": "a cat"})
    mean = text_embeddings(module, ["a photo of a dog", "a dog", "the dog"]).mean(0)
    expected = torch.stack([mean / mean.norm(), text_embeddings(module, ["a cat"])[0]])
    assert torch.allclose(view.texts, expected, atol=1e-12)
    assert view.labels == ("dog", "cat")
    assert view.prompts == {"dog": ["a photo of a dog", "a dog", "the dog"], "cat": ["a cat"]}


def test_a_list_of_prompts_is_named_after_the_first() -> None:
    view = view_of(families.build(NAMES[0]), ["a cat", ["a dog", "the dog"]])
    assert view.labels == ("a cat", "a dog")


@both
def test_the_view_follows_the_weights_and_the_precision_of_the_module(name: str) -> None:
    module = families.build(name)
    view = view_of(module)
    with torch.no_grad():
        module.logit_scale.add_(0.5)
    module.double()
    pixels = images(name, 2, dtype=DOUBLE)
    expected = expected_logits(families.find(name), module, pixels)
    assert (view.logits(pixels) - expected).abs().max() < 1e-5  # the embeddings of the texts were rounded


# Other texts


@both
def test_a_new_text_becomes_a_class(name: str) -> None:
    module, pixels = families.build(name, DOUBLE), images(name, 2, dtype=DOUBLE)
    view = view_of(module)
    before, fingerprint = view.logits(pixels), view.fingerprint()
    ex = vitrail.explain(view, pixels[0], target="the blue cat", against="a red ring")
    assert (ex.label, ex.against_label, ex.target, ex.against) == ("the blue cat", "a red ring", 5, 6)
    assert isinstance(ex.model, ZeroShotViT)
    after = ex.model.logits(pixels)
    assert torch.allclose(after[:, :5], before, rtol=0, atol=1e-14)
    with torch.no_grad():
        expected = module(pixel_values=pixels, **read_texts(module, [*PROMPTS, "the blue cat", "a red ring"]))
    assert torch.allclose(after, expected.logits_per_image, atol=1e-10)
    assert view.labels == PROMPTS
    assert torch.equal(view.logits(pixels), before)
    assert view.fingerprint() == fingerprint != ex.model.fingerprint()


def test_what_is_a_class_already_adds_none() -> None:
    view = view_of(families.build(NAMES[0]))
    for known in ("a dog", "A Dog", "a_dog", 3, "3", " +3 ", None, torch.tensor([1, 2]), ["a dog", 2], [[1]]):
        assert view.asked_about(known) is view
    assert view.asked_about(["the cat", "The cat", 1], "a ring").labels == (*PROMPTS, "the cat", "a ring")
    others = vitrail.wrap(families.build("hf_vit"))
    assert others.asked_about("the cat") is others


def test_texts_for_several_images() -> None:
    view, pixels = view_of(families.build(NAMES[0])), images(NAMES[0], 3)
    explanations = vitrail.explain(view, pixels, target=["a cat", 1, "a cat"])
    assert [ex.label for ex in explanations] == ["a cat", PROMPTS[1], "a cat"]


@both
def test_a_new_text_in_inference_mode(name: str) -> None:
    view, pixels = view_of(families.build(name)), images(name, 1)
    expected = vitrail.explain(view, pixels[0], "input_x_gradient", "a cat").map
    with torch.inference_mode():
        ex = vitrail.explain(view, pixels[0], "input_x_gradient", "a cat")
    assert torch.allclose(ex.map, expected)


# Explanations


@both
@pytest.mark.parametrize(("method", "params"), [("decompx", {}), ("full_grad", {"rule": "frozen"})])
def test_contributions_add_up_to_the_logit(name: str, method: str, params: dict[str, Any]) -> None:
    view = view_of(families.build(name, DOUBLE))
    ex = vitrail.explain(view, images(name, 1, dtype=DOUBLE)[0], method, "the blue cat", **params)
    assert ex.extras["completeness_gap"] < 1e-9


@both
def test_randomised_copies_leave_the_model_alone(name: str) -> None:
    module, pixels = families.build(name), images(name, 1)
    view = view_of(module).asked_about("a cat")
    before, logits = state_of(module), view.logits(pixels)
    drawn = [twin.logits(pixels) for twin in randomised(view, "cascading", 0)]
    assert all(not torch.allclose(first, second) for first, second in zip([logits, *drawn], drawn, strict=False))
    assert torch.equal(view.logits(pixels), logits)
    assert_same_state(before, state_of(module))


# Loading and saving


@both
def test_a_folder_is_loaded_with_its_tokenizer(name: str, folders: Path) -> None:
    view = vitrail.load(f"hf:{folders / name}", prompts=list(PROMPTS), device="cpu")
    pixels = images(name, 2)
    expected = expected_logits(families.find(name), families.build(name), pixels)
    assert torch.allclose(view.logits(pixels), expected, atol=1e-5)
    assert not view.module.training
    assert not any(parameter.requires_grad for parameter in view.module.parameters())
    assert view.spec == {"name": f"hf:{folders / name}", "prompts": {text: [text] for text in PROMPTS}}


@both
def test_texts_are_embedded_in_the_precision_asked_for(name: str, folders: Path) -> None:
    view = vitrail.load(f"hf:{folders / name}", prompts=list(PROMPTS), device="cpu", dtype="float64")
    pixels = images(name, 2, dtype=DOUBLE)
    expected = expected_logits(families.find(name), families.build(name, DOUBLE), pixels)
    assert torch.allclose(view.logits(pixels), expected, atol=1e-10)


def test_the_processor_of_two_towers_is_read(folders: Path, tmp_path: Path) -> None:
    from transformers import CLIPImageProcessor, CLIPProcessor

    folder = tmp_path / "with_processor"
    shutil.copytree(folders / NAMES[0], folder)
    pictures = CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(pictures, tokenizer()).save_pretrained(folder)
    preprocessing = vitrail.load(f"hf:{folder}", prompts=["a cat", "a dog"], device="cpu").preprocessing
    assert (preprocessing.fit, preprocessing.resize, preprocessing.interpolation) == ("crop", 40, "bicubic")


@both
def test_a_saved_explanation_finds_its_prompts(name: str, folders: Path, tmp_path: Path) -> None:
    noise(0).save(tmp_path / "photo.png")
    view = vitrail.load(f"hf:{folders / name}", prompts={"cat": ["a cat", "the cat"], "dog": "a dog"}, device="cpu")
    ex = vitrail.explain(view, tmp_path / "photo.png", target="a red star", against="cat")
    ex.save(tmp_path / "map.png")
    again = vitrail.open(tmp_path / "map.json")
    assert isinstance(again.model, ZeroShotViT)
    assert again.model.labels == ("cat", "dog", "a red star")
    assert (again.label, again.against_label) == ("a red star", "cat")
    assert torch.equal(again.map, ex.map)
    assert again.trust().score == pytest.approx(ex.trust().score, abs=1e-5)
    other = vitrail.load(f"hf:{folders / name}", prompts=["cat", "dog", "a red star"], device="cpu")
    with pytest.raises(VitrailError, match="its weights changed"):
        vitrail.open(tmp_path / "map.json", model=other)


# What is left alone, and what is refused


def failing(*_: Any, **__: Any) -> dict[str, Tensor]:
    raise RuntimeError("no such word\nin this language")


@both
def test_the_module_is_never_changed(name: str) -> None:
    module = families.build(name).train()
    module.vision_model.register_forward_hook(lambda *_: None)
    before, modes = state_of(module), [part.training for part in module.modules()]
    view = view_of(module)
    vitrail.explain(view, images(name, 1)[0], "full_grad", "a red cat", against="a ring")
    with pytest.raises(VitrailError, match=r"cannot encode the prompts \(RuntimeError: no such word\)"):
        vitrail.wrap(module, prompts=["a cat", "a dog"], tokenizer=failing)
    with pytest.raises(VitrailError, match="tokens"):
        view.asked_about(LONG)
    assert_same_state(before, state_of(module))
    assert [part.training for part in module.modules()] == modes
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "CLIPModel has no classes of its own: give prompts="),
        ("a cat", "prompts must be a list of texts"),
        (7, "prompts must be a list of texts"),
        ([], "there are no prompts: give at least two"),
        (["a cat"], "one prompt has nothing to be compared with"),
        ({"cat": ["a cat", "the cat"]}, "one prompt has nothing to be compared with"),
        (["a cat", "a dog", "a cat"], "prompts hold 'a cat' twice"),
        (["a cat", " "], "a prompt is a text that is not empty, but got ' '"),
        (["a cat", []], r"a prompt is a text that is not empty, but got \[\]"),
        (["a cat", ["a dog", 1]], "a prompt is a text that is not empty"),
        ([1, 2], "a prompt is a text that is not empty, but got 1"),
        ({"": "a cat", "dog": "a dog"}, "the name of a class must be a text that is not empty"),
        (["a cat", LONG], f"the prompt '{LONG}' has 12 tokens, but the model takes at most 8"),
    ],
)
def test_wrong_prompts_are_refused(prompts: Any, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(families.build(NAMES[0]), prompts=prompts, tokenizer=tokenizer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "needs the tokenizer of CLIPModel: give tokenizer="),
        ({"tokenizer": "openai/clip"}, "cannot encode the prompts"),
        ({"labels": ["cat", "dog"]}, "labels= contradicts prompts="),
        ({"head": nn.Linear(32, 2), "pool": "token"}, "head= contradicts prompts="),
        ({"pool": "token"}, "pool= goes with head="),
    ],
)
def test_wrong_company_of_prompts_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(families.build(NAMES[0]), prompts=["a cat", "a dog"], **{"tokenizer": tokenizer(), **options})


@pytest.mark.parametrize("name", ["timm_vit", "hf_vit", "hf_clip", "torchvision_vit", "timm_swin"])
def test_a_classifier_takes_no_prompts(name: str) -> None:
    module = families.build(name)
    with pytest.raises(
        VitrailError, match=f"prompts= is for CLIPModel, SiglipModel, Siglip2Model .* got {type(module).__name__}"
    ):
        view_of(module)
    with pytest.raises(VitrailError, match="tokenizer= goes with prompts="):
        vitrail.wrap(module, tokenizer=tokenizer())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "photo takes no prompts, which are for scenes-text and for CLIP and SigLIP of Hugging Face"),
        ("scenes", "scenes takes no prompts"),
        ("vit_tiny_patch16_224", "vit_tiny_patch16_224 takes no prompts"),
        ("torchvision:vit_b_16", "torchvision:vit_b_16 takes no prompts"),
    ],
)
def test_other_names_take_no_prompts(name: str | None, message: str) -> None:
    for prompts in (["a cat", "a dog"], ["a cat"], []):  # however many they are
        with pytest.raises(VitrailError, match=f"^{message}"):
            vitrail.load(name, prompts=prompts)


def test_whether_a_folder_takes_prompts_is_asked_before_how_many(folders: Path) -> None:
    with pytest.raises(VitrailError, match=r"prompts= is for CLIPModel, .* but got ViTForImageClassification"):
        vitrail.load(f"hf:{folders / 'hf_vit'}", prompts=["a cat"])
    with pytest.raises(VitrailError, match="one prompt has nothing to be compared with: give at least two"):
        vitrail.load(f"hf:{folders / NAMES[0]}", prompts=["a cat"])


def test_folders_that_cannot_be_asked_about_texts(folders: Path, tmp_path: Path) -> None:
    prompts = ["a cat", "a dog"]
    for name in NAMES:
        with pytest.raises(VitrailError, match=r"has no classes of its own: give prompts=.*--prompt"):
            vitrail.load(f"hf:{folders / name}")
        shutil.copytree(folders / name, tmp_path / name, ignore=shutil.ignore_patterns("tokenizer*"))
        with pytest.raises(VitrailError, match="has no tokenizer"):
            vitrail.load(f"hf:{tmp_path / name}", prompts=prompts)
    with pytest.raises(VitrailError, match="prompts= is for CLIPModel, SiglipModel, Siglip2Model"):
        vitrail.load(f"hf:{folders / 'hf_vit'}", prompts=prompts)
    with pytest.raises(VitrailError, match="both towers are needed"):
        vitrail.load(f"hf:{folders / 'hf_clip'}", prompts=prompts)


def test_an_unreadable_text_is_refused_by_explain() -> None:
    view: View = view_of(families.build(NAMES[0]))
    picture = Image.new("RGB", (32, 32))
    with pytest.raises(VitrailError, match="takes at most 8"):
        vitrail.explain(view, picture, target=LONG)
    with pytest.raises(VitrailError, match="a prompt is a text that is not empty"):
        vitrail.explain(view, picture, target=" ")


# SigLIP 2 of any resolution: it reads patches and the shape of their grid


def siglip2(dtype: torch.dtype = DOUBLE) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = families._huggingface_texts("Siglip2")
    families.randomize(module, seed=0)
    return module.eval().to(dtype)


def patches(pixels: Tensor, padding: int = 3) -> dict[str, Tensor]:
    """(B, 3, H, W) as the library's own function cuts them, with padding that is masked."""
    from transformers.models.siglip2.image_processing_siglip2 import convert_image_to_patches, pad_along_first_dim

    grid = pixels.shape[2] // 8, pixels.shape[3] // 8
    cut = [pad_along_first_dim(convert_image_to_patches(image, 8), grid[0] * grid[1] + padding) for image in pixels]
    return {
        "pixel_values": torch.stack([values for values, _ in cut]),
        "pixel_attention_mask": torch.stack([mask for _, mask in cut]),
        "spatial_shapes": torch.tensor([grid] * len(pixels)),
    }


@pytest.mark.parametrize("size", [(32, 32), (24, 40)], ids=["native", "another shape"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(DOUBLE, 1e-10), (SINGLE, 1e-5)])
def test_logits_of_siglip_2_are_those_of_the_module(
    size: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    module = siglip2(dtype)
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = state_of(module)
    view = view_of(module, img_size=size)
    with torch.no_grad():
        expected = module(**patches(pixels), **read_texts(module)).logits_per_image
    assert (view.logits(pixels) - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))
    assert_same_state(before, state_of(module))
    assert (view.grid, view.output) == ((size[0] // 8, size[1] // 8), "sigmoid")
    made = trace(view, pixels, rule="frozen", keep=("x", "gx", "bias"), layers=[0])
    total = (made["x"][0] * made["gx"][0]).sum((1, 2)) + made.bias_from(0)
    assert torch.allclose(total, made.y, rtol=0, atol=tolerance * max(1.0, float(expected.abs().max())))


def test_siglip_2_is_loaded_with_its_tokenizer_and_processor(tmp_path: Path) -> None:
    from transformers import Siglip2ImageProcessor, Siglip2Tokenizer

    module, texts = siglip2(SINGLE), ["a cat", "a dog", "a goat"]
    module.save_pretrained(tmp_path)
    letters = Siglip2Tokenizer(vocab={letter: i for i, letter in enumerate([*WORDS[:4], *"▁acdgot"])}, merges=[],
                               pad_token="<pad>", eos_token="</s>", bos_token="<s>", mask_token="<unk>")  # fmt: skip
    letters.save_pretrained(tmp_path)
    processor = Siglip2ImageProcessor(patch_size=8, max_num_patches=16)
    processor.save_pretrained(tmp_path)
    view, photo = vitrail.load(f"hf:{tmp_path}", prompts=texts), common.noise(50, 50, 0)
    read = processor(photo, return_tensors="pt")
    numbers = letters(texts, padding="max_length", max_length=8, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = module(**read, input_ids=numbers).logits_per_image
    assert len(expected.unique()) == 3
    assert view.grid == tuple(read["spatial_shapes"][0].tolist()) == (4, 4)
    assert torch.allclose(view.logits(view.preprocess(photo)[None]), expected, rtol=0, atol=1e-4)
    assert vitrail.explain(view, photo, "decompx", target="a toad").label == "a toad"


def test_a_classifier_and_a_tower_of_siglip_2_are_seen_through() -> None:
    import transformers

    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.Siglip2Config(vision_config=tiny | {"patch_size": 8, "num_patches": 16}, num_labels=3)
    with torch.random.fork_rng(devices=[]):
        module = transformers.Siglip2ForImageClassification(config)
    families.randomize(module, seed=0)
    module.eval().double()
    pixels = torch.randn(2, 3, 32, 32, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = module(**patches(pixels))
        pooled = module.vision_model(**patches(pixels)).pooler_output
    assert torch.allclose(vitrail.wrap(module).logits(pixels), out.logits, atol=1e-10)
    head = nn.Linear(32, 4).double()
    view = vitrail.wrap(module.vision_model, head=head, pool="map")
    assert torch.allclose(view.logits(pixels), head(pooled), atol=1e-10)
