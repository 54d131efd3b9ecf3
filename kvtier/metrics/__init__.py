"""Metrics of a stack: names, help texts, one pure function from figures to families; reads statistics, changes nothing.

Nothing here exports metrics. An integration passes the families to the client library that its engine uses.
"""

from kvtier.metrics.families import DEFINITIONS, MetricDefinition, metric_families

__all__ = ["DEFINITIONS", "MetricDefinition", "metric_families"]
