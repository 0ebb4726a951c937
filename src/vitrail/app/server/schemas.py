"""Forms and answers, from which the OpenAPI description is generated, and the errors of invalid fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import UploadFile
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MAX_NAME = 200  # characters
MAX_LIST = 4000  # characters of a list of methods, or of parameters as JSON
MAX_PATCHES = 100_000  # more than any model has

# Pydantic's error types in our words.
MESSAGES = {
    "string_too_long": "expected at most {max_length} characters",
    "too_long": "expected at most {max_length} characters",
    "string_type": "expected text",
    "string_pattern_mismatch": "expected the id of an earlier upload, as returned by /api/predict",
    "int_parsing": "expected an integer",
    "int_parsing_size": "expected a smaller integer",
    "int_from_float": "expected an integer",
    "int_type": "expected an integer",
    "greater_than_equal": "expected {ge} or more",
    "less_than_equal": "expected {le} or less",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "literal_error": "expected {expected}",
    "extra_forbidden": "there is no such field, see /api/docs",
    "missing": "the field is missing",
}


def describe_error(error: Mapping[str, Any]) -> str:
    """A pydantic error as a sentence, without the value, which may be long."""
    name = ".".join(str(part) for part in error["loc"][1:])[:80] or "the form"
    if name in ("image", "other"):
        return f"{name}: expected a file, but got text."
    message = MESSAGES.get(error["type"])
    if message is not None:
        return f"{name}: {message.format(**error.get('ctx', {}))}."
    message = error["msg"].removeprefix("Value error, ")  # raised by a validator below
    return f"{name}: {message[:1].lower()}{message[1:]}."


def _parameters(text: str) -> str:
    """A JSON object without NaN or infinity."""
    if not isinstance(_json(text), dict):
        raise ValueError('expected a JSON object such as {"masks": 256}')
    return text


def _patches(text: str) -> str:
    """A JSON list of patch indices."""
    indices = _json(text)
    if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < MAX_PATCHES for index in indices):
        raise ValueError("expected a JSON list of patch indices such as [0, 17]")
    return text


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ValueError("expected JSON") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _class(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Name = Annotated[str, Field(max_length=MAX_NAME)]
Class = Annotated[str, BeforeValidator(_class), Field(max_length=MAX_NAME)]
Classes = Annotated[str, Field(max_length=MAX_LIST)]
Space = Literal["pixels", "tokens"]
Storage = Literal["mark", "hide"]
Trusting = Annotated[bool, Field(description="Whether to ask the model how far to trust the map.")]
Steps = Annotated[int, Field(ge=1, le=256)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Parameters = Annotated[str, Field(max_length=MAX_LIST), AfterValidator(_parameters)]
Patches = Annotated[str, Field(max_length=8 * MAX_PATCHES), AfterValidator(_patches)]
Pair = Annotated[list[int], Field(min_length=2, max_length=2)]
Box = Annotated[list[float], Field(min_length=4, max_length=4)]
Index = Annotated[int, Field(ge=0)]
Measured = Annotated[float, Field(description="A probability, or the score that measure names.")]
Measure = Annotated[str, Field(description="probability; or cosine, dot: of a similarity.")]


class Form(BaseModel):
    """Fields of every form; exactly one of image, picture and sample names the picture."""

    model_config = ConfigDict(extra="forbid")

    image: UploadFile | None = Field(None, description="An image file: JPEG, PNG, WebP, GIF, BMP or AVIF.")
    picture: Sha256 | None = Field(None, description="The id of an earlier upload that is still in memory.")
    sample: Name | None = Field(None, description="The name of a sample from /api/samples.")
    model: Name | None = Field(None, description="A model from /api/models; default: the first.")


class JobForm(Form):
    """With wait=false the answer is a job."""

    wait: bool = True


class QuestionForm(Form):
    """Fields that choose what is asked: a class, here or there, any of several, or the similarity to a picture."""

    target: Class | None = Field(
        None,
        description="The class, by index or name; default: the predicted class. Models that read texts take any text.",
    )
    against: Class | None = Field(None, description="Explain the target rather than this class or text.")
    group: Classes | None = Field(
        None, description="Instead of target, any of several classes: names, numbers and patterns, comma-separated."
    )
    against_group: Classes | None = Field(None, description="Instead of against, any of several classes, likewise.")
    box: Annotated[int, Field(ge=0, le=MAX_PATCHES)] | None = Field(
        None, description="The target is that of a box of a detector: its query, as /api/predict lists the boxes."
    )
    region: Patches | None = Field(
        None,
        description="The target is that of a region of a segmentation: a JSON list of cells, such as those of a "
        "segment that /api/predict lists.",
    )
    other: UploadFile | None = Field(
        None, description="Instead of a class, the similarity to this image file, by the embeddings of both."
    )
    other_picture: Sha256 | None = Field(None, description="The same by the id of an earlier upload.")
    other_sample: Name | None = Field(None, description="The same by the name of a sample.")
    measure: Literal["cosine", "dot"] | None = Field(
        None, description="How embeddings are compared; default: by their cosine."
    )


class PredictForm(QuestionForm, JobForm):
    """Which class is it?"""

    top: Annotated[int, Field(ge=1, le=100)] = 5


class MapForm(QuestionForm):
    """Fields that choose an explanation."""

    method: Name | None = Field(None, description="A method from /api/methods; default: the model's.")
    params: Parameters | None = Field(None, description='Parameters of the method as a JSON object: {"masks": 256}.')


class ExplainForm(MapForm, JobForm):
    """Why this class?"""

    trust: Trusting = True
    pairs: bool = Field(
        False, description="Also split a similarity into shares of pairs of patches, by decompx; takes a while."
    )


class PictureForm(MapForm):
    """Why this class, as a picture?"""

    trust: Trusting = True
    storage: Storage = Field("mark", description="Whether patches used as storage are only marked, or not coloured.")


class TrustForm(MapForm, JobForm):
    """How far to trust the map?"""


class ScoreForm(MapForm, JobForm):
    """How faithful is the map?"""

    steps: Steps = 32
    space: Space = "pixels"


class MaskForm(QuestionForm, JobForm):
    """What if these patches were missing?"""

    removed: Patches | None = Field(None, description="Patches to remove: a JSON list of indices.")
    kept: Patches | None = Field(None, description="Patches to keep: a JSON list of indices.")


class CompareForm(QuestionForm, JobForm):
    """What do many methods say?"""

    methods: Annotated[str, Field(max_length=MAX_LIST)] | None = Field(
        None, description="Comma-separated names or calls, such as rise(masks=256); default: the recommended methods."
    )
    score: bool = True
    trust: Trusting = True
    steps: Steps = 32
    space: Space = "pixels"


class Problem(BaseModel):
    """An error, in one sentence."""

    error: str


class Health(BaseModel):
    """Whether the server is running, and the number of waiting jobs."""

    status: Literal["ok"]
    version: str
    queue: int


class Model(BaseModel):
    """A model that can be explained."""

    id: str
    name: str
    classes: int
    input: Pair
    grid: Pair
    view: Literal["tokens", "features", "logits"]
    asks: list[Literal["class", "group", "text", "box", "region", "similarity"]]
    default_method: str
    note: str
    labels: list[str]


class Parameter(BaseModel):
    """One parameter of a method, for a form."""

    name: str
    kind: Literal["integer", "number", "boolean", "choice", "text", "numbers"]
    default: Any
    choices: list[Any] | None
    optional: bool


class Method(BaseModel):
    """A method; ``supported`` is "yes" or the reason why it does not support the model."""

    model_config = ConfigDict(populate_by_name=True)

    name: str
    family: str
    class_specific: bool = Field(alias="class-specific")
    level: Literal["token", "pixel"]
    cost: str
    aliases: list[str]
    parameters: dict[str, Any]
    paper: str
    summary: str
    supported: str
    form: list[Parameter]


class SampleRow(BaseModel):
    """A sample picture."""

    name: str
    title: str
    model: str | None
    url: str
    thumbnail: str


class ClassRow(BaseModel):
    """A class and its probability, or a score."""

    index: Index
    label: str
    probability: Measured


class BoxRow(BaseModel):
    """A box of a detector, in pixels of the picture: what one of its queries says."""

    query: Index
    target: Index
    label: str
    probability: float
    box: Box


class SegmentRow(BaseModel):
    """A connected part of the picture with one predicted class; the cells are those of the class map, row by row."""

    target: Index
    label: str
    cells: list[Index]


class Prediction(BaseModel):
    """The most probable classes; in ``asked`` the target and what it is opposed to, where the form names them.

    ``boxes`` of a detector, the surest first; ``segments`` of a segmentation model, the largest first, on a class map
    of ``cells`` rows and columns.
    """

    picture: Sha256
    other: Sha256 | None = None
    model: str
    measure: Measure
    size: Pair
    box: Box
    grid: Pair
    classes: list[ClassRow]
    asked: list[ClassRow]
    boxes: list[BoxRow] | None = None
    cells: Pair | None = None
    segments: list[SegmentRow] | None = None
    seconds: float


class Packed(BaseModel):
    """Numbers, row by row."""

    shape: list[int]
    dtype: Literal["float32"]
    base64: str


class TrustRow(BaseModel):
    """What the model says about a map; see ``vitrail.metrics.trust.Trust``."""

    score: float | None
    drop: float | None
    random_drop: float | None
    agreement: float | None
    interval: Annotated[list[float | None], Field(min_length=2, max_length=2)]
    patch_share: float | None
    probability: float | None


class Explained(BaseModel):
    """The JSON of ``vitrail explain --json``, with the map as rows of numbers.

    ``values`` is the map; ``shares`` is the map as it is drawn, where prefix tokens and biases are spread evenly.
    ``pairs`` are the shares of pairs of patches in a similarity: a row per patch of the picture, a column per patch of
    the other.
    """

    model_config = ConfigDict(extra="allow")

    picture: Sha256
    other: Sha256 | None = None
    model_id: str
    method: str
    params: dict[str, Any]
    call: str
    title: str
    target: Index
    label: str
    measure: Measure
    probability: Measured
    against: int | None
    against_label: str | None
    against_probability: Measured | None
    extras: dict[str, float | None]
    split: dict[str, float | None] | None
    score_line: str | None
    storage: list[Index]
    storage_line: str | None
    trust: TrustRow | None
    trust_line: str | None
    seconds: float
    box: Box
    grid: Pair
    shape: Pair
    reduced: bool
    values: list[list[float]]
    shares: list[list[float]]
    standard_error: list[list[float]] | None
    tokens: list[list[float]]
    signed: bool
    pairs: Packed | None


class Trusted(BaseModel):
    """How far to trust the map, in numbers and in words."""

    picture: Sha256
    other: Sha256 | None = None
    method: str
    target: Index
    label: str
    trust: TrustRow
    trust_line: str
    seconds: float


class Curves(BaseModel):
    """Probabilities while parts are inserted or deleted; scores are scaled to 0 (nothing is left) … 1 (everything)."""

    insertion: list[float]
    deletion: list[float]


class Scores(BaseModel):
    """Areas under the curves; with space=tokens also the order of the patches and the counts at each step.

    ``scale``: of scores in token space, those with no patch and with all, which the curves have as 0 and 1.
    """

    picture: Sha256
    other: Sha256 | None = None
    method: str
    target: Index
    label: str
    insertion: float
    deletion: float
    curves: Curves
    space: Space
    ranks: list[list[int]]
    order: list[int] | None = None
    counts: list[int] | None = None
    scale: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    seconds: float


class Masked(BaseModel):
    """The probability of a class with a subset of the patches; ``full`` is that of the whole picture."""

    picture: Sha256
    other: Sha256 | None = None
    target: Index
    label: str
    measure: Measure
    probability: Measured
    full: Measured
    classes: list[ClassRow]
    kept: int
    space: Space
    seconds: float


class Comparison(BaseModel):
    """One result per method: that of explain, with insertion and deletion; or the method, its call and its error."""

    picture: Sha256
    other: Sha256 | None = None
    model_id: str
    methods: list[str]
    results: list[dict[str, Any]]
    seconds: float


class Accepted(BaseModel):
    """A job that was submitted; follow its events."""

    job: str
    events: str


class JobState(BaseModel):
    """The state of a job; ``result`` or ``error`` once it has ended."""

    job: str
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    position: int | None
    progress: Annotated[float, Field(ge=0, le=1)]
    result: Any = None
    error: str | None = None
