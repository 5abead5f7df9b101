"""The service that both sites call: it makes thumbnails."""

from __future__ import annotations

from gracekit import Context, Service

svc = Service("thumbnails")


@svc.rpc(on_interrupt="retry")
async def shrink(_ctx: Context, picture: str, width: int) -> str:
    """Make one, and return the name of its file."""
    if width <= 0:
        raise ValueError(f"a width of {width} pixels")
    return f"{picture.partition('.')[0]}-{width}.jpg"
