"""Requests and answers; the OpenAPI description is made from these."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import UploadFile
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

TEXT = 200  # letters of a name
CALLS = 4000  # letters of a list of methods, or of parameters as JSON
PATCHES = 100_000  # more than any model has


def _parameters(text: str) -> str:
    """A JSON object, and no NaN in it."""
    if not isinstance(_json(text), dict):
        raise ValueError('expected a JSON object such as {"masks": 256}')
    return text


def _patches(text: str) -> str:
    """A JSON list of whole numbers."""
    given = _json(text)
    if not isinstance(given, list) or not all(type(one) is int and 0 <= one < PATCHES for one in given):
        raise ValueError("expected a JSON list of patch numbers such as [0, 17]")
    return text


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ValueError("expected JSON") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _class(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Name = Annotated[str, Field(max_length=TEXT)]
Class = Annotated[str, BeforeValidator(_class), Field(max_length=TEXT)]
Space = Literal["pixels", "tokens"]
Steps = Annotated[int, Field(ge=1, le=256)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Parameters = Annotated[str, Field(max_length=CALLS), AfterValidator(_parameters)]
Patches = Annotated[str, Field(max_length=8 * PATCHES), AfterValidator(_patches)]
Pair = Annotated[list[int], Field(min_length=2, max_length=2)]
Box = Annotated[list[float], Field(min_length=4, max_length=4)]
Index = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Form(BaseModel):
    """What every form has; the picture is given by exactly one of image, picture and sample."""

    model_config = ConfigDict(extra="forbid")

    image: UploadFile | None = Field(None, description="A picture: JPEG, PNG, WebP, GIF, BMP or AVIF.")
    picture: Sha256 | None = Field(None, description="The id of an earlier upload that is still in memory.")
    sample: Name | None = Field(None, description="The name of a sample, see /api/samples.")
    model: Name | None = Field(None, description="One of /api/models; default: the first.")


class PredictForm(Form):
    """Which classes?"""

    wait: bool = True
    top: Annotated[int, Field(ge=1, le=100)] = 5


class PictureForm(Form):
    """Why this class?"""

    method: Name | None = Field(None, description="One of /api/methods; default: the model's.")
    target: Class | None = Field(None, description="The class, by number or name; default: the predicted one.")
    against: Class | None = Field(None, description="Explain the target as opposed to this class.")
    params: Parameters | None = Field(None, description='Parameters of the method, as JSON: {"masks": 256}.')


class ExplainForm(PictureForm):
    """Why this class?"""

    wait: bool = True


class ScoreForm(ExplainForm):
    """How good is the map?"""

    steps: Steps = 32
    space: Space = "pixels"


class MaskForm(Form):
    """What if these patches were not there?"""

    wait: bool = True
    removed: Patches | None = Field(None, description="Patch numbers as a JSON list: these go.")
    kept: Patches | None = Field(None, description="Patch numbers as a JSON list: only these stay.")
    target: Class | None = None


class CompareForm(Form):
    """What do many methods say?"""

    wait: bool = True
    methods: Annotated[str, Field(max_length=CALLS)] | None = Field(None, description="Names, with commas between.")
    target: Class | None = None
    against: Class | None = None
    score: bool = True
    steps: Steps = 32
    space: Space = "pixels"


class Problem(BaseModel):
    """Anything that went wrong, in one sentence."""

    error: str


class Health(BaseModel):
    """Whether the server works, and how much waits."""

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
    view: Literal["tokens", "features"]
    default_method: str
    note: str
    labels: list[str]


class Parameter(BaseModel):
    """One parameter of a method, as a form asks for it."""

    name: str
    kind: Literal["integer", "number", "boolean", "choice", "text", "numbers"]
    default: Any
    choices: list[Any] | None
    optional: bool


class Method(BaseModel):
    """A method; ``supported`` is "yes" or the reason why it cannot explain the model."""

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
    """A picture that the server has."""

    name: str
    title: str
    model: str | None
    url: str
    thumbnail: str


class ClassRow(BaseModel):
    """A class and its probability."""

    index: Index
    label: str
    probability: Probability


class Prediction(BaseModel):
    """The likeliest classes."""

    picture: Sha256
    model: str
    size: Pair
    box: Box
    grid: Pair
    classes: list[ClassRow]
    seconds: float


class Explained(BaseModel):
    """The JSON of ``vitrail explain --json``, with the map as rows of numbers."""

    model_config = ConfigDict(extra="allow")

    picture: Sha256
    model_id: str
    method: str
    params: dict[str, Any]
    target: Index
    label: str
    probability: Probability
    against: int | None
    against_label: str | None
    extras: dict[str, float | None]
    seconds: float
    box: Box
    grid: Pair
    shape: Pair
    reduced: bool
    values: list[list[float]]
    tokens: list[list[float]]
    signed: bool


class Curves(BaseModel):
    """Probabilities while parts appear or vanish."""

    insertion: list[float]
    deletion: list[float]


class Scores(BaseModel):
    """Areas under the curves; with space=tokens also the order of the patches and how many are changed."""

    picture: Sha256
    method: str
    target: Index
    label: str
    insertion: float
    deletion: float
    curves: Curves
    space: Literal["pixels", "tokens"]
    ranks: list[list[int]]
    order: list[int] | None = None
    counts: list[int] | None = None
    seconds: float


class Masked(BaseModel):
    """A class's probability with only some patches; ``full`` is that of the whole picture."""

    picture: Sha256
    target: Index
    label: str
    probability: Probability
    full: Probability
    classes: list[ClassRow]
    kept: int
    space: Literal["tokens", "pixels"]
    seconds: float


class Comparison(BaseModel):
    """One result per method: as of explain, with insertion and deletion; or the method and its error."""

    picture: Sha256
    model_id: str
    methods: list[str]
    results: list[dict[str, Any]]
    seconds: float


class Accepted(BaseModel):
    """A job that was begun; follow its events."""

    job: str
    events: str


class JobState(BaseModel):
    """How far a job is; ``result`` or ``error`` once it is over."""

    job: str
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    position: int | None
    progress: Annotated[float, Field(ge=0, le=1)]
    result: Any = None
    error: str | None = None
