"""GET, POST and DELETE /v1/voices: what can speak, a new voice from a recording, and its end."""

from starlette.responses import JSONResponse

from mlx_cosyh3.errors import CosyH3Error, StageError
from mlx_cosyh3.server import body, voices
from mlx_cosyh3.server.errors import ApiError, closing
from mlx_cosyh3.server.speech import failed

FIELDS = ("model", "name", "text", "user")


async def show(request, client):
    """All voices, those of the models first."""
    service = request.app.state.service
    out = []
    for name, kind in service.models.kinds.items():
        if kind == "speech":
            async with service.models.scheduler(name) as scheduler:
                if (model := scheduler.model) is None:
                    raise closing()
                out += [_about(id, voice, name, service.models.created, "model") for id, voice in model.voices.items()]
    out += [_about(id, voice, model, created, "client") for id, voice, model, created in service.voices]
    return JSONResponse({"object": "list", "data": out})


def _about(id, voice, model, created, owner):
    return {
        "id": id, "object": "voice", "name": voice.name or id, "model": model, "created": created, "owned_by": owner,
        "seconds": round(voice.seconds, 2) if voice.has_prompt else None,
        "transcript": bool(voice.transcript) or voice.transcript_ids is not None,
    }  # fmt: skip


async def read(request):
    """A form with `file`, a recording, and text fields: text (its transcript), name, model."""
    service = request.app.state.service
    with service.upload():
        fields, files = await body.read_form(request, service.limits.upload)
    for given in fields:
        if given not in FIELDS:
            raise ApiError(
                400,
                f"unknown field {given[:60]!r}; there are file, {', '.join(FIELDS)}",
                param=given,
                code="unknown_field",
            )
    if list(files) != ["file"]:
        raise ApiError(400, "the form needs one file, the recording, in the field 'file'", param="file")
    text = fields.get("text", "").strip() or None
    if text is not None and len(text) > service.limits.text:
        raise ApiError(
            400,
            f"text has {len(text)} characters, the limit is {service.limits.text}",
            param="text",
            code="text_too_long",
        )
    name = service.models.find(fields.get("model") or None, "speech")
    label = voices.label(fields.get("name", "")) or "unnamed"
    return name, label, text, files["file"], service.client(request, fields.get("user"))


async def create(request, client, name, label, text, data, who):
    service = request.app.state.service
    # What is decoded of a recording may be much larger than its file: so this, too, is for few at a time.
    with service.slot(), service.upload(), service.voices.place():
        async with service.models.scheduler(name) as scheduler:
            if (model := scheduler.model) is None:
                raise closing()
            model_needs(model)
            samples, rate = await service.models.in_thread(voices.read_recording, data, service.limits.recording)
            ask = service.models.ticket(
                scheduler.call, voices.make, model, samples, rate, text, label, service.models.policy, client=who
            )
            async with ask as ticket:
                try:
                    made = await ticket.aresult()
                except StageError as e:
                    raise failed(e) from e
                except CosyH3Error as e:
                    raise ApiError(400, str(e), param="file", code="invalid_audio") from None
            if made is None:
                raise closing()
            voice, notes = made
            try:
                id = await service.models.in_thread(service.voices.save, voice, undo=service.voices.forget)
            except CosyH3Error as e:
                raise ApiError(507, str(e), code="not_saved") from e
            service.voices.keep(id, voice, name)
    about = _about(id, voice, name, service.models.created, "client")
    return JSONResponse(about | {"notes": notes}, 201)


def model_needs(model):
    """Raise ApiError unless the model can take a recording at all."""
    try:
        model.need("campplus", "speech_tokenizer")
    except CosyH3Error as e:
        raise ApiError(400, str(e), param="model", code="no_voice_cloning") from None


async def delete(request, client):
    id = request.path_params["id"]
    service = request.app.state.service
    service.voices.delete(id)
    return JSONResponse({"id": id, "object": "voice", "deleted": True})
