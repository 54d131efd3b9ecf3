"""Speed of a tier: a latency and a bandwidth for each direction, measured or assumed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtier.errors import ConfigError
from kvtier.types.jobs import JobKind
from kvtier.types.keys import CPU, FS, REMOTE, Medium

GIB = 1 << 30
PREFILL_TOKENS_PER_SECOND = 10_000.0
"""What is assumed of an engine: one GPU with a model of eight billion parameters."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Direction of a tier: jobs share `bytes_per_second`, and each takes `latency_seconds` more."""

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Service:
    """Both directions of a tier; `source` is where the figures are from."""

    load: Rate
    store: Rate
    source: str = "assumed"

    def of(self, kind: JobKind) -> Rate:
        """The direction of a job."""
        return self.load if kind is JobKind.LOAD else self.store

    def to_json(self) -> dict[str, object]:
        """The figures for programs."""
        return asdict(self)


ASSUMED: Mapping[Medium, Service] = {
    CPU: Service(Rate(50e-6, 12 * GIB), Rate(50e-6, 12 * GIB)),
    FS: Service(Rate(150e-6, 2 * GIB), Rate(100e-6, 1 * GIB)),
    REMOTE: Service(Rate(2e-3, 1 * GIB), Rate(2e-3, 1 * GIB)),
}
"""What is assumed of a medium that was not measured: a PCIe 4 link, one NVMe disk, a store in a 10 Gbit/s network."""


class _Measured(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True)


class MeasuredFigure(_Measured):
    """A line of a tier in the figures of `kvtier bench --json`."""

    move: str
    block_bytes: int | None = None
    gib_per_second: float = Field(ge=0)
    single_p50_us: float | None = None

    def rate(self, block_bytes: int) -> Rate:
        """Latency is what one block alone took beyond its share of the bandwidth."""
        bytes_per_second = self.gib_per_second * GIB
        alone = (self.single_p50_us or 0.0) / 1e6
        return Rate(max(0.0, alone - block_bytes / bytes_per_second), bytes_per_second)


class MeasuredTier(_Measured):
    """A tier in the figures of `kvtier bench --json`."""

    name: str
    medium: str = ""
    figures: tuple[MeasuredFigure, ...] = ()

    def best(self, move: str, row_bytes: int) -> MeasuredFigure | None:
        """The figure of a move whose block size is nearest to a row's, as a ratio."""
        found = [figure for figure in self.figures if figure.move == move and figure.block_bytes]
        found = [figure for figure in found if figure.gib_per_second > 0]
        return min(found, key=lambda figure: abs(math.log((figure.block_bytes or 1) / row_bytes)), default=None)


class Calibration(_Measured):
    """The figures of `kvtier bench --json`."""

    tiers: tuple[MeasuredTier, ...] = ()

    def service(self, name: str, medium: Medium, row_bytes: int) -> Service:
        """The tier's own figures; where it has several places, those of the last, which are all roots together."""
        assumed = ASSUMED.get(medium, ASSUMED[REMOTE])
        measured = [tier for tier in self.tiers if tier.name == name]
        for tier in reversed(measured):
            load, store = tier.best("load", row_bytes), tier.best("store", row_bytes)
            if load is not None and store is not None:
                return Service(load.rate(load.block_bytes or 0), store.rate(store.block_bytes or 0), "measured")
        return assumed

    def of_medium(self, medium: Medium, row_bytes: int) -> Service:
        """The figures of the first tier of a medium that was measured, whatever its name."""
        names = [tier.name for tier in self.tiers if tier.medium == medium]
        found = [self.service(name, medium, row_bytes) for name in names]
        assumed = ASSUMED.get(medium, ASSUMED[REMOTE])
        return next((service for service in found if service is not assumed), assumed)


def read_calibration(path: Path | None) -> Calibration:
    """Read figures of `kvtier bench --json`; nothing measured without a file. Raises ConfigError for another file."""
    if path is None:
        return Calibration()
    try:
        document = json.loads(path.read_bytes())
        if document.get("command") != "bench":
            raise ConfigError("holds no figures of `kvtier bench --json`", str(path))
        return Calibration.model_validate(document)
    except (ValueError, AttributeError, ValidationError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("holds no figures of `kvtier bench --json`", str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot read it: {error.strerror}", str(path)) from None


def describe(services: Sequence[tuple[str, Service]]) -> str:
    """A line for people: the speed assumed or measured of each tier."""
    return "; ".join(
        f"{name} {service.source}: load {_rate_text(service.load)}, store {_rate_text(service.store)}"
        for name, service in services
    )


def _rate_text(rate: Rate) -> str:
    return f"{rate.bytes_per_second / GIB:.2f} GiB/s + {rate.latency_seconds * 1e6:.0f} us"
