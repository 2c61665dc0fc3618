"""``/v1/models``: what is served. Belongs to the event loop."""

from fastapi import APIRouter

from gapless.server.context import ServerContext
from gapless.server.error_bodies import error_responses, model_not_found
from gapless.server.protocol.models import ModelCard, ModelList

__all__ = ["models_router"]


def models_router(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["models"])
    cards = {
        name: ModelCard(
            id=name,
            object="model",
            created=context.started_at,
            owned_by="gapless",
            max_model_len=context.client.max_model_len,
        )
        for name in context.client.served_model_names
    }

    @router.get("/v1/models", summary="List the models", responses=error_responses(401, 503))
    async def list_models() -> ModelList:
        return ModelList(object="list", data=list(cards.values()))

    @router.get("/v1/models/{model:path}", summary="Describe a model", responses=error_responses(401, 404, 503))
    async def retrieve_model(model: str) -> ModelCard:
        if model not in cards:
            raise model_not_found(model)
        return cards[model]

    return router
