"""Metrics of a stack: `families` names and fills them, `exporter` serves Prometheus; reads figures, from any thread."""

from kvtier.metrics.families import DEFINITIONS, MetricDefinition, metric_families

__all__ = ["DEFINITIONS", "MetricDefinition", "metric_families"]
