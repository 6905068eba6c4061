"""Use-cases: the only place that orders effects."""
