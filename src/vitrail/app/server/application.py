"""The application: routes, each a few lines, and what all of them share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Form, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from vitrail.app.server import schemas as s
from vitrail.app.server.encoding import as_json
from vitrail.app.server.errors import Refused
from vitrail.app.server.events import EventStream, finished
from vitrail.app.server.forms import picture_of, task_of
from vitrail.app.server.jobs import Job
from vitrail.app.server.reference import STYLE, reference
from vitrail.app.server.security import Guard
from vitrail.app.server.service import Service
from vitrail.app.server.settings import Settings
from vitrail.app.server.uploads import FormRoute
from vitrail.app.server.validation import sentence
from vitrail.version import __version__

STATIC = files("vitrail.app") / "page"
JSON = "application/json"
MULTIPART = "multipart/form-data"

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": s.Problem, "description": meaning}
    for status, meaning in (
        (400, "The form cannot be read"),
        (401, "A token is needed"),
        (403, "Another site, or another host"),
        (404, "No such model, sample or job"),
        (408, "The job took too long"),
        (409, "The job was cancelled"),
        (410, "The picture is no longer in memory"),
        (413, "Too many bytes or pixels"),
        (415, "Not a picture, or not a form"),
        (422, "A value that cannot be used"),
        (429, "The queue is full; see Retry-After"),
    )
}
LATER: dict[int | str, dict[str, Any]] = {202: {"model": s.Accepted, "description": "With wait=false: a job"}}


def create_app(settings: Settings, models: list[str]) -> FastAPI:
    """The whole application; its processes start with its lifespan, or before by ``app.state.service.start()``."""
    service = Service(settings, models)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="vitrail",
        version=__version__,
        description="See through any Vision Transformer.",
        lifespan=lifespan,
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.add_middleware(Guard, settings=settings)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.include_router(offers(service))
    app.include_router(work(service))
    app.include_router(jobs(service))
    app.include_router(pages(service, app))
    app.mount("/static", StaticFiles(directory=str(STATIC)), name="static")
    return app


def offers(service: Service) -> APIRouter:
    """What there is."""
    router = APIRouter(prefix="/api", tags=["what there is"], responses=PROBLEMS)

    @router.get("/health", response_model=s.Health)
    async def health() -> Response:
        """Whether the server works, and how many jobs wait."""
        waiting = len(service.jobs.quick) + len(service.jobs.long)
        return Response(as_json({"status": "ok", "version": __version__, "queue": waiting}), media_type=JSON)

    @router.get("/models", response_model=list[s.Model])
    async def models() -> Response:
        """The models that this server was started with."""
        return Response(service.models_json, media_type=JSON)

    @router.get("/methods", response_model=list[s.Method])
    async def methods(model: Annotated[str | None, Query(max_length=s.TEXT)] = None) -> Response:
        """Every method, whether it can explain the model, and its parameters as a form."""
        return Response(service.methods_json[service.model(model)], media_type=JSON)

    @router.get("/samples", response_model=list[s.SampleRow])
    async def samples() -> Response:
        """Pictures to try."""
        return Response(as_json([sample.row() for sample in service.samples.values()]), media_type=JSON)

    @router.get("/pictures/{picture}", response_class=Response, responses={200: {"content": {"image/*": {}}}})
    async def picture(picture: Annotated[str, Path(pattern="^[0-9a-f]{64}$")]) -> Response:
        """An earlier upload that is still in memory, as it came."""
        found = service.earlier(picture)
        return Response(found.data, media_type=found.kind, headers={"Content-Security-Policy": "sandbox"})

    return router


def work(service: Service) -> APIRouter:
    """What can be asked of a picture."""
    router = APIRouter(prefix="/api", tags=["pictures"], route_class=FormRoute, responses=PROBLEMS)

    @router.post("/predict", response_model=s.Prediction, responses=LATER)
    async def predict(form: Annotated[s.PredictForm, Form(media_type=MULTIPART)], request: Request) -> Response:
        """The likeliest classes."""
        return await _answer(service, "predict", form, request)

    @router.post("/explain", response_model=s.Explained, responses=LATER)
    async def explain(form: Annotated[s.ExplainForm, Form(media_type=MULTIPART)], request: Request) -> Response:
        """Which parts of the picture speak for the class."""
        return await _answer(service, "explain", form, request)

    @router.post("/score", response_model=s.Scores, responses=LATER)
    async def score(form: Annotated[s.ScoreForm, Form(media_type=MULTIPART)], request: Request) -> Response:
        """How good the map is: insertion and deletion."""
        return await _answer(service, "score", form, request)

    @router.post("/mask", response_model=s.Masked, responses=LATER)
    async def mask(form: Annotated[s.MaskForm, Form(media_type=MULTIPART)], request: Request) -> Response:
        """The probability with only some patches present."""
        return await _answer(service, "mask", form, request)

    @router.post("/compare", response_model=s.Comparison, responses=LATER)
    async def compare(form: Annotated[s.CompareForm, Form(media_type=MULTIPART)], request: Request) -> Response:
        """What many methods say; with wait=false each is an event of the job."""
        return await _answer(service, "compare", form, request)

    @router.post("/picture", response_class=Response, responses={200: {"content": {"image/png": {}}}})
    async def picture(form: Annotated[s.PictureForm, Form(media_type=MULTIPART)], request: Request) -> Response:
        """The explanation as a labelled picture, PNG."""
        return await _answer(service, "picture", form, request)

    return router


def jobs(service: Service) -> APIRouter:
    """Work that goes on."""
    router = APIRouter(prefix="/api/jobs", tags=["jobs"], responses=PROBLEMS)

    @router.get("/{job}", response_model=s.JobState)
    async def state(job: Annotated[str, Path(max_length=64)]) -> Response:
        """How far a job is, and its result once it is done."""
        return Response(_state(service.jobs.find(job), service), media_type=JSON)

    @router.get("/{job}/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
    async def events(job: Annotated[str, Path(max_length=64)]) -> Response:
        """Server-sent events; closing the stream before the end cancels the job."""
        return EventStream(service.jobs.find(job), service.cancel)

    @router.delete("/{job}", status_code=204, response_class=Response)
    async def cancel(job: Annotated[str, Path(max_length=64)]) -> Response:
        """Cancels a job."""
        service.cancel(service.jobs.find(job))
        return Response(status_code=204)

    return router


def pages(service: Service, app: FastAPI) -> APIRouter:
    """What a browser opens."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index() -> Response:
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html")

    @router.get("/samples/{file}")
    async def sample(file: str) -> Response:
        for one in service.samples.values():
            if one.file == file:
                return Response(one.data, media_type=one.kind)
        raise Refused(404, "there is no such sample: /api/samples lists them.")

    @router.get("/api/docs")
    async def docs() -> Response:
        return Response(reference(app.openapi()), media_type="text/html")

    @router.get("/api/docs.css")
    async def style() -> Response:
        return Response(STYLE, media_type="text/css")

    return router


async def _answer(service: Service, kind: str, form: s.Form, request: Request) -> Response:
    """Waits for the work, or says where to follow it."""
    task = task_of(kind, form, service.model(form.model), await picture_of(service, form))
    wait = getattr(form, "wait", True)
    job = service.submit(task, follow=not wait)
    if not wait:
        return Response(as_json({"job": job.id, "events": f"/api/jobs/{job.id}/events"}), 202, media_type=JSON)
    found = (await finished(job, request.receive, service.cancel)).answer
    assert found is not None
    return Response(found.body, media_type=found.type)


def _state(job: Job, service: Service) -> bytes:
    place = service.jobs.lane(job.task).position(job)
    state: dict[str, Any] = {"job": job.id, "state": job.state, "position": place, "progress": job.share}
    if job.error is not None:
        state["error"] = str(job.error)
    text = as_json(state)
    if job.answer is None:
        return text
    return text[:-1] + b',"result":' + job.answer.body + b"}"


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {} if error.retry is None else {"Retry-After": str(error.retry)}
    return JSONResponse({"error": str(error)}, error.status, headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": f"{error.detail}."}, error.status_code, error.headers)


async def _invalid(_: Request, error: Exception) -> Response:
    """The first of the wrong fields; what was sent is not repeated, it may be long."""
    assert isinstance(error, RequestValidationError)
    return JSONResponse({"error": sentence(error.errors()[0])}, 422)
