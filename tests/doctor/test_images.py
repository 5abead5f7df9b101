"""What doctor sees in a Dockerfile."""

from __future__ import annotations

import pytest

from gracekit.config.settings import Settings
from gracekit.doctor.finding import Level
from gracekit.doctor.images import check_dockerfile, read_dockerfile
from tests.doctor.kit import levels

GOOD = """
FROM python:3.11 AS build
USER root
CMD gracekit run other:svc

FROM python:3.11-slim
WORKDIR /app
ENV GRACEKIT_STORE_URL="sqlite:////data/store.db" \\
    # also inside of an instruction
    GRACEKIT_TRANSPORT_URL=amqp://broker/v
USER 10001:10001
CMD ["gracekit", "run", "compute:svc"]
"""


@pytest.fixture
def image(tmp_path):
    def write(*changes: tuple[str, str]) -> dict[str, Level]:
        text = GOOD
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "Dockerfile"
        path.write_text(text)
        return levels(check_dockerfile(Settings(host="node-1"), path))

    return write


def test_a_good_dockerfile_is_all_ok(image):
    """Earlier stages only build, so they are not examined."""
    assert set(image().values()) == {Level.OK}


LIST = 'CMD ["gracekit", "run", "compute:svc"]'


@pytest.mark.parametrize(
    ("old", "new", "check", "level"),
    [
        (LIST, "CMD gracekit run compute:svc", "CMD", Level.FAIL),
        (LIST, "CMD exec gracekit run compute:svc", "CMD", Level.OK),
        (LIST, 'ENTRYPOINT ["gracekit", "run"]\nCMD ["compute:svc"]', "CMD", Level.OK),
        (LIST, 'ENTRYPOINT gracekit run compute:svc\nCMD ["x"]', "CMD", Level.FAIL),
        (LIST, 'ENTRYPOINT ["sh", "-c"]\nCMD ["gracekit run compute:svc"]', "CMD", Level.FAIL),
        (LIST, "", "CMD", Level.WARN),
        (LIST, 'CMD ["gracekit", "run", "c:svc", "--drain-timeout", "x"]', "settings", Level.FAIL),
        ("USER 10001:10001", "STOPSIGNAL SIGKILL", "STOPSIGNAL", Level.FAIL),
        ("USER 10001:10001", "STOPSIGNAL 3", "STOPSIGNAL", Level.OK),
        ("USER 10001:10001", "", "USER", Level.WARN),
        ("USER 10001:10001", "USER 0:10001", "USER", Level.WARN),
    ],
)
def test_what_an_image_does_to_a_stop_is_found(image, old, new, check, level):
    """Cases: a shell in between, a signal without a drain, and root."""
    assert image((old, new))[check] is level


def test_a_file_that_is_no_dockerfile_is_refused(tmp_path):
    """Such as a manifest that was given by mistake."""
    path = tmp_path / "thumbs.yaml"
    path.write_text("kind: StatefulSet\n")

    (found,) = check_dockerfile(Settings(host="node-1"), path)

    assert found.level is Level.FAIL
    assert "it has no line FROM" in found.seen


def test_variables_are_read_in_both_forms():
    """Cases: quotes and escapes, and the old form without an equals sign."""
    text = 'FROM x\nENV A=1 B="b \\"\\$c\\"" \nENV C d e\n'

    assert read_dockerfile(text).variables == {"A": "1", "B": 'b "$c"', "C": "d e"}
