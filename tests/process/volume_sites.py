"""A site whose service has volumes: started, prepared and looked into."""

from __future__ import annotations

from collections import Counter

from tests.process.helpers import ServiceProcess, Site
from tests.process.volumes import BACKEND, RECORDS, VolumeRecords


def make_records(site: Site) -> VolumeRecords:
    """The application's database, and its backend without volumes."""
    (site.root / BACKEND).mkdir()
    made = VolumeRecords(site.root / RECORDS)
    made.make()
    return made


def build(site: Site, *names: str) -> None:
    """Let the backend have these volumes."""
    for name in names:
        (site.root / BACKEND / name).touch()


def start(site: Site, **settings: object) -> ServiceProcess:
    return site.start_program("resourced", **settings)


def statuses(records: VolumeRecords) -> Counter[str]:
    """How many records have which status."""
    return Counter(records.by_name().values())


def times_asked(site: Site) -> Counter[str]:
    return Counter(effect.key for effect in site.seen("ask"))
