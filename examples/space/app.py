"""A Space: upload an image, choose a model, a method and a class; see the map, the likeliest classes and the trust."""

from functools import cache

import gradio as gr
from PIL import Image

import vitrail
from vitrail.calls import split_call
from vitrail.methods.registry import recommended_methods
from vitrail.models.view import View
from vitrail.samples import FOLDER, SAMPLES

# The first two come with the package; the others are downloaded when they are chosen.
MODELS = ("photo", "scenes", "deit_small_patch16_224", "vit_base_patch16_224")
PREDICTED = "the predicted class"
THEME = gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["monospace"])  # no fonts from elsewhere
EXAMPLES = [[str(FOLDER / name), "photo" if name.endswith(".jpg") else "scenes"] for name in SAMPLES]


@cache
def view_of(name: str) -> View:
    """The model, loaded once."""
    return vitrail.load(name)


def methods_of(name: str) -> gr.Dropdown:
    """The methods to choose from, the default first."""
    calls = recommended_methods(view_of(name))
    return gr.Dropdown(calls, value=calls[0], label="Method", key=f"methods of {name}")


def classes_of(name: str) -> gr.Dropdown:
    """The classes to choose from."""
    return gr.Dropdown([PREDICTED, *view_of(name).labels], value=PREDICTED, label="Class", key=f"classes of {name}")


def explain(image: Image.Image | None, name: str, call: str, target: str) -> tuple[Image.Image, dict[str, float], str]:
    """The picture, the likeliest classes, and how far to trust the map."""
    if image is None:
        raise gr.Error("Choose an image first.")
    method, params = split_call(call)
    try:
        ex = vitrail.explain(view_of(name), image, method, None if target == PREDICTED else target, **params)
        picture = ex.picture()  # without the trust, which stands beside it
        ex.trust()
    except vitrail.VitrailError as error:
        raise gr.Error(str(error)) from None
    return picture, {label: probability for _, label, probability in ex.top}, ex.trust_line or ""


with gr.Blocks(title="vitrail") as page:
    gr.Markdown("# vitrail\nWhich patches let the light through? Red speaks for the class, blue against it.")
    with gr.Row():
        with gr.Column():
            image = gr.Image(type="pil", label="Image", height=280)
            model = gr.Dropdown(MODELS, value=MODELS[0], label="Model")
            method, target = methods_of(MODELS[0]), classes_of(MODELS[0])
            button = gr.Button("Explain", variant="primary")
            gr.Examples(EXAMPLES, [image, model])
        with gr.Column():
            picture = gr.Image(label="Explanation", format="png")
            trust = gr.Markdown()
            top = gr.Label(label="Likeliest classes")
    model.change(methods_of, model, method).then(classes_of, model, target)
    button.click(explain, [image, model, method, target], [picture, top, trust], api_name="explain")

if __name__ == "__main__":
    page.launch(theme=THEME)
