"""Pages of metrics as Prometheus asks for them and reads them."""

from __future__ import annotations

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
)
PLAIN_ONLY = "text/plain;version=0.0.4"
UNDERSCORES = "text/plain;version=1.0.0;escaping=underscores"
FORMATS = (PROMETHEUS_2, PROMETHEUS_3, PLAIN_ONLY, UNDERSCORES)
Scrape = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str, content_type: str) -> Scrape:
    """Every sample of a page, by its name and labels."""
    parse = openmetrics.text_string_to_metric_families if "openmetrics" in content_type else None
    families = (parse or text_string_to_metric_families)(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
