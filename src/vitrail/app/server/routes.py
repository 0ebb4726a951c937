"""The routes: each reads its form, submits a job and returns the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Form, Path, Query, Request, Response, UploadFile
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from vitrail.app.server import schemas as s
from vitrail.app.server.jobs import Job, Task, cancelled_error
from vitrail.app.server.reference import render_reference
from vitrail.app.server.responses import RequestError, to_json
from vitrail.app.server.service import Picture, Service
from vitrail.app.server.uploads import FormRoute
from vitrail.calls import split_list
from vitrail.errors import VitrailError
from vitrail.version import __version__

PAGE = files("vitrail.app") / "page"
JSON = "application/json"
MULTIPART = "multipart/form-data"
MAX_METHODS = 100
# Fields of a form that a task has not among its fields.
ELSEWHERE = {"image", "picture", "sample", "other", "other_picture", "other_sample", "model", "wait"}

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": s.Problem, "description": description}
    for status, description in (
        (400, "The form cannot be parsed"),
        (401, "A token is required"),
        (403, "A request from another site, or for another host"),
        (404, "No such model, sample or job"),
        (408, "The job timed out"),
        (409, "The job was cancelled"),
        (410, "The picture is no longer in memory"),
        (413, "Too many bytes or pixels"),
        (415, "Not an image, or not a form"),
        (422, "An invalid value"),
        (429, "The queue is full; see Retry-After"),
    )
}
ACCEPTED: dict[int | str, dict[str, Any]] = {202: {"model": s.Accepted, "description": "With wait=false: a job"}}

# Path, form, answer (None: a PNG) and description.
TASKS: tuple[tuple[str, type[s.Form], type[BaseModel] | None, str], ...] = (
    ("predict", s.PredictForm, s.Prediction, "The most probable classes, and those asked about."),
    ("explain", s.ExplainForm, s.Explained, "Which parts of the picture are evidence for what is asked."),
    ("trust", s.TrustForm, s.Trusted, "How far to trust that map, with fewer than a hundred forward passes."),
    ("score", s.ScoreForm, s.Scores, "How faithful the map is: insertion and deletion."),
    ("mask", s.MaskForm, s.Masked, "The probability, or the similarity, with a subset of the patches."),
    ("compare", s.CompareForm, s.Comparison, "The maps of many methods; with wait=false each is an event of the job."),
    ("picture", s.PictureForm, None, "The explanation as a labelled PNG."),
)


def catalogue_routes(service: Service) -> APIRouter:
    """Models, methods, samples and uploads."""
    router = APIRouter(prefix="/api", tags=["catalogue"], responses=ERRORS)

    @router.get("/health", response_model=s.Health)
    async def health() -> Response:
        """Whether the server is running, and the number of waiting jobs."""
        waiting = len(service.jobs.quick) + len(service.jobs.long)
        return Response(to_json({"status": "ok", "version": __version__, "queue": waiting}), media_type=JSON)

    @router.get("/models", response_model=list[s.Model])
    async def models() -> Response:
        """The models that the server was started with."""
        return Response(service.models_json, media_type=JSON)

    @router.get("/methods", response_model=list[s.Method])
    async def methods(model: Annotated[str | None, Query(max_length=s.MAX_NAME)] = None) -> Response:
        """Every method, whether it supports the model, and a form for its parameters."""
        return Response(service.methods_json[service.model(model)], media_type=JSON)

    @router.get("/samples", response_model=list[s.SampleRow])
    async def samples() -> Response:
        """Sample pictures."""
        return Response(service.samples_json, media_type=JSON)

    @router.get("/pictures/{picture}", response_class=Response, responses={200: {"content": {"image/*": {}}}})
    async def picture(picture: Annotated[str, Path(pattern="^[0-9a-f]{64}$")]) -> Response:
        """The file of an earlier upload that is still in memory."""
        upload = service.picture(picture)
        return Response(upload.data, media_type=upload.type, headers={"Content-Security-Policy": "sandbox"})

    return router


def task_routes(service: Service) -> APIRouter:
    """Predictions, explanations and scores of a picture."""
    router = APIRouter(prefix="/api", tags=["pictures"], route_class=FormRoute, responses=ERRORS)

    for kind, form_type, answer_type, description in TASKS:
        answer: dict[str, Any] = {"response_model": answer_type, "responses": ACCEPTED}
        if answer_type is None:
            answer = {"response_class": Response, "responses": {200: {"content": {"image/png": {}}}}}
        endpoint = _endpoint(service, kind, form_type)
        router.add_api_route(f"/{kind}", endpoint, methods=["POST"], name=kind, description=description, **answer)
    return router


def _endpoint(service: Service, kind: str, form_type: type[s.Form]) -> Callable[..., Awaitable[Response]]:
    async def endpoint(form: s.Form, request: Request) -> Response:
        """Waits for the answer, or returns the job."""
        picture, other = await find_picture(service, form), await find_other(service, form)
        task = make_task(kind, form, service.model(form.model), picture, other)
        wait = getattr(form, "wait", True)
        job = service.jobs.submit(task, keep=not wait)
        if not wait:
            return Response(to_json({"job": job.id, "events": f"/api/jobs/{job.id}/events"}), 202, media_type=JSON)
        await finish(job, request.receive, service.dispatcher.cancel)
        if job.answer is None:
            raise job.error or cancelled_error()
        return Response(job.answer.body, media_type=job.answer.type)

    endpoint.__annotations__["form"] = Annotated[form_type, Form(media_type=MULTIPART)]
    return endpoint


def job_routes(service: Service) -> APIRouter:
    """Jobs in progress."""
    router = APIRouter(prefix="/api/jobs", tags=["jobs"], responses=ERRORS)

    @router.get("/{job}", response_model=s.JobState)
    async def state(job: Annotated[str, Path(max_length=64)]) -> Response:
        """The state and progress of a job, and its result when it is done."""
        return Response(_job_state(service.jobs.find(job), service), media_type=JSON)

    @router.get("/{job}/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
    async def events(job: Annotated[str, Path(max_length=64)]) -> Response:
        """Server-sent events; closing the stream before the end cancels the job."""
        return EventStream(service.jobs.find(job), service.dispatcher.cancel)

    @router.delete("/{job}", status_code=204, response_class=Response)
    async def cancel(job: Annotated[str, Path(max_length=64)]) -> Response:
        """Cancels a job."""
        service.dispatcher.cancel(service.jobs.find(job))
        return Response(status_code=204)

    return router


def page_routes(service: Service) -> APIRouter:
    """The page, its samples, and the reference of the API."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index() -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html")

    @router.get("/samples/{file}")
    async def sample(file: str) -> Response:
        if file not in service.samples:
            raise RequestError(404, "there is no such sample: see /api/samples.")
        return Response(service.samples[file].data, media_type=service.samples[file].type)

    @router.get("/api/docs")
    async def docs(request: Request) -> Response:
        return Response(render_reference(request.app.openapi()), media_type="text/html")

    @router.get("/api/docs.css")
    async def style() -> Response:
        return Response((PAGE / "reference.css").read_bytes(), media_type="text/css")

    return router


async def find_picture(service: Service, form: s.Form) -> Picture:
    """The picture that the form names."""
    names = [name for name in ("image", "picture", "sample") if getattr(form, name) is not None]
    if len(names) != 1:
        listed = " and ".join(names) or "none"
        raise RequestError(422, f"expected exactly one of image, picture and sample, but got {listed}.")
    return await _stored(service, form.image, form.picture, form.sample)


async def find_other(service: Service, form: s.Form) -> Picture | None:
    """The picture that it is compared with; None if something else is asked."""
    if not isinstance(form, s.QuestionForm):
        return None
    sides = [
        ("target", "group"),
        ("against", "against_group"),
        ("other", "other_picture", "other_sample"),
        ("box", "region"),
        ("group", "against_group"),
    ]
    target, against, other, place, groups = ([n for n in side if getattr(form, n) is not None] for side in sides)
    elsewhere = [*(target or against)[:1], *other[:1]], [*place[:1], *(groups or other)[:1]]
    for names in (target, against, other, place, *elsewhere):
        if len(names) > 1:
            raise RequestError(422, f"{' and '.join(names)} ask different questions: send only one of them.")
    if other:
        return await _stored(service, form.other, form.other_picture, form.other_sample)
    if form.measure is not None:
        raise RequestError(422, "measure is that of a similarity: send other, other_picture or other_sample, too.")
    return None


async def _stored(service: Service, file: UploadFile | None, picture: str | None, sample: str | None) -> Picture:
    if file is not None:
        return await service.add_upload(await file.read())
    return service.sample(sample or "") if picture is None else service.picture(picture)


def make_task(kind: str, form: s.Form, model: str, picture: Picture, other: Picture | None = None) -> Task:
    """The task of a form; fields that were not sent are left out."""
    fields: dict[str, Any] = form.model_dump(exclude=ELSEWHERE, exclude_none=True)
    for name in ("params", "removed", "kept", "region"):
        if name in fields:
            fields[name] = json.loads(fields[name])
    if isinstance(form, s.MaskForm) and form.removed is not None and form.kept is not None:
        raise RequestError(422, "expected either removed or kept, but got both.")
    if "methods" in fields:
        fields["methods"] = _split_methods(fields["methods"])
    return Task(kind, model, picture.id, fields, None if other is None else other.id)


def _split_methods(text: str) -> list[str]:
    try:
        calls = list(dict.fromkeys(split_list(text)))
    except VitrailError as error:
        raise RequestError(422, f"methods: {error}") from None
    if not 1 <= len(calls) <= MAX_METHODS:
        raise RequestError(422, f"methods lists {len(calls)} names, expected 1 to {MAX_METHODS}, comma-separated.")
    return calls


def _job_state(job: Job, service: Service) -> bytes:
    position = service.jobs.queue(job.task).position(job)
    state: dict[str, Any] = {"job": job.id, "state": job.state, "position": position, "progress": job.fraction}
    if job.error is not None:
        state["error"] = str(job.error)
    result = b"" if job.answer is None else b',"result":' + job.answer.body
    return to_json(state)[:-1] + result + b"}"


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has closed the connection, or sends more than it may."""
    with suppress(RequestError):
        while (await receive())["type"] != "http.disconnect":
            pass


async def finish(job: Job, receive: Receive, cancel: Callable[[Job], None]) -> None:
    """Waits until the job has ended; a client that disconnects cancels its job."""
    waits = [asyncio.create_task(job.ended.wait()), asyncio.create_task(wait_for_disconnect(receive))]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        cancel(job)  # does nothing if it has ended


class EventStream(StreamingResponse):
    """The server-sent events of a job; closing the stream before the end cancels the job."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, cancel: Callable[[Job], None]) -> None:
        super().__init__(job.stream())
        self._job, self._cancel = job, cancel

    async def listen_for_disconnect(self, receive: Receive) -> None:
        await wait_for_disconnect(receive)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel(self._job)
