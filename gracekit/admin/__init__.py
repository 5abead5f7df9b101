"""The HTTP endpoint of one run: probes, and the verbs and listings for operators, as JSON.

It needs the extra `web` (starlette and uvicorn), and is imported only if `GRACEKIT_ADMIN` or the
embedding program asks for it.
"""
